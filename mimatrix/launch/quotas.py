"""Slow processes down as root: a control group with a quota for each slow rank, named after the launcher's process.

A launcher that is killed cannot remove its groups. The name tells whose they were, so the next one does it.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.lab import LEAST_CPUS, CpuGroups, this_machine
from mimatrix.launch.interrupts import unheard

PREFIX = "mimatrix-run-"
_REMOVED_S = 5.0


@contextmanager
def quotas(cpus: Mapping[int, float]) -> Iterator[dict[int, Path]]:
    """A control group for each rank in `cpus`: gives the file that joins it, and removes all groups at the end."""
    groups = this_machine()
    if groups is None:
        raise UserError("this machine has no control groups for processors; use --slow-by signals")
    least = min(cpus.values())
    if least < LEAST_CPUS:
        raise UserError(f"a quota of {least:g} processors is too small; use {LEAST_CPUS} or more, or --slow-by signals")
    mine = _prefix_of(os.getpid())
    try:
        yield _add(groups, mine, cpus)
    finally:
        with unheard():
            for group in groups.named(mine):
                _remove(group)


def remove_remains() -> None:
    """Remove the groups of launchers that live no more; what still runs in them is killed."""
    groups = this_machine()
    for group in groups.named(PREFIX) if groups and os.access(groups.root, os.W_OK) else []:
        pid = group.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not group.name.startswith(_prefix_of(int(pid))):
            _remove(group)


def _add(groups: CpuGroups, prefix: str, cpus: Mapping[int, float]) -> dict[int, Path]:
    names = {rank: f"{prefix}{rank}" for rank in cpus}
    try:
        for rank, share in cpus.items():
            groups.add(names[rank], share)
    except OSError as error:
        raise UserError(
            f"the quota of rank {rank} cannot be set ({error.strerror}); use --slow-by signals, or run as root"
        ) from None
    return {rank: groups.members(name) for rank, name in names.items()}


def _prefix_of(pid: int) -> str:
    """Says which process, and when it began: numbers of processes come back. Of one that has ended: no group's."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return f"{PREFIX}{pid}-gone-"
    return f"{PREFIX}{pid}-{'gone' if state == 'Z' else fields[18]}-"


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
