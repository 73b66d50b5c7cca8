"""Together or apart, decided before training: devices and links are measured, rank 0 prices both, all hear it."""

from collections.abc import Callable
from dataclasses import replace

from mimatrix.cluster import Cluster, Device
from mimatrix.core.errors import UserError
from mimatrix.engine.planning.cluster_discovery import described_cluster, measured_cluster
from mimatrix.engine.planning.communication import ending_s
from mimatrix.engine.planning.measure import PrepareContext, problem_of, say, survey, timed_communication, together
from mimatrix.engine.zero.sharded_optimizer import check_elementwise
from mimatrix.hybrid.groups import Groups
from mimatrix.planner.modes import Choice, choose_mode
from mimatrix.planner.networks import simulated
from mimatrix.planner.profile import Communication, ModelSize
from mimatrix.profiler.timing import processor_share

_QUICK_S = 0.05
"""Sums that should take no longer are tried out; others would take minutes to tune, and are simulated."""


def decided(ground: PrepareContext, groups: Groups) -> Choice:
    """The mode for these groups, the same on every rank. A collective."""
    cluster = described_cluster(ground) or measured_cluster(ground, [Device(name) for name in ground.devices])
    found = survey(ground, lambda ground, size: _communication(ground, size, cluster))
    problem = problem_of(ground, found)
    network = _network(cluster, found.model.gradient_bytes, ground.ranks, found.communication)
    problem = replace(problem, network=network)
    against = _against(ground)
    processors = together(ground, processor_share)
    said = together(
        ground,
        lambda: choose_mode(problem, groups, cluster, against, processors).to_json() if ground.rank == 0 else None,
    )
    choice = Choice.from_json(said[0])
    say(ground, choice.reason)
    return choice


def _communication(ground: PrepareContext, size: ModelSize, cluster: Cluster) -> Communication:
    """What all ranks together pay: tried out where that is quick, otherwise simulated on the links that there are."""
    expected = simulated(cluster, size.gradient_bytes, tuple(range(ground.ranks)))
    if expected.once_s[0] <= _QUICK_S:
        return timed_communication(ground, size)
    each = ending_s(ground.exchange)
    return replace(expected, once_s=tuple(seconds + each for seconds in expected.once_s))


def _network(
    cluster: Cluster, model_bytes: int, ranks: int, paid: Communication
) -> Callable[[tuple[int, ...]], Communication]:
    def network(members: tuple[int, ...]) -> Communication:
        return paid if len(members) == ranks else simulated(cluster, model_bytes, members)

    return network


def _against(ground: PrepareContext) -> str:
    """Why this optimizer cannot be cut over groups; empty where it can."""
    try:
        check_elementwise(ground.optimizer, 1)
    except UserError as error:
        return str(error)
    return ""
