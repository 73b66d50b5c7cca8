"""Whether this process ends with success, as far as it can be known before it has ended.

An uncaught exception is in `sys.last_value` when exit handlers run. The status that `sys.exit` was given is nowhere by
then, so it is noted when it is called.
"""

import sys
import threading
from typing import Any, NoReturn


class ExitStatus:
    """Notes what the main thread gave `sys.exit`."""

    def __init__(self) -> None:
        self._status: object = None
        self._exit: Any = None

    def watch(self) -> None:
        """Note calls of `sys.exit` from now on."""
        if self._exit is None:
            self._exit, sys.exit = sys.exit, self._note_exit

    @property
    def has_failed(self) -> bool:
        """Whether the process ends with an exception, or with an exit status that is not 0."""
        return getattr(sys, "last_value", None) is not None or self._status not in (None, 0)

    @property
    def code(self) -> int:
        """The exit code as far as it is known: what `sys.exit` was given if that is a number, 1 after an exception."""
        return self._status if isinstance(self._status, int) and self._status else int(self.has_failed)

    def note(self, status: object) -> None:
        """Note the status with which this process is about to end."""
        self._status = status

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends only the thread
            self.note(status)
        self._exit(status)
        raise AssertionError("sys.exit returned")
