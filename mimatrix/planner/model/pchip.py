"""PCHIP at whole numbers: piecewise cubics that do not fall between points that do not.

Many devices have many curves of some ten points each, which are only evaluated at every whole number. That takes a
fifth of the time of SciPy's general implementation, which must also be imported first.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def pchip(places: Sequence[int], values: Sequence[float]) -> NDArray[np.float64]:
    """Return the values at places[0], places[0] + 1, ... places[-1], as scipy.interpolate.PchipInterpolator does."""
    if len(places) == 1:
        return np.array(values, np.float64)
    widths = np.diff(places)
    rises = (np.diff(values) / widths).tolist()
    slopes = np.array(_slopes(widths.tolist(), rises))
    # Each piece is a cubic of how far into it a place is.
    linear, steep = slopes[:-1], np.array(rises)
    quadratic = (3 * steep - 2 * slopes[:-1] - slopes[1:]) / widths
    cubic = (slopes[:-1] + slopes[1:] - 2 * steep) / widths**2
    into = np.arange(places[0], places[-1]) - np.repeat(places[:-1], widths)
    pieces = np.stack([values[:-1], linear, quadratic, cubic]).repeat(widths, axis=1)
    inner = pieces[0] + into * (pieces[1] + into * (pieces[2] + into * pieces[3]))
    return np.append(inner, values[-1])


def _slopes(widths: list[int], rises: list[float]) -> list[float]:
    """Return the slope at each point: a mean of the slopes on both sides that keeps the curve from overshooting."""
    if len(rises) == 1:
        return rises * 2
    inner = []
    for (left, right), (before, after) in zip(pairwise(widths), pairwise(rises), strict=True):
        near, far = 2 * right + left, right + 2 * left
        inner.append((near + far) / (near / before + far / after) if before * after > 0 else 0.0)
    first = _end_slope(widths[0], widths[1], rises[0], rises[1])
    last = _end_slope(widths[-1], widths[-2], rises[-1], rises[-2])
    return [first, *inner, last]


def _end_slope(width: int, next_width: int, rise: float, next_rise: float) -> float:
    """Return the slope of the parabola through the last three points, unless it changes sign."""
    slope = ((2 * width + next_width) * rise - width * next_rise) / (width + next_width)
    if slope * rise <= 0:
        return 0.0
    return 3 * rise if rise * next_rise <= 0 and abs(slope) > 3 * abs(rise) else slope
