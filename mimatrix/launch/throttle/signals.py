"""Slow processes down from outside without root: stop and continue them, many times a second.

System calls that wait (`epoll_wait`) may return early with EINTR in a process that was stopped; Python and Gloo call
them again.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

PERIOD_S = 0.04
# A delay longer than this (a closed laptop) is not made up for.
_FORGIVEN_S = 5 * PERIOD_S


class Pulse:
    """The times at which one worker runs and is stopped, so that it runs `speed` of the time.

    A switch that comes late is made up for by the next one, so the share holds over a few periods.
    """

    def __init__(self, speed: float, now_s: float) -> None:
        self.runs = True
        self.due_s = now_s + speed * PERIOD_S
        self._speed = speed
        self._began_s = self._since_s = now_s
        self._ran_s = 0.0

    def switch(self, now_s: float) -> None:
        """Switch between running and stopped; `due_s` says when to call this again."""
        if now_s - self.due_s > _FORGIVEN_S:
            self._began_s, self._since_s, self._ran_s = now_s, now_s, 0.0
        if self.runs:
            self._ran_s += now_s - self._since_s
            self.due_s = self._began_s + self._ran_s / self._speed
        else:
            self._since_s = now_s
            # What it missed because this comes late, it gets on top, while it gains 1 - speed on its share.
            missed_s = self._speed * (now_s - self._began_s) - self._ran_s
            self.due_s = now_s + self._speed * PERIOD_S + missed_s / (1 - self._speed)
        self.runs = not self.runs


@contextmanager
def pulse(groups: Sequence[int] | Mapping[int, int], speeds: Mapping[int, float]) -> Iterator[None]:
    """Let the process group of each rank in `speeds` run only that fraction of the time while this lasts."""
    over = threading.Event()
    slow = {groups[rank]: speed for rank, speed in speeds.items()}
    thread = threading.Thread(target=_beat, args=(slow, over), name="pulses", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(speeds: Mapping[int, float], over: threading.Event) -> None:
    pulses = {group: Pulse(speed, time.monotonic()) for group, speed in speeds.items()}
    try:
        while pulses and not over.wait(max(0.0, min(pulse.due_s for pulse in pulses.values()) - time.monotonic())):
            _switch_due(pulses)
    finally:
        for group in pulses:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


def _switch_due(pulses: dict[int, Pulse]) -> None:
    """Switch those that are due. A group that is gone is dropped at once: its number may be reused."""
    now_s = time.monotonic()
    for group, pulse in [(group, pulse) for group, pulse in pulses.items() if pulse.due_s <= now_s]:
        pulse.switch(now_s)
        try:
            os.killpg(group, signal.SIGCONT if pulse.runs else signal.SIGSTOP)
        except ProcessLookupError:
            del pulses[group]
