"""The network simulator: schedules replayed on clusters, flows sharing links max-min fairly."""

from mimatrix.netsim.bounds import lower_bound_seconds
from mimatrix.netsim.max_min_fairness import fair_rates
from mimatrix.netsim.reports import SimulationReport, report, simulate
from mimatrix.netsim.simulation import Costs, replay, run
from mimatrix.netsim.timeline import Timeline
from mimatrix.netsim.traffic import Traffic

__all__ = [
    "Costs",
    "SimulationReport",
    "Timeline",
    "Traffic",
    "fair_rates",
    "lower_bound_seconds",
    "replay",
    "report",
    "run",
    "simulate",
]
