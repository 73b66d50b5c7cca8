"""How much of the processors and of the memory others may use: control groups, of version 1 or 2."""

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
class Groups:
    """Where this machine keeps control groups of one kind."""

    root: Path
    version: int

    def made(self, name: str, controller: str) -> Path:
        """The folder of a group, which is there then."""
        if self.version == 2:
            (self.root / "cgroup.subtree_control").write_text(f"+{controller}")
        group = self.root / name
        group.mkdir(exist_ok=True)
        return group

    def members(self, name: str) -> Path:
        """The file that a process writes `0` into to join."""
        return self.root / name / "cgroup.procs"

    def named(self, prefix: str) -> list[Path]:
        """The groups whose name starts like that."""
        return sorted(path for path in self.root.glob(f"{prefix}*") if path.is_dir())


class CpuGroups(Groups):
    """Where this machine keeps control groups for processors."""

    def add(self, name: str, cpus: float) -> None:
        """A group that may use `cpus` processors."""
        group = self.made(name, "cpu")
        period = period_us(cpus)
        quota = max(_LEAST_QUOTA_US, round(cpus * period))
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))


class MemoryGroups(Groups):
    """Where this machine keeps control groups for memory."""

    def add(self, name: str, size: int) -> None:
        """A group that may use `size` bytes; who asks for more is killed, not swapped out."""
        group = self.made(name, "memory")
        (group / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(size))
        limit, text = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", str(size))
        with suppress(OSError):
            # Not every kernel counts what is swapped out.
            (group / limit).write_text(text)


def period_us(cpus: float) -> int:
    """How often a quota of `cpus` processors is handed out: the least time in which it is not too small."""
    return max(PERIOD_US, ceil(_LEAST_QUOTA_US / cpus))


def find_groups(mounts: Iterable[str]) -> CpuGroups | None:
    """Those for processors, from the lines of /proc/mounts."""
    found = _find(mounts, "cpu")
    return CpuGroups(*found) if found else None


def this_machine() -> CpuGroups | None:
    """Where this machine has them for processors, if it does."""
    return find_groups(_mounts())


def memory_groups() -> MemoryGroups | None:
    """Where this machine has them for memory, if it does."""
    found = _find(_mounts(), "memory")
    return MemoryGroups(*found) if found else None


def add_quotas(names: Iterable[str], cpus: Iterable[float]) -> None:
    """A group for each name, with its number of processors."""
    groups = this_machine()
    if groups is None:
        raise UserError("this machine has no control groups for processors; leave --cpus out")
    for name, share in zip(names, cpus, strict=True):
        try:
            groups.add(name, share)
        except OSError as error:
            raise UserError(f"the quota of {name} cannot be set ({error}); leave --cpus out") from None


def parse_cpus(text: str, nodes: int) -> tuple[float, ...]:
    """`1,1,0.5,0.25`: one number for each node."""
    try:
        cpus = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f'"{text}" is no list of processors; write for example --cpus 1,1,0.5,0.25') from None
    if len(cpus) != nodes:
        raise UserError(f"--cpus has {len(cpus)} numbers for {nodes} nodes; give one for each")
    if not all(LEAST_CPUS <= share <= 1024 for share in cpus):
        raise UserError(f"--cpus {text} has a number out of range; use {LEAST_CPUS} to 1024 for each node")
    return cpus


def _mounts() -> list[str]:
    return Path("/proc/mounts").read_text(encoding="utf-8").splitlines()


def _find(mounts: Iterable[str], controller: str) -> tuple[Path, int] | None:
    """Version 1 where it has the controller, since then version 2 has it not."""
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
