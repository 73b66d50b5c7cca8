"""Processes as the kernel tells them: who one is, who descends from whom, and signals that never reach a stranger."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STANDARD = (0, 1, 2)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Identity:
    """One process and no other: its number comes back as somebody else's, but not with the same beginning."""

    pid: int
    began: int
    """Ticks of the clock from the start of the machine."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What /proc says of a process."""

    who: Identity
    parent: int
    has_ended: bool
    """Only its exit code is left, which its parent has not asked for."""


def identify(pid: int) -> Identity | None:
    """Who has this number now, also one that has ended and was not waited for; None where nobody has."""
    found = _entry(pid)
    return found.who if found else None


def lives(who: Identity) -> bool:
    """Whether it still runs."""
    found = _entry(who.pid)
    return found is not None and found.who == who and not found.has_ended


def send(who: Identity, number: signal.Signals) -> bool:
    """Send a signal to this process; False where it is gone, whoever may have its number by now."""
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle stays with one process. If that is ours after it was opened, it was ours when it was opened.
        if not lives(who):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def descendants(pid: int, but: Collection[int] = ()) -> list[Identity]:
    """Those below a process who still run, the nearest first; without the processes in `but` and those below them."""
    children: dict[int, list[_Entry]] = {}
    left_out = {pid, *but}
    for name in os.listdir("/proc"):  # noqa: PTH208 (a thousand names, no paths)
        # The table changes while it is read. As nobody has two parents, only its top could close a ring.
        if name.isdigit() and int(name) not in left_out and (found := _entry(int(name))):
            children.setdefault(found.parent, []).append(found)
    below: list[_Entry] = []
    row = children.get(pid, [])
    while row:
        below += row
        row = [child for parent in row for child in children.get(parent.who.pid, [])]
    return [entry.who for entry in below if not entry.has_ended]


def adopt_orphans() -> None:
    """From now on those below us who lose their parent become our children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when our parent ends, however that happens. A change of user undoes it."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def fork(act: Callable[[], None], keeps: Collection[int], blocks: Collection[signal.Signals]) -> int:
    """A child that does `act` and ends. Of our descriptors it has the standard ones and `keeps`.

    The signals in `blocks` wait in it from its first moment on, so that none is taken for ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocks)
    try:
        pid = os.fork()
        if not pid:
            _be_child(act, keeps)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _be_child(act: Callable[[], None], keeps: Collection[int]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        _close_all_but({*keeps, *_STANDARD})
        act()
        code = 0
    except Exception:  # noqa: BLE001 (whatever happens, the copy must not go on as if it were its parent)
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_all_but(kept: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _entry(pid: int) -> _Entry | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # Its name stands in brackets and may hold any character, so count from the last bracket on.
    state, parent, *fields = text.rpartition(b")")[2].split()
    return _Entry(Identity(pid, int(fields[17])), int(parent), state in (b"Z", b"X"))
