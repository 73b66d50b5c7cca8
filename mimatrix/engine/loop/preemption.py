"""Preemption: when asked to stop, all ranks save between two global batches and exit one batch later.

What the user's loop does after a step (its scheduler, for example) belongs to that step, so the checkpoint begins when
the loop asks for the next batch. Ranks without data are told at the end of that batch, which is repeated on resume.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mimatrix.core.exit_codes import PREEMPTED
from mimatrix.engine.loop.batch_report import PreemptionReport


class Preempted(SystemExit):
    """Ends the process with `PREEMPTED`, after a checkpoint."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


class Preemption:
    """Whether any rank was asked to stop, and how far this rank is with stopping."""

    def __init__(self, is_requested: Callable[[], bool], folder: Path) -> None:
        self._is_requested = is_requested
        self.folder = folder
        self._is_due = self._has_saved = False
        self.is_last_batch = False
        """Whether all ranks exit after this global batch."""

    @property
    def is_under_way(self) -> bool:
        """Whether ranks have agreed to stop."""
        return self._is_due or self._has_saved

    def report(self) -> PreemptionReport:
        """Return what this rank tells the others at the end of a global batch."""
        return PreemptionReport(self._is_requested(), self._has_saved)

    def update(self, reports: Sequence[PreemptionReport]) -> None:
        """Agree on what follows from all reports: one rank that was asked is enough."""
        self.is_last_batch = any(report.has_saved for report in reports)
        self._is_due = self._is_due or any(report.is_requested for report in reports)

    def save_if_due(self, save: Callable[[], bool]) -> None:
        """Save once, when the loop asks for the next batch on a rank that had data in the last.

        `save` returns False if that has to wait until the next time.
        """
        if self._is_due and not self._has_saved:
            self._has_saved = save()
