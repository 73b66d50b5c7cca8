"""How often a run saves by itself: `checkpoint_every` of `mimatrix.init`."""

import re
from dataclasses import dataclass

from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_duration

NEVER = "never"
_STEPS = re.compile(r"(\d+)\s*steps?")


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The time or the steps between two periodic saves; one of both."""

    seconds: float | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, value: object) -> "SaveInterval | None":
        """Return what the user gave: seconds, "15m" or "500 steps"; None for None and "never".

        Raises:
            UserError: It is something else, or not above 0.
        """
        if value is None or value == NEVER:
            return None
        interval = _parse(value)
        if interval is None or not (interval.steps or interval.seconds):
            raise UserError(
                f'checkpoint_every is {value!r}; give a time such as "15m" or a number of seconds, a number of steps '
                'such as "500 steps", or "never"'
            )
        return interval


def _parse(value: object) -> SaveInterval | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return SaveInterval(seconds=float(value)) if 0 < value < float("inf") else None
    if not isinstance(value, str):
        return None
    if steps := _STEPS.fullmatch(value.strip()):
        return SaveInterval(steps=int(steps[1]))
    try:
        return SaveInterval(seconds=parse_duration(value))
    except UserError:
        return None
