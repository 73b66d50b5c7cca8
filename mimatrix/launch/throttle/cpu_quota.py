"""Limit processes as root: control groups for processors and memory, named after the launcher's process and the rank.

A launcher that is killed cannot remove its groups. The name tells whose they were, so the next one does it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mimatrix.core.errors import UserError
from mimatrix.processes.cgroups import LEAST_CPUS, Groups, memory_groups, this_machine
from mimatrix.processes.proc import identify, lives
from mimatrix.processes.signals import unheard

PREFIX = "mimatrix-run-"
_REMOVED_S = 5.0
Limit = TypeVar("Limit", int, float)


@contextmanager
def quotas(cpus: Mapping[int, float]) -> Iterator[dict[int, Path]]:
    """A control group for each rank in `cpus`: gives the file that joins it, and removes all groups at the end."""
    groups = this_machine()
    if groups is None:
        raise UserError("this machine has no control groups for processors; use --slow-by signals")
    least = min(cpus.values())
    if least < LEAST_CPUS:
        raise UserError(f"a quota of {least:g} processors is too small; use {LEAST_CPUS} or more, or --slow-by signals")
    with _removed(groups):
        yield _add(groups, cpus, groups.add, "quota", "use --slow-by signals, or run as root")


@contextmanager
def memory_limits(sizes: Mapping[int, int]) -> Iterator[dict[int, Path]]:
    """The same for memory: the group of each rank in `sizes` may use so many bytes."""
    groups = memory_groups()
    if groups is None:
        raise UserError("this machine has no control groups for memory; leave --memory out")
    with _removed(groups):
        yield _add(groups, sizes, groups.add, "memory limit", "run as root")


def remove_remains() -> None:
    """Remove the groups of launchers that live no more; what still runs in them is killed."""
    for groups in (this_machine(), memory_groups()):
        for group in groups.named(PREFIX) if groups and os.access(groups.root, os.W_OK) else []:
            pid = group.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not group.name.startswith(_prefix_of(int(pid))):
                _remove(group)


@contextmanager
def _removed(groups: Groups) -> Iterator[None]:
    """Whatever happens, this launcher's groups are gone at the end."""
    try:
        yield
    finally:
        with unheard():
            for group in groups.named(_prefix_of(os.getpid())):
                _remove(group)


def _add(
    groups: Groups, limits: Mapping[int, Limit], add: Callable[[str, Limit], None], what: str, fix: str
) -> dict[int, Path]:
    """A group for each rank, and the file that joins it."""
    names = {rank: f"{_prefix_of(os.getpid())}{rank}" for rank in limits}
    try:
        for rank, limit in limits.items():
            add(names[rank], limit)
    except OSError as error:
        raise UserError(f"the {what} of rank {rank} cannot be set ({error.strerror}); {fix}") from None
    return {rank: groups.members(name) for rank, name in names.items()}


def _prefix_of(pid: int) -> str:
    """Says which process, and when it began: numbers of processes come back. Of one that has ended: no group's."""
    who = identify(pid)
    return f"{PREFIX}{pid}-{who.began if who and lives(who) else 'gone'}-"


def _remove(group: Path) -> None:
    """Remove a group with all who are in it. What the kernel does not let go of, the next launcher tries again."""
    deadline = time.monotonic() + _REMOVED_S
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
            return
        _kill_members(group)
        time.sleep(0.02)


def _kill_members(group: Path) -> None:
    with suppress(OSError):
        # A process that this pid namespace does not see reads as 0, and a signal to 0 would be one to ourselves.
        for pid in {int(word) for word in (group / "cgroup.procs").read_text().split()} - {0, os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
