"""For whom a rank waits, as it tells the coordinator when it is asked."""

from dataclasses import dataclass

from mimatrix.comm.control.user_calls import UserCall


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Which rank this one waits for (None: any), in which round of which call, since when (monotonic clock)."""

    rank: int | None
    call: object
    round: int
    since_s: float


@dataclass(frozen=True, slots=True)
class ArrivalWait:
    """Which ranks this one waits for, to begin which call of a group, since when (monotonic clock)."""

    number: int
    needs: tuple[int, ...]
    user_call: UserCall | None
    since_s: float
