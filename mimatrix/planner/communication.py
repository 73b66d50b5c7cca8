"""What moving a model would cost on a cluster that is only described: the best all-reduce of the catalog, replayed."""

from collections.abc import Iterator, Sequence
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

# What a round costs beside its data, as the executor was found to take.
COSTS = Costs(sync_s=200e-6)
_UNLIKE = 1.1
_SEGMENTS = 8
# Replays grow with the moves of a schedule; beyond this an algorithm is not tried where others are quicker to replay.
_MOST_MOVES = 10_000
_TOLERANCE = 0.02


@lru_cache(maxsize=512)
def simulated(cluster: Cluster, model_bytes: int, members: tuple[int, ...]) -> Communication:
    """What the devices with these numbers would take to sum so many bytes of gradients, and for each half of that."""
    if len(members) < 2 or model_bytes < 1:
        return Communication((0.0,) * 4, reason="one device moves nothing")
    fabric = _fabric(cluster)
    seconds, name = min(_tried(fabric, model_bytes, members))
    reason = (
        f"all-reduce of {format_bytes(model_bytes)} over {len(members)} devices of {cluster.name}: "
        f"{format_seconds(seconds)} by {name} (simulated)"
    )
    # Reduce-scatter and all-gather are the two halves of an all-reduce, in every algorithm that has them.
    return Communication.of(seconds, seconds / 2, seconds / 2, reason)


@lru_cache(maxsize=8)
def _fabric(cluster: Cluster) -> Fabric:
    return Fabric(cluster)


def _tried(fabric: Fabric, model_bytes: int, members: Sequence[int]) -> Iterator[tuple[float, str]]:
    """How long each algorithm takes that suits these devices, with its name."""
    for label, name, request in _candidates(fabric, members):
        try:
            schedule = build(name, request)
        except UnsuitedError:
            continue
        traffic = Traffic.of(schedule, fabric, members)
        yield run(traffic, model_bytes, COSTS, tolerance=_TOLERANCE).seconds, label


def _candidates(fabric: Fabric, members: Sequence[int]) -> list[tuple[str, str, AlgorithmRequest]]:
    """Those worth a replay: with few moves, or the least if all have many."""
    ranks, what = len(members), Collective.ALL_REDUCE
    if ranks == 2:
        # All of them come to the same: half of the data there, and half of it back.
        return [("gdraa", "gdraa", AlgorithmRequest(what, ranks))]
    found = [
        ("halving_doubling", "halving_doubling", AlgorithmRequest(what, ranks)),
        ("gdraa", "gdraa", AlgorithmRequest(what, ranks)),
        ("ring", "ring", AlgorithmRequest(what, ranks, order=ring_order(fabric, members))),
    ]
    shares = _uneven(fabric, members)
    if shares:
        label = "gdraa with shares by bandwidth"
        found.append((label, "gdraa", AlgorithmRequest(what, ranks, shares, segments=_SEGMENTS)))
    groups = natural_groups(fabric, members)
    if 1 < len(groups) < ranks:
        found.append(("hierarchical", "hierarchical", AlgorithmRequest(what, ranks, groups=groups)))
    moves = {label: find(name).moves(request) for label, name, request in found}
    most = max(_MOST_MOVES, min(moves.values()))
    return [each for each in found if moves[each[0]] <= most]


def _uneven(fabric: Fabric, members: Sequence[int]) -> Shares | None:
    """Shares by bandwidth, where NICs are unlike. One node alone has none, or none that matter."""
    rates = [float(rate) for rate in nic_rates(fabric, members)]
    if not np.isfinite(rates).all() or min(rates) <= 0 or max(rates) < _UNLIKE * min(rates):
        return None
    return shares_by_bandwidth(rates, _SEGMENTS).shares
