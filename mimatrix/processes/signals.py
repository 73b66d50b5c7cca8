"""Signals to end that reach the launcher while no worker runs, when nobody else listens."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mimatrix.processes.proc import ENDS


class Told(BaseException):
    """We were told to end, by this signal. Like KeyboardInterrupt it is no error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def raised() -> Iterator[None]:
    """A signal to end raises `Told` while this lasts, so that what was built is taken down."""
    with _handled(_raise):
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """No signal to end interrupts while this lasts: for the taking down itself, which is short."""
    with _handled(_ignore):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """What is ignored (`nohup`) stays so."""
    minded = [number for number in ENDS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in minded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Told(number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """On purpose."""
