"""Processes as the kernel sees them: identities, descendants, and signals that never reach an unrelated process."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a process is told to end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STANDARD = (0, 1, 2)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process and no other: the kernel reuses a number, but not together with its start time."""

    pid: int
    start_ticks: int
    """Clock ticks from the start of the machine."""


@dataclass(frozen=True, slots=True)
class _Stat:
    """What /proc says about a process."""

    process: ProcessId
    parent: int
    has_ended: bool
    """Only its exit code is left, which its parent has not asked for."""


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this number, also one that has ended and was not waited for; None if none has."""
    stat = _read_stat(pid)
    return stat.process if stat else None


def is_alive(process: ProcessId) -> bool:
    """Return whether the process still runs.

    Raises:
        OSError: It cannot be told now, for example because no descriptor is left.
    """
    stat = _read_stat(process.pid)
    return stat is not None and stat.process == process and not stat.has_ended


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Send a signal to this process; return False if it is gone, even if another one has its number by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle stays with one process. If that is ours after it was opened, it was ours when it was opened.
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def descendants(pid: int, exclude: Collection[int] = ()) -> list[ProcessId]:
    """Return the descendants of a process that still run, the nearest first, without the subtrees in `exclude`."""
    children: dict[int, list[_Stat]] = {}
    left_out = {pid, *exclude}
    for name in os.listdir("/proc"):  # noqa: PTH208 (a thousand names, no paths)
        # The table changes while it is read. As no process has two parents, only its top could close a ring.
        if name.isdigit() and int(name) not in left_out and (stat := _read_stat(int(name))):
            children.setdefault(stat.parent, []).append(stat)
    below: list[_Stat] = []
    row = children.get(pid, [])
    while row:
        below += row
        row = [child for parent in row for child in children.get(parent.process.pid, [])]
    return [stat.process for stat in below if not stat.has_ended]


def adopt_orphans() -> None:
    """Make descendants that lose their parent our children, from now on."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when our parent ends, however that happens. A change of user undoes it."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What a child does between fork and exec, as `preexec_fn`: from then on it dies with its parent."""

    parent: int
    become: Callable[[], None] | None = None
    """Changes the user."""
    joins: Path | None = None
    """The `cgroup.procs` file of a control group to join."""

    def __call__(self) -> None:
        """Set the child up."""
        if self.become:
            self.become()
        die_with_parent()  # a change of user would undo it, so it comes after
        if os.getppid() != self.parent:
            os._exit(1)
        if self.joins:
            self.joins.write_text("0")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def fork(act: Callable[[], None], keeps: Collection[int], blocks: Collection[signal.Signals]) -> int:
    """Fork a child that calls `act` and ends; return its process number.

    Args:
        act: What the child does.
        keeps: Our descriptors that it keeps, besides the standard ones.
        blocks: Signals that wait in it from its first moment on, so that none is taken for ours.
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


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Its name stands in brackets and may hold any character, so count from the last bracket on.
    state, parent, *fields = text.rpartition(b")")[2].split()
    return _Stat(ProcessId(pid, int(fields[17])), int(parent), state in (b"Z", b"X"))
