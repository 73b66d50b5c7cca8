"""Saves that the script does not ask for: periodic ones, and the one with which a preempted job stops.

Ranks agree on them at the end of a global batch. They begin when the loop asks for the next batch, as what the user's
loop does after a step (its scheduler, for example) belongs to that step.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.checkpoint.state import Progress
from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.save_interval import SaveInterval


class PeriodicSaves:
    """When the next periodic save is due. Only rank 0 has one: the clocks of ranks differ."""

    def __init__(self, interval: SaveInterval, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._since_s = clock()

    def is_due(self, step: int, *, is_busy: bool) -> bool:
        """Return whether a save is due after `step` steps.

        By time, it is not due while another one is being written, for which training would have to wait; by steps it
        is due at the same ones in every run.
        """
        if self._interval.steps:
            return step % self._interval.steps == 0
        return not is_busy and self._clock() - self._since_s >= (self._interval.seconds or 0.0)

    def restart(self) -> None:
        """Begin the next interval: ranks have agreed to save."""
        self._since_s = self._clock()


class AutomaticSaves:
    """What one rank knows of the saves that are due."""

    def __init__(
        self, checkpoints: CheckpointManager, preemption: Preemption | None, periodic: PeriodicSaves | None
    ) -> None:
        self._checkpoints, self._preemption, self._periodic = checkpoints, preemption, periodic
        self._is_due = False
        """Whether ranks have agreed on a periodic save that has not begun; a rank without data leaves it to others."""

    @property
    def is_last_batch(self) -> bool:
        """Whether all ranks exit after this global batch."""
        return self._preemption is not None and self._preemption.is_last_batch

    def report(self, step: int) -> dict[str, Any]:
        """Return what this rank tells the others in the global batch after `step` others, as parts of its report."""
        periodic, is_busy = self._periodic, self._checkpoints.is_busy
        return {
            "preemption": self._preemption.report() if self._preemption else None,
            "save_is_due": self._is_due or (periodic is not None and periodic.is_due(step + 1, is_busy=is_busy)),
        }

    def update(self, reports: Sequence[BatchReport]) -> None:
        """Agree on what follows from all reports."""
        if self._preemption:
            self._preemption.update([report.preemption for report in reports if report.preemption])
        self._is_due = any(report.save_is_due for report in reports)
        if self._periodic and self._is_due:
            self._periodic.restart()

    def save_if_due(self, micro: MicroBatch | None, progress: Callable[[], Progress]) -> None:
        """Save between two global batches on a rank that had data in the last, `micro`; the others join them."""
        if micro is None or not micro.num_micro_steps:
            self._is_due = False
            return
        preemption = self._preemption
        if preemption and preemption.is_under_way:
            folder = str(preemption.folder)
            preemption.save_if_due(lambda: self._checkpoints.save_automatically(progress(), folder))
        elif self._is_due:
            self._is_due = not self._checkpoints.save_automatically(progress())
