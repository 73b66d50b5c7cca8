"""Limits that control groups (cgroups, version 1 or 2) set for this process: of its own group and all above it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")


def memory_left_bytes(process: Path = _SELF) -> int | None:
    """Return the bytes left below the tightest limit, or None if there is no limit.

    The page cache does not count as used, since the kernel reclaims it.
    """
    left = _memory_left_by_group(process)
    return max(0, min(left.values())) if left else None


def limiting_cgroup(process: Path = _SELF) -> str:
    """Return the path of the control group with the tightest memory limit, or "" if there is no limit."""
    left = _memory_left_by_group(process)
    return str(min(left, key=lambda group: left[group])) if left else ""


def cpu_quota(process: Path = _SELF) -> float | None:
    """Return how many CPU cores this process may use, or None if there is no limit."""
    quotas = [quota for group in _groups("cpu", process) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _memory_left_by_group(process: Path) -> dict[Path, int]:
    limits = {group: limit for group in _groups("memory", process) if (limit := _memory_limit(group)) is not None}
    return {group: limit - _memory_used(group) for group, limit in limits.items()}


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """Yield the directories of the group of a process and of those above it, in every hierarchy with a controller."""
    mounts = _mounts(controller, process)
    for line in _lines(process / "cgroup"):
        number, controllers, inside = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or controller in controllers.split(","):
            for root, mount in mounts.get(version, []):
                # In a container the mount shows a part of the tree, while the path may still start at its top.
                below = Path(inside).relative_to(root) if Path(inside).is_relative_to(root) else Path()
                group = mount / below
                yield from (above for above in (group, *group.parents) if above.is_relative_to(mount))


def _mounts(controller: str, process: Path) -> dict[int, list[tuple[str, Path]]]:
    """Return where control groups are mounted, by version: the root of the visible part of their tree, and where."""
    mounts: dict[int, list[tuple[str, Path]]] = {}
    for line in _lines(process / "mountinfo"):
        first, _, second = line.partition(" - ")
        root, mount = first.split()[3:5]
        kind, *_, options = second.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            mounts.setdefault(2 if kind == "cgroup2" else 1, []).append((root, Path(mount)))
    return mounts


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(group / name)
        # Version 1 writes "no limit" as the largest number of pages.
        if limit is not None and limit < 1 << 60:
            return limit
    return None


def _memory_used(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in _lines(group / "memory.stat") if len(line.split()) == 2)
    # In version 1 "total_" includes the groups below, as the usage does.
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
