"""Log output: every module logs to `logging.getLogger(__name__)`, below `mimatrix`."""

import logging
import sys

ROOT = "mimatrix"
_FORMAT = "%(asctime)s %(levelname)s mimatrix: %(message)s"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever `sys.stderr` is at the moment, so that redirection works at any time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

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
    if not logger.handlers and not logging.getLogger().handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET or any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
