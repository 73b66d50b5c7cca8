"""What moving a model costs sets of ranks: as they were measured, or by the best all-reduce on a described cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mimatrix.cluster import Cluster, Fabric
from mimatrix.collectives import Collective, Shares, nic_rates, shares_by_bandwidth
from mimatrix.collectives.catalog import AlgorithmRequest, build, find
from mimatrix.collectives.rank_order import natural_groups, ring_order
from mimatrix.core.errors import UnsuitedError
from mimatrix.core.units import format_bytes, format_seconds
from mimatrix.netsim import Costs, Traffic, run
from mimatrix.planner.model.profile import Communication

COSTS = Costs(sync_s=200e-6)
"""What a round costs in addition to its data, as measured with the executor."""
_UNEQUAL = 1.1
"""Fastest to slowest NIC from which on shares by bandwidth are tried."""
_SEGMENTS = 8
_MAX_MOVES = 10_000
"""Simulations grow with the moves of a schedule; beyond this an algorithm is not tried if others are cheaper."""
_TOLERANCE = 0.02
_NOTHING = (0.0, 0.0, 0.0, 0.0)
_ONE_DEVICE = Communication(_NOTHING, reason="one device moves nothing")


@dataclass(frozen=True, slots=True)
class SimulatedCommunication:
    """The devices of a described cluster: what the network simulator finds for each set of them."""

    cluster: Cluster
    model_bytes: int

    def cost(self, members: tuple[int, ...]) -> Communication:
        """Return what the devices with these numbers would pay."""
        return simulate_communication(self.cluster, self.model_bytes, members)


@dataclass(frozen=True, slots=True)
class MeasuredCommunication:
    """What other numbers of ranks would pay, from what `ranks` of them paid.

    In a ring each rank moves (n-1)/n of a model, so costs grow like that. What one rank paid says nothing about more of
    them: they are free, too, with a reason that says that it is unknown.
    """

    paid: Communication
    ranks: int

    def cost(self, members: tuple[int, ...]) -> Communication:
        """Return what this number of ranks would pay."""
        if len(members) == 1:
            return _ONE_DEVICE
        if self.ranks == 1:
            return Communication(_NOTHING, reason="not measured: one rank alone")
        if len(members) == self.ranks or self.paid.is_free:
            return self.paid
        factor = _moved_part(len(members)) / _moved_part(self.ranks)
        source = f"{self.paid.reason}; " if self.paid.reason else ""
        return Communication(
            tuple(factor * seconds for seconds in self.paid.once_s),
            tuple(factor * seconds for seconds in self.paid.round_s),
            f"{source}as {self.ranks} ranks paid, for {len(members)} times {factor:.2f}",
        )


@lru_cache(maxsize=512)
def simulate_communication(cluster: Cluster, model_bytes: int, members: tuple[int, ...]) -> Communication:
    """Return what these devices would pay for all-reducing a model's gradients, and for each half of that."""
    if len(members) < 2 or model_bytes < 1:
        return _ONE_DEVICE
    fabric = _fabric(cluster)
    seconds, name = min(_simulate_candidates(fabric, model_bytes, members))
    reason = (
        f"all-reduce of {format_bytes(model_bytes)} over {len(members)} devices of {cluster.name}: "
        f"{format_seconds(seconds)} by {name} (simulated)"
    )
    # Reduce-scatter and all-gather are the two halves of an all-reduce, in every algorithm that has them.
    return Communication.of(seconds, seconds / 2, seconds / 2, reason)


def _moved_part(ranks: int) -> float:
    return (ranks - 1) / ranks


@lru_cache(maxsize=8)
def _fabric(cluster: Cluster) -> Fabric:
    return Fabric(cluster)


def _simulate_candidates(fabric: Fabric, model_bytes: int, members: Sequence[int]) -> Iterator[tuple[float, str]]:
    """Yield the time of each algorithm that suits these devices, with its name."""
    for label, name, request in _candidates(fabric, members):
        try:
            schedule = build(name, request)
        except UnsuitedError:
            continue
        traffic = Traffic.of(schedule, fabric, members)
        yield run(traffic, model_bytes, COSTS, tolerance=_TOLERANCE).seconds, label


def _candidates(fabric: Fabric, members: Sequence[int]) -> list[tuple[str, str, AlgorithmRequest]]:
    """Return the algorithms worth simulating: those with few moves, or with the least if all have many."""
    ranks, what = len(members), Collective.ALL_REDUCE
    if ranks == 2:
        # All of them are the same: half of the data there, and half of it back.
        return [("gdraa", "gdraa", AlgorithmRequest(what, ranks))]
    candidates = [
        ("halving_doubling", "halving_doubling", AlgorithmRequest(what, ranks)),
        ("gdraa", "gdraa", AlgorithmRequest(what, ranks)),
        ("ring", "ring", AlgorithmRequest(what, ranks, order=ring_order(fabric, members))),
    ]
    shares = _shares_by_bandwidth(fabric, members)
    if shares:
        label = "gdraa with shares by bandwidth"
        candidates.append((label, "gdraa", AlgorithmRequest(what, ranks, shares, segments=_SEGMENTS)))
    groups = natural_groups(fabric, members)
    if 1 < len(groups) < ranks:
        candidates.append(("hierarchical", "hierarchical", AlgorithmRequest(what, ranks, groups=groups)))
    moves = {label: find(name).moves(request) for label, name, request in candidates}
    most = max(_MAX_MOVES, min(moves.values()))
    return [candidate for candidate in candidates if moves[candidate[0]] <= most]


def _shares_by_bandwidth(fabric: Fabric, members: Sequence[int]) -> Shares | None:
    """Return shares by bandwidth if NICs are unequal; one node alone has no NICs, or none that matter."""
    rates = [float(rate) for rate in nic_rates(fabric, members)]
    if not np.isfinite(rates).all() or min(rates) <= 0 or max(rates) < _UNEQUAL * min(rates):
        return None
    return shares_by_bandwidth(rates, _SEGMENTS).shares
