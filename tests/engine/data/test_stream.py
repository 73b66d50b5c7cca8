"""Several loader processes read a stream as those of torch's DataLoader do, from any position on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.micro_batches import Stream, of_all, union
from support.streams import ShardedStream
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.planner import Split

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

GLOBAL_BATCH = 4
SPLIT = Split.of([3, 0, 1], 2)


class UnevenShards(IterableDataset[int]):
    """A number of samples for each loader process; those of epoch e start at 1000 * e."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.first = counts, 0

    def set_epoch(self, epoch: int) -> None:
        self.first = 1000 * epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info
        start = self.first + sum(self.counts[: info.id])
        return iter(range(start, start + self.counts[info.id]))


def of_torch(dataset: Any, workers: int, **options: Any) -> list[list[int]]:
    return [batch.tolist() for batch in DataLoader(dataset, GLOBAL_BATCH, num_workers=workers, **options)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("counts", [(10, 10), (3, 17), (22, 9, 4), (0, 12, 8)])
def test_loader_processes_take_turns_as_in_torch(counts: tuple[int, ...], drop_last: bool) -> None:
    expected = of_torch(UnevenShards(*counts), len(counts), drop_last=drop_last)
    assert of_all(UnevenShards(*counts), SPLIT, num_workers=len(counts), drop_last=drop_last) == expected


def test_a_stream_of_loader_processes_resumes_at_any_global_batch() -> None:
    options: dict[str, Any] = {"num_workers": 3}
    dataset = UnevenShards(13, 4, 9)
    whole = [list(MicroBatchSource(dataset, SPLIT, rank, **options).epoch(1)) for rank in range(3)]
    batches = union(whole)
    assert len(batches) == 8
    for start in (1, 2, 5, 7):
        rest = []
        for rank in range(3):
            before = next(micro for micro, _ in whole[rank] if micro.batch == start - 1)
            rest.append(list(MicroBatchSource(dataset, SPLIT, rank, **options).epoch(1, start, before.stream)))
        assert union(rest, start) == batches[start:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_ranks_own_stream_resumes_at_any_global_batch(drop_last: bool) -> None:
    def source() -> MicroBatchSource:
        options: dict[str, Any] = {"stream_per_rank": True, "num_workers": 2, "drop_last": drop_last}
        return MicroBatchSource(UnevenShards(5, 12), Split.of([3, 1], 2), 0, **options)

    whole = [(micro, data.tolist()) for micro, data in source().epoch(1)]
    assert sum(len(data) for _, data in whole) == (15 if drop_last else 17)
    for start in range(1, whole[-1][0].batch + 2):
        before = next(micro for micro, _ in whole if micro.batch == start - 1)
        rest = [(micro, data.tolist()) for micro, data in source().epoch(1, start, before.stream)]
        assert rest == [(micro, data) for micro, data in whole if micro.batch >= start]


def test_persistent_loader_processes_restart_their_shards() -> None:
    loader = DataLoader(UnevenShards(6, 5), num_workers=2, persistent_workers=True)
    source = MicroBatchSource(loader, Split.of([GLOBAL_BATCH]), 0)
    for epoch in (1, 2):
        seen = [data.tolist() for _, data in source.epoch(epoch)]
        first = 1000 * epoch
        assert seen == [
            [*range(first, first + 4)],
            [*range(first + 6, first + 10)],
            [first + 4, first + 5],
            [first + 10],
        ]


def test_a_stream_that_gives_loader_processes_the_same_samples_is_refused() -> None:
    dataset = ShardedStream(range(20), by_worker=False)
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(dataset, Split.of([4]), 0, num_workers=2).epoch(0))
    assert str(caught.value) == (
        "the stream gives loader processes 0 and 1 the same samples, which would then be used several times; shard it "
        "in __iter__ by torch.utils.data.get_worker_info(), or use num_workers=1"
    )


def test_an_epoch_without_a_whole_global_batch_is_refused() -> None:
    source = MicroBatchSource(UnevenShards(3, 3), Split.of([4]), 0, num_workers=2, drop_last=True)
    with pytest.raises(UserError, match="no loader process has the 4 samples of a global batch, and drop_last leaves"):
        list(source.epoch(0))


def test_a_ranks_own_stream_gives_its_part_of_each_global_batch() -> None:
    split = Split.of([5, 2], 2)
    source = MicroBatchSource(Stream(12), split, 0, stream_per_rank=True)
    seen = [(micro.batch, micro.index, micro.sizes, data.tolist()) for micro, data in source.epoch(0)]
    assert seen == [
        (0, 0, (2, 2, 1), [0, 1]),
        (0, 1, (2, 2, 1), [2, 3]),
        (0, 2, (2, 2, 1), [4]),
        (1, 0, (2, 2, 1), [5, 6]),
        (1, 1, (2, 2, 1), [7, 8]),
        (1, 2, (2, 2, 1), [9]),
        (2, 0, (2,), [10, 11]),
    ]


def test_a_plan_never_leaves_a_ranks_own_stream_unread() -> None:
    source = MicroBatchSource(Stream(12), Split.of([2, 2]), 1, stream_per_rank=True)
    source.change_split(Split.of([4, 0], 2), DataPosition(0, 0))
    assert source.split_at(DataPosition(0, 0)).batches == (3, 1)
    assert [data.tolist() for _, data in source.epoch(0)] == [[number] for number in range(12)]


def test_the_digest_of_a_batch_is_that_of_its_samples() -> None:
    def digests(dataset: Any) -> list[str | None]:
        return [micro.digest for micro, _ in MicroBatchSource(dataset, Split.of([2, 2]), 0).epoch(0)]

    samples: Any = torch.arange(48.0).view(12, 4)
    assert digests(ShardedStream(samples)) == digests(ShardedStream(samples))
    assert len({*digests(ShardedStream(samples))}) == 3
    other = samples.clone()
    other[7, 2] = -1.0
    differs = [
        one != two for one, two in zip(digests(ShardedStream(samples)), digests(ShardedStream(other)), strict=True)
    ]
    assert differs == [False, True, False]
