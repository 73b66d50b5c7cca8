"""Log output: every module logs to `logging.getLogger(__name__)`, below `mimatrix`."""

import logging
import sys

ROOT = "mimatrix"
_FORMAT = "%(asctime)s %(levelname)s mimatrix: %(message)s"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever `sys.stderr` is at the moment, so that redirection works at any time.

    Says nothing once the program has handlers of its own, which then get the messages.
    """

    level_before = logging.NOTSET

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep quiet where the program has handlers."""
        return not _has_other_handlers() and bool(super().filter(record))

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass


def configure_logging(*, quiet: bool = False) -> None:
    """Show messages of `mimatrix` on standard error, unless the program has set up logging itself.

    Args:
        quiet: Show warnings only.
    """
    logger = logging.getLogger(ROOT)
    own = next((handler for handler in logger.handlers if isinstance(handler, _StderrHandler)), None)
    if own is None:
        own = _StderrHandler()
        own.level_before = logger.level
        logger.addHandler(own)
    # A program that has handlers also says from which level on it wants messages.
    usual = own.level_before if _has_other_handlers() else own.level_before or logging.INFO
    logger.setLevel(logging.WARNING if quiet else usual)


def _has_other_handlers() -> bool:
    ours = logging.getLogger(ROOT).handlers
    return bool(logging.getLogger().handlers) or any(not isinstance(handler, _StderrHandler) for handler in ours)
