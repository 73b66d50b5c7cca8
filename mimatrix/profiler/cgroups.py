"""What the control groups of this process let it have: version 1 or 2, its own group and all above it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")


def memory_left(process: Path = _SELF) -> int | None:
    """Bytes until the tightest limit; None where there is no limit. Cached files do not count: they would give way."""
    limits = {group: limit for group in _groups("memory", process) if (limit := _memory_limit(group)) is not None}
    left = [limit - _memory_used(group) for group, limit in limits.items()]
    return max(0, min(left)) if left else None


def limiting_group(process: Path = _SELF) -> str:
    """The control group with the tightest limit of memory, by its path; empty where there is none."""
    limits = {group: limit for group in _groups("memory", process) if (limit := _memory_limit(group)) is not None}
    return str(min(limits, key=lambda group: limits[group] - _memory_used(group))) if limits else ""


def cpu_quota(process: Path = _SELF) -> float | None:
    """Processors that it may use at the most; None where there is no limit."""
    found = [quota for group in _groups("cpu", process) if (quota := _quota(group)) is not None]
    return min(found, default=None)


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """The folders of the group that has this process and of those above it, in every hierarchy that may limit it."""
    mounts = _mounts(controller, process)
    for line in _lines(process / "cgroup"):
        number, controllers, inside = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or controller in controllers.split(","):
            for root, mount in mounts.get(version, []):
                # In a container the mount shows a part of the tree, while the path may still be told from its top.
                below = Path(inside).relative_to(root) if Path(inside).is_relative_to(root) else Path()
                group = mount / below
                yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _mounts(controller: str, process: Path) -> dict[int, list[tuple[str, Path]]]:
    """Where control groups are mounted, by version: which part of their tree, and where."""
    found: dict[int, list[tuple[str, Path]]] = {}
    for line in _lines(process / "mountinfo"):
        first, _, second = line.partition(" - ")
        root, mount = first.split()[3:5]
        kind, *_, options = second.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            found.setdefault(2 if kind == "cgroup2" else 1, []).append((root, Path(mount)))
    return found


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(group / name)
        # Version 1 writes "none" as the largest number of pages there is.
        if limit is not None and limit < 1 << 60:
            return limit
    return None


def _memory_used(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in _lines(group / "memory.stat") if len(line.split()) == 2)
    # In version 1 "total_" counts the groups below as well, as the usage does.
    cached = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    return max(0, used - cached)


def _quota(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _number(file: Path) -> int | None:
    with suppress(ValueError):
        return int(" ".join(_lines(file)))
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
