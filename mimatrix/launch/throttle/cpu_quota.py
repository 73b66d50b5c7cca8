"""Limit processes as root: control groups for CPUs and memory, named after the launcher's process and the rank.

A launcher that is killed cannot remove its groups. The name says which process made them, so the next one does it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mimatrix.core.errors import UserError
from mimatrix.processes.cgroups import LEAST_CPUS, Cgroups, cpu_cgroups, memory_cgroups
from mimatrix.processes.proc import identify, is_alive
from mimatrix.processes.signals import ignore_termination

PREFIX = "mimatrix-run-"
_REMOVED_S = 5.0
Limit = TypeVar("Limit", int, float)


@contextmanager
def quotas(cpus: Mapping[int, float]) -> Iterator[dict[int, Path]]:
    """Create a control group for each rank in `cpus`, yield the files that join them, and remove all at the end."""
    groups = cpu_cgroups()
    if groups is None:
        raise UserError("this machine has no control groups for CPUs; use --slow-by signals")
    least = min(cpus.values())
    if least < LEAST_CPUS:
        raise UserError(f"a quota of {least:g} CPUs is too small; use {LEAST_CPUS} or more, or --slow-by signals")
    with _removed(groups):
        yield _add(groups, cpus, groups.add, "quota", "use --slow-by signals, or run as root")


@contextmanager
def memory_limits(sizes: Mapping[int, int]) -> Iterator[dict[int, Path]]:
    """Create a control group for each rank in `sizes`, whose processes may use that many bytes; see `quotas`."""
    groups = memory_cgroups()
    if groups is None:
        raise UserError("this machine has no control groups for memory; leave --memory out")
    with _removed(groups):
        yield _add(groups, sizes, groups.add, "memory limit", "run as root")


def remove_leftovers() -> None:
    """Remove the groups of launchers that have ended; what still runs in them is killed."""
    for groups in (cpu_cgroups(), memory_cgroups()):
        for group in groups.find(PREFIX) if groups and os.access(groups.root, os.W_OK) else []:
            pid = group.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not group.name.startswith(_prefix_of(int(pid))):
                _remove(group)


@contextmanager
def _removed(groups: Cgroups) -> Iterator[None]:
    """Remove this launcher's groups at the end, whatever happens."""
    try:
        yield
    finally:
        with ignore_termination():
            for group in groups.find(_prefix_of(os.getpid())):
                _remove(group)


def _add(
    groups: Cgroups, limits: Mapping[int, Limit], add: Callable[[str, Limit], None], what: str, fix: str
) -> dict[int, Path]:
    """Create a group for each rank, and return the files that join them."""
    names = {rank: f"{_prefix_of(os.getpid())}{rank}" for rank in limits}
    try:
        for rank, limit in limits.items():
            add(names[rank], limit)
    except OSError as error:
        raise UserError(f"the {what} of rank {rank} cannot be set ({error.strerror}); {fix}") from None
    return {rank: groups.join_file(name) for rank, name in names.items()}


def _prefix_of(pid: int) -> str:
    """Return a prefix with the process and its start time, as numbers are reused; no group has that of an ended one."""
    process = identify(pid)
    return f"{PREFIX}{pid}-{process.start_ticks if process and is_alive(process) else 'gone'}-"


def _remove(group: Path) -> None:
    """Remove a group with all its processes. The next launcher tries again with what the kernel does not release."""
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
