"""Any number of ranks sees the same global batches, from any position on."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.micro_batches import Stream, of_all, plain, split_of, union

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.planner import Split

# Python 3.12 says so of any process with threads, such as a worker of pytest-xdist.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning")


class Bare:
    """A stream that only iterates."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_gives_the_same_global_batches(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    samples = data.draw(st.integers(total, 40))
    options: dict[str, Any] = {"seed": data.draw(st.integers(0, 3)), "drop_last": data.draw(st.booleans())}
    epoch = data.draw(st.integers(0, 3))
    alone = of_all(range(samples), Split.of([total]), epoch, **options)
    assert of_all(range(samples), split_of(total, data), epoch, **options) == alone
    seen = list(chain(*alone))
    if options["drop_last"]:
        assert len(seen) == samples // total * total == len(set(seen))
    else:
        assert sorted(seen) == list(range(samples))
    assert [len(batch) for batch in alone[:-1]] == [total] * (len(alone) - 1)
    assert len(alone) == len(MicroBatchSource(range(samples), Split.of([total]), 0, **options))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_resuming_an_epoch_gives_exactly_its_rest(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 8))
    samples = data.draw(st.integers(total, 30))
    drop_last = data.draw(st.booleans())
    dataset = data.draw(st.sampled_from([range(samples), Stream(samples)]))
    whole = of_all(dataset, split_of(total, data), 2, drop_last=drop_last)
    start = data.draw(st.integers(0, len(whole)))
    assert of_all(dataset, split_of(total, data), 2, start, drop_last=drop_last) == whole[start:]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_stream_is_split_like_a_map_style_dataset(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 8))
    samples = data.draw(st.integers(total, 30))
    drop_last = data.draw(st.booleans())
    split = split_of(total, data)
    for rank in range(split.ranks):
        rows = MicroBatchSource(range(samples), split, rank, shuffle=False, drop_last=drop_last).epoch(0)
        stream = MicroBatchSource(Stream(samples), split, rank, drop_last=drop_last).epoch(0)
        assert plain(stream) == plain(rows)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    split = Split.of([4])
    orders = {str(of_all(range(20), split, epoch, seed=seed)) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16
    assert of_all(range(20), split, 1, seed=5) == of_all(range(20), split, 1, seed=5)
    assert of_all(range(8), split, 1, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_stream_gets_its_epoch() -> None:
    source = MicroBatchSource(Stream(8), Split.of([4]), 0)
    assert [plain(source.epoch(epoch))[0][1] for epoch in (0, 3, 1)] == [
        [0, 1, 2, 3],
        [300, 301, 302, 303],
        [*range(100, 104)],
    ]


def test_shuffling_leaves_the_rng_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    of_all(range(20), Split.of([2, 2]))
    assert torch.equal(torch.get_rng_state(), before)


def test_anything_that_iterates_is_a_stream() -> None:
    assert of_all(Bare(), Split.of([3, 5], 2)) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]


# Rank 1 never has samples; 17 of them are two whole global batches and one of 5.
UNEVEN = Split.of([4, 0, 2], [2, 1, 2])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [range(40), Stream(40)])
def test_a_split_changes_at_the_agreed_position(dataset: Any, workers: int) -> None:
    old, new = Split.of([4, 0], 2), Split.of([1, 3], 2)
    sources = [MicroBatchSource(dataset, old, rank, num_workers=workers) for rank in range(2)]
    epochs = [source.epoch(0) for source in sources]
    seen = [[next(epoch)] for epoch in epochs]
    at = max(source.head() for source in sources)
    # Rank 1 has no data, and still runs no further ahead than its workers may.
    assert DataPosition(0, 1) <= at <= DataPosition(0, 4)
    for source in sources:
        source.change_split(new, at)
    for of_rank, epoch in zip(seen, epochs, strict=True):
        of_rank += epoch
    assert union(seen) == of_all(dataset, old)
    for rank, of_rank in enumerate(seen):
        for micro, _ in of_rank:
            assert micro.num_micro_steps == len((old if micro.batch < at.batch else new).micro[rank])


def test_a_later_change_of_split_replaces_earlier_ones() -> None:
    source = MicroBatchSource(range(12), Split.of([2]), 0)
    source.change_split(Split.of([2], 1), DataPosition(0, 3))
    source.change_split(Split.of([2]), DataPosition(0, 2))
    assert [micro.num_micro_steps for micro, _ in source.epoch(0)] == [1] * 6
    source.change_split(Split.of([2], 1), DataPosition(0, 6))  # past the end: with the next epoch
    assert {micro.num_micro_steps for micro, _ in source.epoch(1)} == {2}


def test_a_change_of_split_keeps_the_global_batch_and_the_ranks() -> None:
    source = MicroBatchSource(range(12), Split.of([2, 2]), 0)
    for split in (Split.of([2, 3]), Split.of([4])):
        with pytest.raises(UserError, match="keep the global batch and the ranks"):
            source.change_split(split, DataPosition(1, 0))


def test_a_position_survives_json() -> None:
    assert DataPosition.from_json(DataPosition(3, 4).to_json()) == DataPosition(3, 4)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset", [range(5), Stream(5)])
def test_a_dataset_smaller_than_the_global_batch_is_refused(dataset: Any, drop_last: bool) -> None:
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(dataset, Split.of([4, 4]), 0, drop_last=drop_last).epoch(0))
    assert str(caught.value) == "the dataset has 5 samples, fewer than global_batch = 8; use a smaller global_batch"


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError):
        len(MicroBatchSource(Stream(5), Split.of([4]), 0))
