"""Signals of this process: as bytes on a pipe for loops over descriptors, as exceptions, or put off."""

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from mimatrix.processes.proc import TERMINATION_SIGNALS

_CHUNK = 4096


class Terminated(BaseException):
    """Raised when this process is told to end by a signal. Like KeyboardInterrupt it is not an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


class SignalPipe:
    """Signals that arrive as bytes on a descriptor, so that a loop over descriptors handles them like everything else.

    `open_signal_pipe` makes one.
    """

    def __init__(
        self, receiver: int, sender: int, wakeup: int, handlers: Mapping[int, Callable[..., object] | int | None]
    ) -> None:
        self._receiver, self._sender = receiver, sender
        self._wakeup, self._handlers = wakeup, handlers

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal has arrived."""
        return self._receiver

    def read(self) -> list[int]:
        """Return the numbers of the signals that have arrived, in order; wait for one if none has."""
        return list(os.read(self._receiver, _CHUNK))

    def close(self) -> None:
        """Give the signals back to whatever handled them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._receiver)
        os.close(self._sender)


def open_signal_pipe(numbers: Collection[int]) -> SignalPipe:
    """Let these signals arrive on a pipe from now on. Signals that other code handles arrive there as well.

    Only the main thread of a process can call this.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    wakeup = signal.set_wakeup_fd(sender)
    return SignalPipe(receiver, sender, wakeup, {number: signal.signal(number, _ignore) for number in numbers})


def heeded_termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process, without those that it was started to ignore (`nohup`)."""
    return tuple(number for number in TERMINATION_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15, and `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise `Terminated` at a signal to end, so that what was set up is taken down."""
    with _handled(_raise):
        yield


@contextmanager
def ignore_termination() -> Iterator[None]:
    """Let no signal to end interrupt what is taken down meanwhile, which is short."""
    with _handled(_ignore):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in heeded_termination_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Terminated(number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, on purpose."""
