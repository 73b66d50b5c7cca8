"""Values as reports carry them: finite, within the bounds of the API, and rounded."""

import math
from typing import Any

MAX_MEASURED = 1e9
"""Of seconds, and of samples per second."""
MAX_COUNT = 1 << 53


def as_float(value: Any) -> float:
    """Return a number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_measured(value: float) -> float:
    """Return a duration or a rate between 0 and `MAX_MEASURED`; 0 if it is NaN."""
    return 0.0 if math.isnan(value) else rounded(min(max(value, 0.0), MAX_MEASURED))


def as_count(value: int) -> int:
    """Return a number of things between 0 and `MAX_COUNT`."""
    return min(max(value, 0), MAX_COUNT)


def as_metric(value: Any) -> float | None:
    """Return a metric as JSON can carry it; None stands for NaN and infinities."""
    number = as_float(value)
    return rounded(number) if math.isfinite(number) else None


def rounded(value: float) -> float:
    """Round to six digits: more are noise, and cost bytes."""
    return float(f"{value:.6g}")
