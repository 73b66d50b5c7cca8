"""The micro-batches of a `MicroBatchSource` on all ranks, joined to global batches and checked."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils.data import (
    IterableDataset,
)

from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.planner import Split

Batches = list[list[int]]


Seen = list[tuple[MicroBatch, Any]]


class Stream(IterableDataset[int]):
    """0, 1, 2, ...; in epoch e from 100 * e on."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.first = 100 * epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.samples))


def split_of(total: int, data: st.DataObject, ranks: int | None = None) -> Split:
    """Draw a random split of `total` samples; ranks may have none."""
    ranks = ranks or data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    batches = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    return Split.of(batches, data.draw(st.integers(1, total)))


def union(seen: list[Seen], start: int = 0) -> Batches:
    """Return the global batches that ranks saw together, in order; check each MicroBatch against its data."""
    batches: dict[int, list[int]] = defaultdict(list)
    for of_rank in seen:
        numbers = [micro.batch for micro, _ in of_rank]
        assert numbers == sorted(numbers)
        for micro, data in of_rank:
            check(micro, data, [other for other, _ in of_rank if other.batch == micro.batch])
            batches[micro.batch] += data.tolist() if data is not None else []
    for of_rank in seen:
        assert {micro.batch for micro, _ in of_rank} == set(batches)
        assert all(micro.global_samples == len(batches[micro.batch]) for micro, _ in of_rank)
    assert sorted(batches) == list(range(start, start + len(batches)))
    return [batches[number] for number in sorted(batches)]


def check(micro: MicroBatch, data: torch.Tensor | None, siblings: list[MicroBatch]) -> None:
    assert (data is None) == (micro.num_micro_steps == 0) == (micro.num_samples == 0)
    assert data is None or len(data) == micro.num_samples
    assert [other.index for other in siblings] == list(range(max(1, micro.num_micro_steps)))
    assert [other.is_last for other in siblings] == [False] * (len(siblings) - 1) + [True]
    assert micro.num_micro_steps <= micro.max_micro_steps


def of_all(dataset: Any, split: Split, epoch: int = 0, start: int = 0, **options: Any) -> Batches:
    """Return what the ranks of `split` see together."""
    sources = [MicroBatchSource(dataset, split, rank, **options) for rank in range(split.ranks)]
    return union([list(source.epoch(epoch, start)) for source in sources], start)


def plain(seen: Iterator[tuple[MicroBatch, Any]]) -> list[tuple[MicroBatch, list[int] | None]]:
    return [(micro, None if data is None else data.tolist()) for micro, data in seen]
