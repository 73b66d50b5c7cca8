"""What is offered to someone who mistyped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.core.errors import ConfigError, MiMatrixError, ScheduleError, UserError, nearest


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("rat", ["rate", "latency"], '; did you mean "rate"?'),
        ("RATE", ["rate", "latency"], '; did you mean "rate"?'),
        ("spine1", ["Leaf1", "Spine1"], '; did you mean "Spine1"?'),
        ("SPINE2", ["LEAF1", "SPINE1"], '; did you mean "SPINE1"?'),
        ("xyz", ["rate", "latency"], "; known are latency, rate"),
        ("", ["rate"], "; known are rate"),
    ],
)
def test_the_nearest_word(word: str, known: list[str], said: str) -> None:
    assert nearest(word, known) == said


def test_a_long_list_is_cut() -> None:
    assert "more" not in nearest("zzz", [f"n{index}" for index in range(20)])
    assert nearest("zzz", [f"n{index}" for index in range(21)]).endswith(" and 1 more")
    said = nearest("zzz", [f"node{index:04}" for index in range(4096)])
    assert said.startswith("; known are node0000, node0001, ")
    assert said.endswith(" and 4076 more")
    assert len(said) < 400


@settings(deadline=None)
@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=30))
def test_only_what_exists_is_offered(word: str, known: list[str]) -> None:
    said = nearest(word, known)
    assert said.startswith(("; did you mean ", "; known are "))
    assert any(choice in said for choice in known)


def test_the_tree() -> None:
    assert issubclass(ConfigError, UserError)
    assert issubclass(UserError, MiMatrixError)
    assert issubclass(ScheduleError, MiMatrixError)
    # A wrong algorithm is not the person's fault, and must not be told as if it were.
    assert not issubclass(ScheduleError, UserError)
