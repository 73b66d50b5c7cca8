"""Failed saves: training continues after one, and stops where several in a row have failed, or the last one has."""

import logging

from mimatrix.core.errors import SaveError, UserError, WorldError
from mimatrix.core.exit_codes import BAD_INPUT, FAILED
from mimatrix.engine.checkpoint.failed_exit import FailedExit

logger = logging.getLogger(__name__)


class SaveFailures:
    """The failures of a run's saves, the same on all ranks: each of them hears of the failure of any.

    A save that failed because of the script is never borne: the next one would fail as well.
    """

    def __init__(self, most: int, rank: int) -> None:
        self._most, self._rank = most, rank
        self._in_row = 0
        self._last: Exception | None = None
        self._exit = FailedExit()

    def note_success(self) -> None:
        """Forget the failures before a save that has succeeded."""
        self._in_row, self._last = 0, None
        self._exit.cancel()

    def note_failure(
        self, error: Exception, step: int, place: str, *, is_raised: bool, may_end_process: bool
    ) -> Exception:
        """Tell of a failure, and return what is to be raised.

        Args:
            error: Why the save failed.
            step: The step whose checkpoint is not saved.
            place: The line of the script that saved.
            is_raised: Whether the script waits for the save, so that the failure is raised in any case.
            may_end_process: Whether the process fails if it ends before this was raised.
        """
        # Logged as well as raised: the script may not come to another call of `save` for long, or at all.
        sentence = f"the checkpoint of step {step} is not saved: {error}"
        raised: Exception = error
        if type(error) is WorldError:
            raised = SaveError(sentence)
            raised.__cause__ = error.__cause__ if isinstance(error.__cause__, UserError) else error
        self._in_row, self._last = self._in_row + 1, raised
        if self._rank == 0:
            logger.error(sentence if is_raised or self._is_final else f"{sentence}; {self._describe_bearing()}")
        if may_end_process:
            code = BAD_INPUT if isinstance(error, UserError) else FAILED
            self._exit.demand(sentence if place in sentence else f"{sentence} ({place})", code)
        return raised

    def raise_final(self) -> None:
        """Raise the last failure if training is not to continue after it."""
        if self._last and self._is_final:
            self.raise_last()

    def raise_last(self) -> None:
        """Raise the failure of the last save, if it failed; the script then knows of it."""
        if error := self._last:
            self._last = None
            self._exit.cancel()
            raise error

    @property
    def _is_final(self) -> bool:
        is_borne = isinstance(self._last, SaveError) and not isinstance(self._last.__cause__, UserError)
        return not is_borne or self._in_row >= self._most

    def _describe_bearing(self) -> str:
        return f"training continues, and stops when {self._most} saves in a row have failed (this is {self._in_row})"
