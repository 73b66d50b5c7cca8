"""Policies by name, their options, and the factor of a push."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimatrix.core.errors import UserError
from mimatrix.hybrid.policy import PushScaling, make_policy

BATCH = 32


@given(st.integers(1, 10_000), st.integers(0, 50), st.integers(0, 100_000), st.integers(0, 50_000))
def test_factor_of_a_push_stays_within_bounds(samples: int, staleness: int, seen: int, warm_up: int) -> None:
    rules = PushScaling(reference=BATCH, warm_up=warm_up)
    factor = rules.factor(samples, staleness, seen)
    assert 0 < factor <= max(1.0, samples / BATCH)
    assert factor <= rules.factor(samples, 0, seen)
    assert rules.factor(BATCH, 0, seen) == 1.0


def test_push_scaling_refuses_values_out_of_range() -> None:
    with pytest.raises(UserError, match="global batch is 0"):
        PushScaling(reference=0)
    with pytest.raises(UserError, match="staleness_exponent is 3"):
        PushScaling(reference=8, staleness_exponent=3)


def test_unknown_policies_and_options_are_refused() -> None:
    with pytest.raises(UserError, match=r'there is no policy "loca".*local'):
        make_policy("loca", BATCH, {})
    with pytest.raises(UserError, match="backups is 3 of 3 groups; give how many groups are not waited for, 0 to 2"):
        make_policy("backup", 8, {"backups": 3}, 3)
    with pytest.raises(UserError, match='"plain" has no option "staleness_exponent"'):
        make_policy("plain", BATCH, {"staleness_exponent": 1.0})
    with pytest.raises(UserError, match="local_steps is 0"):
        make_policy("local", BATCH, {"local_steps": 0})


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("large", {"staleness_exponent": "x"}, "staleness_exponent is 'x'; give a number from 0"),
        ("large", {"staleness_exponent": None}, "staleness_exponent is None"),
        ("large", {"warm_up": "a"}, "warm_up is 'a'; give a number of samples"),
        ("large", {"reference": 0}, "reference is 0; give the samples that the learning rate was tuned for"),
        ("large", {"lr_scaling": "no"}, "lr_scaling is 'no'; use True or False"),
        ("bounded", {"max_staleness": "3x"}, "max_staleness is '3x'; give the pushes by which"),
        ("bounded", {"max_staleness": -1}, "max_staleness is -1"),
        ("backup", {"backups": None}, "backups is None"),
        ("local", {"momentum": "a"}, "momentum is 'a'; give a number from 0 to below 1"),
        ("local", {"lr": -1}, "lr is -1; give a learning rate above 0"),
        ("elastic", {"local_steps": 2.7}, "local_steps is 2.7"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_policy(name, BATCH, options, 2)
