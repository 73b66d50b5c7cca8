"""The exit code of a process that ends after a failed checkpoint, which nothing in the script has raised."""

import atexit
import os
import sys
from contextlib import suppress

_EXIT_CODE = 1


class FailedExit:
    """Ends the process with exit code 1 where it would have ended with success.

    An exception in an exit handler does not change the exit code, so the process ends in a handler. It is registered
    when a save has failed, hence runs before the handlers that were registered earlier, and runs those itself.
    """

    def demand(self) -> None:
        """Let the process fail when it exits."""
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
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it may be closed, or None
                stream.flush()
        os._exit(_EXIT_CODE)
