"""Curves: they never fall, pass through what was measured, and end where measuring ended."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from mimatrix.core.errors import UserError
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.pchip import pchip

points = st.dictionaries(
    st.integers(1, 200), st.integers(0, 10**6).map(lambda value: value / 1000), min_size=1, max_size=9
).map(lambda found: tuple(sorted(found.items())))


@given(points)
def test_a_curve_never_falls_and_passes_through_the_running_maximum(measured: tuple[tuple[int, float], ...]) -> None:
    curve = Curve(measured)
    assert len(curve.table) == curve.most + 1
    assert curve.table[0] == 0
    assert (np.diff(curve.table) >= 0).all()
    highest = 0.0
    for size, value in measured:
        highest = max(highest, value)
        assert curve.at(size) == pytest.approx(highest, rel=1e-9, abs=1e-9)


@given(points)
def test_the_inverse_is_the_most_that_fits(measured: tuple[tuple[int, float], ...]) -> None:
    curve = Curve(measured)
    for limit in (0.0, *(value for _, value in measured), curve.at(curve.most) / 2):
        size = curve.largest(limit)
        assert size == 0 or curve.at(size) <= limit
        assert size == curve.most or curve.at(size + 1) > limit


@given(points.filter(lambda found: len(found) > 1))
def test_the_cubics_are_those_of_scipy(measured: tuple[tuple[int, float], ...]) -> None:
    places, values = zip(*measured, strict=True)
    wanted = PchipInterpolator(places, values)(np.arange(places[0], places[-1] + 1))
    assert pchip(places, values) == pytest.approx(wanted, rel=1e-9, abs=1e-9 * max(values) + 1e-12)


def test_below_the_first_point_it_is_flat_and_beyond_the_last_refused() -> None:
    curve = Curve.of([(8, 4.0), (2, 1.0)])
    assert curve.points == ((2, 1.0), (8, 4.0))
    assert curve.table[:3].tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(UserError, match="9 samples are beyond the 8 that were measured; measure more"):
        curve.at(9)
    with pytest.raises(UserError, match="beyond"):
        curve.at(-1)


def test_scaled() -> None:
    curve = Curve(((1, 1.0), (4, 3.0)))
    assert curve.scaled(2.5).table == pytest.approx(2.5 * curve.table)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ((), "measure one or more"),
        (((0, 1.0),), "rising order from 1"),
        (((2, 1.0), (2, 1.0)), "rising order"),
        (((1, -1.0),), "cannot be negative"),
        (((1, float("nan")),), "cannot be negative"),
    ],
)
def test_bad_points_are_refused(measured: tuple[tuple[int, float], ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Curve(measured)
