"""The last report of one rank, as the rest of this package reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Awaited:
    """The collective in which a rank waits, the peer that it waits for, and for how long."""

    call: str
    round: int
    peer: int | None
    """None: unknown, any of them."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Means over its last steps."""

    rank: int
    device: str
    """Its name, for people: `host/0`."""
    at_s: float
    """When it was reported."""
    step: int
    step_s: float
    compute_s: float
    data_s: float = 0.0
    waiting_s: float = 0.0
    communication_s: float = 0.0
    planned_s: float | None = None
    follows: bool = False
    memory_full: float = 0.0
    """The part of its device's memory that is used."""
    awaited: Awaited | None = None
    aside: bool = False
    """It does something between steps, such as evaluating or saving, that may take its time."""

    @property
    def busy_s(self) -> float:
        """Return the time that others wait for."""
        return self.compute_s + self.data_s
