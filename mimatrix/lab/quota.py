"""How much of the processors a node of the lab may use: one control group for each, of version 1 or 2."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mimatrix.core.errors import UserError

# Short, so that a quarter of a processor is a slow one rather than one that sleeps three quarters of a second.
PERIOD_US = 20_000
LEAST_CPUS = 0.05


@dataclass(frozen=True, slots=True)
class CpuGroups:
    """Where this machine keeps control groups for processors."""

    root: Path
    version: int

    def add(self, name: str, cpus: float) -> None:
        """A group that may use `cpus` processors."""
        group = self.root / name
        quota = round(cpus * PERIOD_US)
        if self.version == 2:
            (self.root / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir(exist_ok=True)
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))

    def members(self, name: str) -> Path:
        """The file that a process writes `0` into to join."""
        return self.root / name / "cgroup.procs"

    def named(self, prefix: str) -> list[Path]:
        """The groups whose name starts like that."""
        return sorted(path for path in self.root.glob(f"{prefix}*") if path.is_dir())


def find_groups(mounts: Iterable[str]) -> CpuGroups | None:
    """From the lines of /proc/mounts; version 1 where it has the processors, since then version 2 has them not."""
    found = [line.split() for line in mounts]
    for _, path, kind, options, *_ in found:
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuGroups(Path(path), 1)
    for _, path, kind, *_ in found:
        if kind == "cgroup2" and "cpu" in _controllers(Path(path)):
            return CpuGroups(Path(path), 2)
    return None


def this_machine() -> CpuGroups | None:
    """Where this machine has them, if it does."""
    return find_groups(Path("/proc/mounts").read_text(encoding="utf-8").splitlines())


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


def _controllers(root: Path) -> list[str]:
    try:
        return (root / "cgroup.controllers").read_text(encoding="utf-8").split()
    except OSError:
        return []
