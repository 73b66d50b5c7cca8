"""What is kept of metrics over time: all points for a while, then means over longer and longer periods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Tier:
    """Points at this distance, kept for this time."""

    every_s: float
    kept_s: float


TIERS = (Tier(5.0, 2 * HOUR_S), Tier(60.0, 3 * DAY_S), Tier(600.0, 62 * DAY_S))


def tier_for(since_s: float, until_s: float, now_s: float, points: int) -> int:
    """Return the finest tier that is still kept from `since_s` on, with about this number of points until `until_s`."""
    for number, tier in enumerate(TIERS):
        if tier.kept_s >= now_s - since_s and (until_s - since_s) / tier.every_s <= 2 * points:
            return number
    return len(TIERS) - 1


def short(value: float | None) -> float | None:
    """Round to four digits, which are enough for a picture."""
    return None if value is None else float(f"{value:.4g}")


def mean(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one point for several: means of numbers, by name and by rank; the last of everything else."""
    keys = dict.fromkeys(key for point in points for key in point)
    return {key: _joined([point[key] for point in points if point.get(key) is not None], key) for key in keys}


def _joined(values: list[Any], key: str) -> Any:
    if not values or key == "step":
        return values[-1] if values else None
    if isinstance(values[0], Mapping):
        return mean(values)
    if isinstance(values[0], list):
        columns = zip_longest(*values)
        return [_mean_of([value for value in column if value is not None]) for column in columns]
    return _mean_of(values)


def _mean_of(values: Sequence[float]) -> float | None:
    return short(sum(values) / len(values)) if values else None
