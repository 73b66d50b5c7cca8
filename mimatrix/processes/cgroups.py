"""Limit the CPUs and the memory of processes by control groups, of version 1 or 2."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from mimatrix.core.errors import UserError

# Short, so that a quarter of a processor is a slow one rather than one that sleeps three quarters of a second: a
# step must see many periods, or its time depends on where in one it began.
PERIOD_US = 10_000
LEAST_CPUS = 0.05
# The kernel refuses a smaller one.
_LEAST_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The control groups of one controller on this machine."""

    root: Path
    version: int

    def create(self, name: str, controller: str) -> Path:
        """Create a group if there is none of this name, and return its directory."""
        if self.version == 2:
            (self.root / "cgroup.subtree_control").write_text(f"+{controller}")
        group = self.root / name
        group.mkdir(exist_ok=True)
        return group

    def join_file(self, name: str) -> Path:
        """Return the file that a process writes `0` into to join a group."""
        return self.root / name / "cgroup.procs"

    def find(self, prefix: str) -> list[Path]:
        """Return the directories of the groups whose names start with `prefix`."""
        return sorted(path for path in self.root.glob(f"{prefix}*") if path.is_dir())


class CpuCgroups(Cgroups):
    """The control groups for CPUs."""

    def add(self, name: str, cpus: float) -> None:
        """Create a group that may use `cpus` CPUs, or change one."""
        group = self.create(name, "cpu")
        period = period_us(cpus)
        quota = max(_LEAST_QUOTA_US, round(cpus * period))
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))


class MemoryCgroups(Cgroups):
    """The control groups for memory."""

    def add(self, name: str, size: int) -> None:
        """Create a group that may use `size` bytes; a process that needs more is killed, not swapped out."""
        group = self.create(name, "memory")
        (group / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(size))
        limit, text = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", str(size))
        with suppress(OSError):
            # Not every kernel counts what is swapped out.
            (group / limit).write_text(text)


def period_us(cpus: float) -> int:
    """Return how often a quota of `cpus` CPUs is renewed: the shortest period in which it is not too small."""
    return max(PERIOD_US, ceil(_LEAST_QUOTA_US / cpus))


def cpu_cgroups(mounts: Iterable[str] | None = None) -> CpuCgroups | None:
    """Return the control groups for CPUs, or None if this machine has none.

    Args:
        mounts: Lines as in /proc/mounts; those of this machine if omitted.
    """
    found = _find(_mounts() if mounts is None else mounts, "cpu")
    return CpuCgroups(*found) if found else None


def memory_cgroups() -> MemoryCgroups | None:
    """Return the control groups for memory, or None if this machine has none."""
    found = _find(_mounts(), "memory")
    return MemoryCgroups(*found) if found else None


def add_quotas(names: Iterable[str], cpus: Iterable[float]) -> None:
    """Create a group for each name, with its number of CPUs."""
    groups = cpu_cgroups()
    if groups is None:
        raise UserError("this machine has no control groups for CPUs; leave --cpus out")
    for name, share in zip(names, cpus, strict=True):
        try:
            groups.add(name, share)
        except OSError as error:
            raise UserError(f"the quota of {name} cannot be set ({error}); leave --cpus out") from None


def parse_cpus(text: str, nodes: int) -> tuple[float, ...]:
    """Parse `1,1,0.5,0.25`: one number for each node."""
    try:
        cpus = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f'"{text}" is not a list of CPU counts; write for example --cpus 1,1,0.5,0.25') from None
    if len(cpus) != nodes:
        raise UserError(f"--cpus has {len(cpus)} numbers for {nodes} nodes; give one for each")
    if not all(LEAST_CPUS <= share <= 1024 for share in cpus):
        raise UserError(f"--cpus {text} has a number out of range; use {LEAST_CPUS} to 1024 for each node")
    return cpus


def _mounts() -> list[str]:
    return Path("/proc/mounts").read_text(encoding="utf-8").splitlines()


def _find(mounts: Iterable[str], controller: str) -> tuple[Path, int] | None:
    """Find the root and the version; version 1 comes first, since a controller that it has is not in version 2."""
    found = [line.split() for line in mounts]
    for _, path, kind, options, *_ in found:
        if kind == "cgroup" and controller in options.split(","):
            return Path(path), 1
    for _, path, kind, *_ in found:
        if kind == "cgroup2" and controller in _controllers(Path(path)):
            return Path(path), 2
    return None


def _controllers(root: Path) -> list[str]:
    try:
        return (root / "cgroup.controllers").read_text(encoding="utf-8").split()
    except OSError:
        return []
