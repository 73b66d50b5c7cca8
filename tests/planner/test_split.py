"""Splits: what is cut adds up, and what is written wrongly gets one sentence and the fix."""

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimatrix.core.errors import UserError
from mimatrix.planner import Split, resolve_batches

GPUS = ("NVIDIA A40", "NVIDIA A40", "Tesla V100-SXM2-16GB", "cpu")

splits = st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1, max_size=5).filter(any)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6).filter(
        lambda ranks: any(batch for batch, _ in ranks)
    )
)
def test_micro_batches_are_few_and_even(ranks: list[tuple[int, int]]) -> None:
    split = Split.of([batch for batch, _ in ranks], [limit for _, limit in ranks])
    assert split.ranks == len(ranks)
    assert split.batches == tuple(batch for batch, _ in ranks)
    assert split.total == sum(split.batches)
    assert split.rounds == max(len(sizes) for sizes in split.micro)
    for (batch, limit), sizes in zip(ranks, split.micro, strict=True):
        assert len(sizes) == -(-batch // limit)
        assert list(sizes) == sorted(sizes, reverse=True)
        assert not sizes or (sizes[0] <= limit and sizes[0] - sizes[-1] <= 1)


def test_one_limit_for_all_and_none() -> None:
    assert Split.of([7, 0, 2], 3).micro == ((3, 2, 2), (), (2,))
    assert Split.of([7, 0, 2], None).micro == ((7,), (), (2,))
    assert Split.of([7, 0, 2]).rounds == 1


@given(splits)
def test_ranges_cover_the_global_batch_in_order(micro: list[tuple[int, ...]]) -> None:
    split = Split(tuple(micro))
    parts = [part for rank in range(split.ranks) for part in split.ranges(rank)]
    assert [position for part in parts for position in part] == list(range(split.total))
    assert tuple(tuple(map(len, split.ranges(rank))) for rank in range(split.ranks)) == split.micro


@given(splits, st.data())
def test_a_partial_batch_is_cut_in_proportion(micro: list[tuple[int, ...]], data: st.DataObject) -> None:
    split = Split(tuple(micro))
    count = data.draw(st.integers(1, split.total))
    part = split.for_samples(count)
    assert part.total == count
    for whole, sizes in zip(split.micro, part.micro, strict=True):
        assert abs(sum(sizes) - Fraction(sum(whole) * count, split.total)) < 1
        assert len(sizes) <= len(whole)
        assert max(sizes, default=0) <= max(whole, default=0)
    if count == split.total:
        assert part == split


@given(splits)
def test_a_split_goes_through_json(micro: list[tuple[int, ...]]) -> None:
    split = Split(tuple(micro))
    assert Split.from_json(json.loads(json.dumps(split.to_json()))) == split


@pytest.mark.parametrize(
    ("batch", "global_batch", "want"),
    [
        ("auto", 10, (3, 3, 2, 2)),
        ("auto", 3, (1, 1, 1, 0)),
        (4, 16, (4, 4, 4, 4)),
        (4, None, (4, 4, 4, 4)),
        ([4, 2, 2, 0], 8, (4, 2, 2, 0)),
        ((4, 2, 2, 0), None, (4, 2, 2, 0)),
        ({"A40": 5, "v100": 3, "cpu": 1}, 14, (5, 5, 3, 1)),
        ({"A40": 5, 1: 2}, 16, (5, 2, 5, 4)),
        ({"A40": 5}, None, (5, 5, 0, 0)),
        ({"A40": 5}, 10, (5, 5, 0, 0)),
        ({0: 7}, 10, (7, 1, 1, 1)),
        ({"nvidia": 1, "nvidia a40": 4, "v100": 0, 3: 0}, None, (4, 4, 0, 0)),
        ({}, 6, (2, 2, 1, 1)),
    ],
)
def test_batches(batch: Any, global_batch: int | None, want: tuple[int, ...]) -> None:
    assert resolve_batches(batch, global_batch, GPUS) == want


def test_whole_words_of_a_device_come_first() -> None:
    devices = ("NVIDIA RTX A4000", "NVIDIA A40", "NVIDIA GeForce RTX 2080 Ti")
    assert resolve_batches({"A40": 8}, None, devices) == (0, 8, 0)
    assert resolve_batches({"A4": 8, "rtx 20": 1}, None, devices) == (8, 8, 1)


@given(st.integers(1, 300), st.integers(1, 20))
def test_auto_is_equal_within_one(global_batch: int, ranks: int) -> None:
    batches = resolve_batches("auto", global_batch, ["cpu"] * ranks)
    assert sum(batches) == global_batch
    assert list(batches) == sorted(batches, reverse=True)
    assert batches[0] - batches[-1] <= 1


@pytest.mark.parametrize(
    ("batch", "global_batch", "said"),
    [
        (
            [4, 2, 2, 0],
            16,
            "batch = [4, 2, 2, 0] sums to 8, but global_batch is 16; make them agree or leave one of them out",
        ),
        (4, 8, "batch = 4 sums to 16 over 4 ranks, but global_batch is 8; make them agree or leave one of them out"),
        (
            {"A40": 5},
            8,
            "batch = {'A40': 5} sums to 10 over 4 ranks, but global_batch is 8; "
            "make them agree or leave one of them out",
        ),
        ([4, 2], 6, "batch = [4, 2] has 2 numbers for 4 ranks; give one number for each rank"),
        ([4, -2, 2, 2], 6, "batch = [4, -2, 2, 2] has a negative number; use 0 for a rank without samples"),
        (-1, None, "batch = -1 has a negative number; use 0 for a rank without samples"),
        ({"A40": -1}, 4, "batch = {'A40': -1} has a negative number; use 0 for a rank without samples"),
        ([4, 2.0, 2, 2], 10, "batch of rank 1 = 2.0 is not an integer; write a whole number of samples"),
        (True, 4, "batch = True is not an integer; write a whole number of samples"),
        (None, 4, "batch = None is not an integer; write a whole number of samples"),
        ({"A40": "5"}, 4, "batch of 'A40' = '5' is not an integer; write a whole number of samples"),
        ({"NVIDIA A4O": 5}, 4, 'batch names "NVIDIA A4O", and this job has no such device; did you mean "NVIDIA A40"?'),
        ({"H100": 5}, 4, 'batch names "H100", and this job has no such device; known are NVIDIA A40, Tesla V100-'),
        ({"": 5}, 4, 'batch names "", and this job has no such device; known are '),
        ({4: 5}, 5, "batch names rank 4 of 4 ranks; use 0 to 3"),
        ({"NVIDIA": 5, "A40": 4}, 5, 'batch names rank 0 ("NVIDIA A40") by "NVIDIA" and "A40"; leave all but one'),
        ("auto", None, 'batch = "auto" needs a global_batch to share out; set global_batch'),
        ("even", 8, 'batch = "even" is not known; use "auto", a number, a list or a dict'),
        (0, None, "batch = 0 gives no rank any samples; give at least one rank 1 or more"),
        ([0, 0, 0, 0], None, "batch = [0, 0, 0, 0] gives no rank any samples; give at least one rank 1 or more"),
        ("auto", 0, "global_batch = 0 has no samples; use 1 or more"),
        ("auto", 2.5, "global_batch = 2.5 is not an integer; write a whole number of samples"),
    ],
)
def test_what_is_wrong_with_batches(batch: Any, global_batch: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_batches(batch, global_batch, GPUS)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("batches", "micro_batch", "said"),
    [
        ([4, 4], 0, "micro_batch = 0 has a number below 1; use 1 or more"),
        ([4, 4], [2, -1], "micro_batch = [2, -1] has a number below 1; use 1 or more"),
        ([4, 4], [2], "micro_batch = [2] has 1 numbers for 2 ranks; give one number for each rank"),
        ([4, 4], 1.5, "micro_batch of rank 0 = 1.5 is not an integer; write a whole number of samples"),
        ([4, -4], 2, "batch = [4, -4] has a negative number; use 0 for a rank without samples"),
        ([0, 0], 2, "a split gives no rank any samples; give at least one rank one sample"),
    ],
)
def test_what_is_wrong_with_a_split(batches: list[int], micro_batch: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Split.of(batches, micro_batch)
    assert str(caught.value) == said


def test_no_micro_batch_is_empty() -> None:
    with pytest.raises(UserError, match="at least one sample"):
        Split(((2, 0), (1,)))
