"""The exit code of a process that ends after a failed checkpoint, which nothing in the script has raised."""

import atexit
import os
import sys
from contextlib import suppress

from mimatrix.core.exit_codes import FAILED


class FailedExit:
    """Ends the process with a sentence and an exit code where it would have ended with success.

    An exception in an exit handler does not change the exit code, so the process ends in a handler. It is registered
    when a save has failed, hence runs before the handlers that were registered earlier, and runs those itself.
    """

    def __init__(self) -> None:
        self._sentence, self._code = "", FAILED

    def demand(self, sentence: str, code: int = FAILED) -> None:
        """Let the process say why and fail when it exits."""
        self._sentence, self._code = sentence, code
        atexit.register(self._exit)

    def cancel(self) -> None:
        """Let the process exit as it will: the script was told of the failure."""
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:
            return  # an uncaught exception ends the process, with an exit code of its own
        atexit.unregister(self._exit)
        with suppress(BaseException):
            atexit._run_exitfuncs()
        # On every rank: a launcher shows the last line of the one that ended first, and repeated lines once.
        print(f"mimatrix: {self._sentence}", file=sys.__stderr__, flush=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it may be closed, or None
                stream.flush()
        os._exit(self._code)
