"""The user's lr schedulers, which step between global batches only."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.global_step import GlobalStep


class SyncedLRScheduler:
    """An lr scheduler that steps only between global batches, and as often on every rank."""

    def __init__(self, scheduler: LRScheduler, cycle: GlobalStep) -> None:
        self.scheduler, self.calls = scheduler, 0
        self._step, self._cycle = scheduler.step, cycle
        scheduler.step = self.step  # type: ignore[method-assign,assignment]

    def step(self, *arguments: Any) -> None:
        """As the user calls it; nothing inside of a global batch."""
        if self._cycle.may_end:
            raise UserError("scheduler.step came before optimizer.step; call optimizer.step() first")
        if not self._cycle.is_open:
            self.calls += 1
            self._step(*arguments)

    def catch_up(self, calls: Sequence[int]) -> None:
        """On a rank without data the user's loop did not come by: as often as on the others."""
        if min(calls) < max(calls) and isinstance(self.scheduler, ReduceLROnPlateau):
            raise UserError(
                "ReduceLROnPlateau steps by a figure, which a rank without data does not have; "
                "step it after the loop over the loader, with a figure of run.evaluate"
            )
        while self.calls < max(calls):
            self.calls += 1
            self._step()
