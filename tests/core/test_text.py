"""Lists, counts, sizes and times as sentences have them."""

import pytest

from mimatrix.core.text import count_of, join_names, ordinal, spell_bytes, spell_seconds


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (list("abcd"), "a, b, c and d"),
        (list("abcde"), "a, b, c and 2 more"),
    ],
)
def test_names_are_joined_and_many_are_cut(names: list[str], text: str) -> None:
    assert join_names(names) == text


def test_counts_have_their_noun() -> None:
    assert (count_of(1, "rank"), count_of(2, "rank"), count_of(1200, "job")) == ("1 rank", "2 ranks", "1,200 jobs")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (113, "113th"), (22, "22nd")],
)
def test_ordinals_are_english(number: int, text: str) -> None:
    assert ordinal(number) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (120e6, "120 MB"),
        (999.7e6, "1000 MB"),
        (44.2e9, "44.2 GB"),
    ],
)
def test_sizes_have_three_digits_and_a_space(count: float, text: str) -> None:
    assert spell_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2123, "212 ms"), (1.5, "1.5 s"), (-0.25, "-250 ms"), (2e-5, "20 us"), (3e-9, "3 ns")]
)
def test_times_have_three_digits_and_a_space(seconds: float, text: str) -> None:
    assert spell_seconds(seconds) == text
