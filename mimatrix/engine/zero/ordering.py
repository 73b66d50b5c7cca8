"""Two lines of collectives, each in the one order that all ranks keep, whatever their models do in which order.

Ranks meet in every collective, so they must come to them in the same order, also one that has no data. Gradients are
reduced in the reverse order of units, as soon as a unit and all before it are complete. Parameters are gathered in the
order of units, and in reverse for the backward pass, a little ahead of their use; a unit that is needed early draws all
before it. The two lines run on threads of their own: neither waits for the other.
"""

from collections.abc import Callable, Sequence

from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.units import Unit


class GradReducer:
    """The gradients of one micro-step (or of a whole global batch) on their way."""

    def __init__(self, units: Sequence[Unit], issue: Callable[[Unit], None], *, overlaps: bool = True) -> None:
        self._overlaps = overlaps
        self._order = [unit for unit in reversed(units) if unit.learns]
        self._missing = {unit: {piece.parameter for piece in unit.pieces} for unit in self._order}
        self._issue, self._at = issue, 0
        self._issued: set[Unit] = set()

    def arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        """One more of its parameters has its gradient."""
        if unit in self._issued:
            raise UserError(
                f"a parameter of the unit with {unit.name} got a gradient twice in one backward pass; use "
                "checkpoint(..., use_reentrant=False) for parts that share parameters"
            )
        self._missing[unit].discard(parameter)
        while self._overlaps and self._at < len(self._order) and not self._missing[self._order[self._at]]:
            self._next()

    def finish(self) -> None:
        """The rest, with whatever there is: nothing else will come."""
        while self._at < len(self._order):
            self._next()

    def _next(self) -> None:
        unit = self._order[self._at]
        self._at += 1
        self._issued.add(unit)
        self._issue(unit)


class ParamPrefetcher:
    """The parameters of one pass on their way: forward, and back unless it only looks."""

    def __init__(self, units: Sequence[Unit], issue: Callable[[Unit], None], *, looks: bool) -> None:
        self.looks = looks
        self.goes_back = False
        """The backward pass has begun."""
        back = [] if looks else [unit for unit in reversed(units[:-1]) if not unit.keeps]
        self._order = [*units, *back]
        self._forward = len(units)
        self._issue, self._at = issue, 0
        self._last = units[-1]

    def frees(self, unit: Unit) -> bool:
        """Whether a unit goes when its modules have run forward; it is gathered again on the way back."""
        return not self.goes_back and not unit.keeps and (self.looks or unit is not self._last)

    def draw(self, unit: Unit) -> bool:
        """Issue what is left up to the next time that a unit comes, and one more; False if it does not come again."""
        end = len(self._order) if self.goes_back else self._forward
        try:
            index = self._order.index(unit, self._at, end)
        except ValueError:
            return False
        self._until(min(index + 2, end))
        return True

    def ahead(self, unit: Unit) -> None:
        """A unit is in use: issue the one after it."""
        end = len(self._order) if self.goes_back else self._forward
        if self._at < end and self._at and self._order[self._at - 1] is unit:
            self._until(self._at + 1)

    def rest(self) -> list[Unit]:
        """What has not been issued; whoever asks issues it."""
        left, self._at = self._order[self._at :], len(self._order)
        return left

    def _until(self, end: int) -> None:
        while self._at < end:
            unit = self._order[self._at]
            self._at += 1
            self._issue(unit)
