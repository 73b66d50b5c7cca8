"""Iterable datasets as users have them: sharded by rank or by loader process, shuffled by rank, augmented."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class ShardedStream(IterableDataset[Any]):
    """Every n-th sample, by rank as WebDataset's split_by_node, and by loader process as its split_by_worker."""

    def __init__(self, samples: Sequence[Any], rank: int = 0, ranks: int = 1, *, by_worker: bool = True) -> None:
        self.samples, self.rank, self.ranks, self.by_worker = samples, rank, ranks, by_worker
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        shard = self.shard()
        info = get_worker_info()
        return islice(shard, info.id, None, info.num_workers) if info and self.by_worker else iter(shard)

    def shard(self) -> Sequence[Any]:
        """Return what a rank has in this epoch, in another order in each."""
        shard = list(self.samples[self.rank :: self.ranks])
        return shard[self.epoch :] + shard[: self.epoch]


class FilesOfRanks(ShardedStream):
    """Files of different sizes, some for each rank."""

    def shard(self) -> Sequence[Any]:
        return list(self.samples[self.rank])


class ShuffledStream(IterableDataset[Any]):
    """All samples, in an order of each rank."""

    def __init__(self, samples: Sequence[Any], rank: int) -> None:
        self.samples, self.rank = samples, rank

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(self.rank).sample(self.samples, len(self.samples)))
