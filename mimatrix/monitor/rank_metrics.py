"""What one rank said last, as the rest of this package reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Awaited:
    """In which collective a rank waits, for whom, and for how long already."""

    call: str
    round: int
    peer: int | None
    """None: for anybody."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Means over its last steps."""

    rank: int
    place: str
    """Its device, for people: `host/0`."""
    at_s: float
    """When it was said."""
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
        """What others wait for."""
        return self.compute_s + self.data_s
