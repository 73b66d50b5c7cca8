"""What a known cluster says about algorithms: schedules fitted to it, and the simulator's times."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from mimatrix.cluster import Fabric
from mimatrix.collectives import (
    Collective,
    FitOptions,
    Schedule,
    fit,
    nic_rates,
    relabel,
    shares_by_bandwidth,
)
from mimatrix.collectives.catalog import AlgorithmRequest, build
from mimatrix.collectives.hierarchical import Groups
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.tuning.known_cluster import KnownCluster
from mimatrix.core.errors import UnsuitedError
from mimatrix.netsim import Costs, replay

_UNEVEN_RATIO = 1.1
_HOPELESS_RATIO = 1.25
"""A choice that the simulator finds this many times slower than the best is not measured."""
_HOPELESS_RATIO_MEASURED = 2.0
"""The same for a cluster that an earlier job measured: the network may have changed since."""


class Forecast:
    """Predictions for a job whose rank i is device i of the cluster. Each round adds `costs.sync_s`.

    `hosts` has the ranks of each host.
    """

    def __init__(self, known: KnownCluster, hosts: Groups, costs: Costs = Costs(sync_s=200e-6)) -> None:  # noqa: B008 (a value)
        self.known = known
        self._cluster, self._hosts, self._costs = known.cluster, hosts, costs
        self._schedules: dict[tuple[AlgorithmChoice, Collective], Schedule] = {}

    @cached_property
    def _fabric(self) -> Fabric:
        return Fabric(self._cluster)

    @cached_property
    def _rates(self) -> list[float]:
        devices = range(len(self._cluster.device_names))
        return [float(rate) for rate in nic_rates(self._fabric, devices)]

    def by_bandwidth(self, choice: AlgorithmChoice) -> AlgorithmChoice | None:
        """Return the choice with shares by bandwidth, or None if all NICs are alike."""
        if not np.isfinite(self._rates).all() or max(self._rates) < _UNEVEN_RATIO * min(self._rates):
            return None
        return replace(choice, shares=shares_by_bandwidth(self._rates, choice.segments).shares)

    def suits(self, choice: AlgorithmChoice, collective: Collective) -> bool:
        """Return whether the algorithm can run on this network."""
        try:
            self.schedule(choice, collective)
        except UnsuitedError:
            return False
        return True

    def schedule(self, choice: AlgorithmChoice, collective: Collective) -> Schedule:
        """Return the algorithm fitted to the network (a ring's order, HDRM's mapping), in the ranks of the job."""
        key = (choice, collective)
        if key not in self._schedules and choice.transport == "mixed":
            ranks = len(self._cluster.device_names)
            request = AlgorithmRequest(collective, ranks, choice.shares, choice.segments, groups=self._hosts)
            self._schedules[key] = build(choice.algorithm, request)
        if key not in self._schedules:
            options = FitOptions(segments=choice.segments, shares=choice.shares or "equal")
            fitted = fit(choice.algorithm, self._fabric, collective, options)
            self._schedules[key] = relabel(fitted.schedule, fitted.placement)
        return self._schedules[key]

    def seconds(self, choice: AlgorithmChoice, collective: Collective, size: int) -> float:
        """Return the predicted time for a message of `size` bytes."""
        return replay(self.schedule(choice, collective), self._cluster, None, size, costs=self._costs).seconds

    def worth_trying(
        self, choices: Sequence[AlgorithmChoice], collective: Collective, size: int
    ) -> list[AlgorithmChoice]:
        """Return the choices without those that the simulator finds hopeless; it cannot judge the c10d collective."""
        simulated = [choice for choice in choices if choice.transport != "c10d"]
        expected_s = {choice: self.seconds(choice, collective, size) for choice in simulated}
        ratio = _HOPELESS_RATIO_MEASURED if self.known.is_measured else _HOPELESS_RATIO
        limit_s = ratio * min(expected_s.values(), default=0.0)
        return [choice for choice in choices if choice.transport == "c10d" or expected_s[choice] <= limit_s]
