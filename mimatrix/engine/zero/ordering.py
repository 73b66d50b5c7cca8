"""Two sequences of collectives, each in the one order that all ranks keep, whatever order their models run in.

Ranks meet in every collective, so they must come to them in the same order, even a rank that has no data. Gradients
are reduced in the reverse order of units, as soon as a unit and all before it are complete. Parameters are gathered in
the order of units, and in reverse for the backward pass, one unit ahead of their use; a unit that is needed early
gathers all before it. The two sequences run on threads of their own, so that neither waits for the other.
"""

from collections.abc import Callable, Sequence

from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.units import Unit


class GradReducer:
    """The order in which the gradients of one micro-step, or of a whole global batch, are reduced.

    `issue` starts the reduction of a unit. Without `overlaps` nothing is issued before `finish`.
    """

    def __init__(self, units: Sequence[Unit], issue: Callable[[Unit], None], *, overlaps: bool = True) -> None:
        self._overlaps = overlaps
        self._order = [unit for unit in reversed(units) if unit.trainable]
        self._missing = {unit: {param.parameter for param in unit.params} for unit in self._order}
        self._issue, self._at = issue, 0
        self._issued: set[Unit] = set()

    def grad_ready(self, unit: Unit, param: nn.Parameter) -> None:
        """Note that a parameter of a unit has its gradient, and issue all units that are next and complete."""
        if unit in self._issued:
            raise UserError(
                f"a parameter of the unit with {unit.name} got a gradient twice in one backward pass; use "
                "checkpoint(..., use_reentrant=False) for parts that share parameters"
            )
        self._missing[unit].discard(param)
        while self._overlaps and self._at < len(self._order) and not self._missing[self._order[self._at]]:
            self._issue_next()

    def finish(self) -> None:
        """Issue the remaining units with the gradients that they have: no further ones will come."""
        while self._at < len(self._order):
            self._issue_next()

    def issue_next(self) -> None:
        """Issue one more unit with the gradients that it has, if one is left."""
        if self._at < len(self._order):
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self._order[self._at]
        self._at += 1
        self._issued.add(unit)
        self._issue(unit)


class ParamPrefetcher:
    """The order in which the parameters of one pass are gathered: forward, then backward unless it is forward only.

    `issue` starts to gather a unit.
    """

    def __init__(self, units: Sequence[Unit], issue: Callable[[Unit], None], *, forward_only: bool) -> None:
        self.forward_only = forward_only
        self.in_backward = False
        backward = [] if forward_only else [unit for unit in reversed(units[:-1]) if not unit.shared]
        self._order = [*units, *backward]
        self._forward = len(units)
        self._issue, self._at = issue, 0
        self._last = units[-1]

    def begin_backward(self) -> None:
        """Note that the backward pass has begun, so that its units may be issued."""
        self.in_backward = True

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether a unit is freed when its modules have run forward; it is gathered again for the backward pass."""
        return not self.in_backward and not unit.shared and (self.forward_only or unit is not self._last)

    def prefetch_through(self, unit: Unit) -> bool:
        """Issue all up to the next occurrence of a unit, and one more; return False if it does not occur again."""
        end = len(self._order) if self.in_backward else self._forward
        try:
            index = self._order.index(unit, self._at, end)
        except ValueError:
            return False
        self._issue_until(min(index + 2, end))
        return True

    def prefetch_after(self, unit: Unit) -> None:
        """Issue the unit after one that is in use, if that was the last one issued."""
        end = len(self._order) if self.in_backward else self._forward
        if self._at < end and self._at and self._order[self._at - 1] is unit:
            self._issue_until(self._at + 1)

    def take_rest(self) -> list[Unit]:
        """Return the units that have not been issued; the caller issues them."""
        rest, self._at = self._order[self._at :], len(self._order)
        return rest

    def _issue_until(self, end: int) -> None:
        while self._at < end:
            unit = self._order[self._at]
            self._at += 1
            self._issue(unit)
