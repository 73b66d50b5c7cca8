"""The figures of one replay, as printed and as JSON."""

from collections.abc import Callable
from dataclasses import dataclass

from mimatrix.cluster.fabric import Fabric
from mimatrix.collectives.fitting import FitOptions, Fitted, fit
from mimatrix.collectives.schedule import Collective
from mimatrix.netsim.bounds import lower_bound_seconds
from mimatrix.netsim.simulation import Costs, run
from mimatrix.netsim.timeline import Timeline
from mimatrix.netsim.traffic import Traffic


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The figures that `mimatrix simulate --json` prints for one algorithm."""

    algorithm: str
    collective: str
    cluster: str
    ranks: int
    bytes: int
    seconds: float
    rounds: int
    """Synchronisations."""
    max_link_flows: int
    """Most transfers that cross one link (in one direction) in one round."""
    bottleneck: str
    bottleneck_use: float
    lower_bound_seconds: float
    """What no algorithm can beat on this placement."""
    blame: str
    reasons: tuple[str, ...]


def simulate(
    name: str,
    fabric: Fabric,
    collective: Collective,
    message_bytes: int,
    options: FitOptions,
    costs: Costs,
    *,
    tolerance: float = 0.0,
    watch: Callable[[float], None] | None = None,
) -> tuple[SimulationReport, Timeline]:
    """Fit an algorithm to the cluster, replay it (see `run` for `tolerance` and `watch`), and report the figures."""
    fitted = fit(name, fabric, collective, options)
    traffic = Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)
    timeline = run(traffic, message_bytes, costs, tolerance=tolerance, watch=watch)
    return report(fitted, timeline), timeline


def report(fitted: Fitted, timeline: Timeline) -> SimulationReport:
    """Return the figures of a replay of `fitted`."""
    schedule, traffic, message_bytes = fitted.schedule, timeline.traffic, timeline.message_bytes
    return SimulationReport(
        schedule.algorithm,
        schedule.collective.value,
        traffic.fabric.cluster.name,
        schedule.ranks,
        int(message_bytes),
        timeline.seconds,
        len(schedule.rounds),
        traffic.max_link_flows(),
        timeline.bottleneck_name,
        timeline.bottleneck_use,
        lower_bound_seconds(schedule, traffic.fabric, fitted.placement, message_bytes),
        timeline.blame(),
        fitted.reasons,
    )
