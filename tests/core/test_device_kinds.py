"""One matcher of device kinds: what a person writes against what machines call their devices."""

import pytest

from mimatrix.core.device_kinds import match_kind

CARDS = ("NVIDIA A40", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 3090", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("kind", "cards"),
    [
        ("A40", ["NVIDIA A40"]),
        ("a4000", ["NVIDIA RTX A4000"]),
        ("my NVIDIA A40", ["NVIDIA A40"]),
        ("309", ["NVIDIA GeForce RTX 3090"]),
        ("A100", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"]),
        ("TPU v4", []),
        ("", []),
    ],
)
def test_a_kind_matches_by_its_name_then_by_words_then_by_a_part(kind: str, cards: list[str]) -> None:
    assert match_kind(kind, CARDS) == cards


def test_an_equal_name_wins_over_a_longer_one() -> None:
    assert match_kind("a40", ("A40", "NVIDIA A40")) == ["A40"]


def test_a_larger_number_is_another_kind() -> None:
    assert match_kind("A4000", ("A40",)) == []
    assert match_kind("A40", ("A4000", "A40")) == ["A40"]
