"""Which samples a rank sees, in which order, micro-batch by micro-batch.

An epoch is one permutation of the dataset, the same on all ranks and for any number of them. Global batch k is the
k-th run of `split.total` samples, and each rank takes its part of it. So the global batches do not depend on how many
ranks share them, and a position is two numbers: the epoch and the global batch.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice
from typing import Any

import torch

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.data.loading import CollateFn, LoadingConfig, RequestLoader, StreamRequest, copy_ahead, move
from mimatrix.planner.split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The place of a micro-batch: number `index` of this rank in global batch `batch` of `epoch`.

    If `num_micro_steps` is 0, the rank has no samples in this global batch, and the micro-batch comes without data.
    """

    epoch: int
    batch: int
    index: int
    num_micro_steps: int
    """Of this rank in the global batch."""
    max_micro_steps: int
    """The largest `num_micro_steps` of any rank in the global batch."""
    num_samples: int
    """In this micro-batch."""
    global_samples: int
    """In the global batch, over all ranks."""

    @property
    def is_last(self) -> bool:
        """Whether this is the rank's last micro-batch of the global batch."""
        return self.index + 1 >= self.num_micro_steps


@dataclass(frozen=True, slots=True, order=True)
class DataPosition:
    """A global batch of an epoch. Positions are ordered as in training."""

    epoch: int
    batch: int

    def to_json(self) -> dict[str, int]:
        """Return a dict for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, int]) -> "DataPosition":
        """Return the position that `to_json` described."""
        return cls(fields["epoch"], fields["batch"])


class MicroBatchSource:
    """The micro-batches of one rank, on its device.

    `dataset` is map-style, or iterable (every rank reads the whole stream in its order and keeps its part), or a
    DataLoader, whose settings replace those given here, except for `collate_fn` and `pin_memory`.
    """

    def __init__(
        self,
        dataset: Any,
        split: Split,
        rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: CollateFn | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        device: torch.device | str = "cpu",
        pin_memory: bool | None = None,
    ) -> None:
        assert rank in range(split.ranks), f"rank {rank} of {split.ranks}"
        self._loading = LoadingConfig.resolve(
            dataset,
            shuffle=shuffle,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
        )
        self._total = split.total
        if not self.is_stream:
            self._check_size(len(self._loading.dataset))
        self._rank = rank
        self._seed = seed
        self._device = torch.device(device)
        self._loader = RequestLoader(
            self._loading, rank, pins=self._device.type == "cuda" and self._loading.pin_memory is not False
        )
        self._splits = [(DataPosition(0, 0), split)]
        """In the order in which they were agreed, each from its position on."""
        self._head = DataPosition(0, 0)

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        if self.is_stream:
            raise TypeError("an iterable dataset has no length")
        samples = len(self._loading.dataset)
        return samples // self._total if self._loading.drop_last else -(-samples // self._total)

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        if self.is_stream:
            raise UserError(
                "an iterable dataset has no length, and epochs shared by several groups need one; use a dataset with "
                "__len__"
            )
        return len(self._loading.dataset)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[MicroBatch, Any]]:
        """Iterate over the micro-batches of epoch `number`, from global batch `start` on.

        A global batch in which this rank has no samples comes once, with None as its data. Only one epoch can be
        iterated over at a time: `head` is that of the one begun last.
        """
        assert number >= 0
        assert start >= 0
        self._head = DataPosition(number, start)
        parts = self._iterate_stream(number, start) if self.is_stream else self._iterate_rows(number, start)
        if self._device.type == "cuda":
            return copy_ahead(parts, self._device)
        return ((micro, move(data, self._device)) for micro, data in parts)

    def sample(self, count: int = 1) -> Any:
        """Return a batch of the first `count` samples, repeated if there are fewer, to run the model on."""
        dataset = self._loading.dataset
        samples = iter(dataset) if self.is_stream else (dataset[row] for row in range(len(dataset)))
        drawn = list(islice(cycle(samples), count))
        if not drawn:
            raise UserError("the dataset has no samples; give run.prepare one that has some")
        return move(self._loading.collate_fn(drawn), self._device)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._loading.dataset

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable, so that its length is unknown."""
        return self._loading.is_stream

    @property
    def loads_in_workers(self) -> bool:
        """Whether worker processes load samples, in parallel with the computation."""
        return self._loading.num_workers > 0

    def split_at(self, position: DataPosition) -> Split:
        """Return the split of the global batch at `position`, as agreed so far."""
        return next(split for start, split in reversed(self._splits) if start <= position)

    def split_of(self, micro: MicroBatch) -> Split:
        """Return how the global batch of a micro-batch is split over the ranks."""
        return self.split_at(DataPosition(micro.epoch, micro.batch)).for_samples(micro.global_samples)

    def steps_after(self, micro: MicroBatch, num_epochs: int | None) -> int | None:
        """Return how many global batches follow in `num_epochs`; None if the end is not known, as for a stream."""
        if num_epochs is None or self.is_stream:
            return None
        return (num_epochs - micro.epoch) * len(self) - micro.batch - 1

    def head(self) -> DataPosition:
        """Return the first global batch not yet requested. Workers run ahead of what `epoch` has yielded."""
        return self._head

    def restart(self, split: Split) -> None:
        """Forget all splits agreed before, and use `split` from the next epoch's start. All ranks must call it."""
        self._splits, self._head = [(DataPosition(0, 0), split)], DataPosition(0, 0)

    def change_split(self, split: Split, at: DataPosition) -> None:
        """Use `split` from global batch `at` on, in place of any split agreed for later ones.

        All ranks must choose the same `at`, and none may be past it: the furthest of their heads is safe.
        """
        if (split.total, split.ranks) != (self._total, self._splits[0][1].ranks):
            raise UserError(
                f"a split of {split.total} samples over {split.ranks} ranks cannot follow one of {self._total} over "
                f"{self._splits[0][1].ranks}; keep the global batch and the ranks"
            )
        if at < self._head:
            raise WorldError(
                f"rank {self._rank} cannot change its split at global batch {at.batch} of epoch {at.epoch}, its loader "
                f"is at {self._head.batch} of epoch {self._head.epoch}; agree on the furthest loader's head"
            )
        self._splits.append((at, split))

    def _check_size(self, samples: int) -> None:
        if samples < self._total:
            raise UserError(
                f"the dataset has {samples} samples, fewer than global_batch = {self._total}; "
                f"use a smaller global_batch"
            )

    def _fix_split(self, position: DataPosition) -> Split:
        """Return the split of the global batch at `position`, which cannot change from now on."""
        self._head = DataPosition(position.epoch, position.batch + 1)
        return self.split_at(position)

    def _iterate_rows(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        return self._loader.load(self._row_requests(epoch, start), self._worker_seed(epoch))

    def _row_requests(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Yield each micro-batch with its rows of the dataset."""
        order = self._order(epoch)
        for batch in range(start, len(self)):
            first = batch * self._total
            split = self._fix_split(DataPosition(epoch, batch)).for_samples(min(self._total, len(order) - first))
            for micro, part in _micro_batches(epoch, batch, split, self._rank):
                rows = order[first + part.start : first + part.stop]
                yield micro, list(rows) if isinstance(rows, range) else rows.tolist()

    def _order(self, epoch: int) -> "range | torch.Tensor":
        samples = len(self._loading.dataset)
        if not self._loading.shuffle:
            return range(samples)
        return torch.randperm(samples, generator=torch.Generator().manual_seed(_derive_seed(self._seed, epoch)))

    def _iterate_stream(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        requests = self._stream_requests(epoch, start)
        for (batch, split), (samples, parts) in self._loader.load(requests, self._worker_seed(epoch)):
            if batch == 0:
                self._check_size(samples)
            is_full = samples == self._total
            if not samples or (self._loading.drop_last and not is_full):
                return
            micros = _micro_batches(epoch, batch, split.for_samples(samples), self._rank)
            yield from ((micro, part) for (micro, _), part in zip(micros, parts, strict=True))
            if not is_full:
                return

    def _stream_requests(self, epoch: int, start: int) -> Iterator[tuple[tuple[int, Split], StreamRequest]]:
        """Request global batches of the stream without end; its reader finds out where it ends."""
        for batch in count(start):
            split = self._fix_split(DataPosition(epoch, batch))
            yield (batch, split), StreamRequest(epoch, start * self._total if batch == start else None, split)

    def _worker_seed(self, epoch: int) -> int:
        return _derive_seed(self._seed, epoch, self._rank)


def _micro_batches(epoch: int, batch: int, split: Split, rank: int) -> Iterator[tuple[MicroBatch, range]]:
    """Yield the micro-batches of `rank` in a global batch with their ranges; a single empty one if it has none."""
    parts = split.ranges(rank)
    for index, part in enumerate(parts or (range(0),)):
        micro = MicroBatch(
            epoch=epoch,
            batch=batch,
            index=index,
            num_micro_steps=len(parts),
            max_micro_steps=split.rounds,
            num_samples=len(part),
            global_samples=split.total,
        )
        yield micro, part


def _derive_seed(*numbers: int) -> int:
    """Hash `numbers` to a seed: the same on every machine, and unrelated even for close numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
