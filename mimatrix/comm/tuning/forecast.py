"""What the described cluster tells about plans: schedules fitted to it, and what the simulator expects of them.

MIMATRIX_CLUSTER names the description; its device number i is the job's rank i.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mimatrix.cluster import Cluster, Fabric, load_cluster
from mimatrix.collectives import (
    Collective,
    Schedule,
    Wishes,
    fit,
    nic_rates,
    relabelled,
    shares_by_bandwidth,
)
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.core.errors import UnsuitedError
from mimatrix.netsim import Costs, replay

_UNLIKE = 1.1
_HOPELESS = 1.25
"""A plan that the simulator finds this many times slower than the best is not even measured."""


class Forecast:
    """Predictions for a job whose rank i is device i of `cluster`. A round costs `costs.sync_s` beside its data."""

    def __init__(self, cluster: Cluster, costs: Costs = Costs(sync_s=200e-6)) -> None:  # noqa: B008 (a value)
        self._cluster, self._costs = cluster, costs
        self._schedules: dict[tuple[AlgorithmChoice, Collective], Schedule] = {}

    @cached_property
    def _fabric(self) -> Fabric:
        return Fabric(self._cluster)

    @cached_property
    def _rates(self) -> list[float]:
        everyone = range(len(self._cluster.device_names))
        return [float(rate) for rate in nic_rates(self._fabric, everyone)]

    def by_bandwidth(self, choice: AlgorithmChoice) -> AlgorithmChoice | None:
        """The same plan with shares by bandwidth, where NICs are unlike."""
        if not np.isfinite(self._rates).all() or max(self._rates) < _UNLIKE * min(self._rates):
            return None
        return replace(choice, shares=shares_by_bandwidth(self._rates, choice.segments).shares)

    def suits(self, choice: AlgorithmChoice, collective: Collective) -> bool:
        """Whether the algorithm can run on this network."""
        try:
            self.schedule(choice, collective)
        except UnsuitedError:
            return False
        return True

    def schedule(self, choice: AlgorithmChoice, collective: Collective) -> Schedule:
        """The algorithm fitted to the network (a ring's order, HDRM's mapping), in the job's own ranks."""
        key = (choice, collective)
        if key not in self._schedules:
            wishes = Wishes(segments=choice.segments, shares=choice.shares or "equal")
            fitted = fit(choice.algorithm, self._fabric, collective, wishes)
            self._schedules[key] = relabelled(fitted.schedule, fitted.placement)
        return self._schedules[key]

    def seconds(self, choice: AlgorithmChoice, collective: Collective, size: int) -> float:
        """How long it should take."""
        return replay(self.schedule(choice, collective), self._cluster, None, size, costs=self._costs).seconds

    def worth_trying(
        self, choices: Sequence[AlgorithmChoice], collective: Collective, size: int
    ) -> list[AlgorithmChoice]:
        """Without those that are hopeless by the simulator; the native collective stays, whatever it may be."""
        ours = [choice for choice in choices if choice.transport != "c10d"]
        expected = {choice: self.seconds(choice, collective, size) for choice in ours}
        limit = _HOPELESS * min(expected.values(), default=0.0)
        return [choice for choice in choices if choice.transport == "c10d" or expected[choice] <= limit]


def forecast_for(members: Sequence[int], ranks: int) -> Forecast | None:
    """A forecast for these ranks of a job, if they are all of it and its cluster is described."""
    named = os.environ.get("MIMATRIX_CLUSTER", "")
    if not named or not Path(named).is_file() or tuple(members) != tuple(range(ranks)):
        return None
    cluster = load_cluster(named)
    return Forecast(cluster) if len(cluster.device_names) == ranks else None
