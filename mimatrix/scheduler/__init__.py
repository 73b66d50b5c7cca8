"""Who runs next: a pure function of the devices, the jobs and the time; and traces replayed through it."""

from mimatrix.core.resources import Part, Wish
from mimatrix.scheduler.scheduler import Reservation, decide, reservation, standings
from mimatrix.scheduler.state import Decision, End, Policy, Preempt, Queued, Running, Seat, Start, State, Wait

__all__ = [
    "Decision",
    "End",
    "Part",
    "Policy",
    "Preempt",
    "Queued",
    "Reservation",
    "Running",
    "Seat",
    "Start",
    "State",
    "Wait",
    "Wish",
    "decide",
    "reservation",
    "standings",
]
