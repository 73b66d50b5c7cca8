"""Which samples a rank sees, in which order, micro-batch by micro-batch.

An epoch is one permutation of the dataset, the same on all ranks and for any number of them. Global batch k is the
k-th run of `split.total` samples, and each rank takes its part of it. So the global batches do not depend on how many
ranks share them, and a position is two numbers: the epoch and the global batch.
"""

from collections.abc import Iterator
from itertools import count, cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.data.device_transfer import copy_ahead, move
from mimatrix.engine.data.digest import digest_order
from mimatrix.engine.data.loading import RequestLoader, RowRequest
from mimatrix.engine.data.loading_config import CollateFn, LoadingConfig
from mimatrix.engine.data.order import SampleOrder, derive_seed
from mimatrix.engine.data.position import DataPosition, MicroBatch
from mimatrix.engine.data.stream import (
    ReaderTurns,
    StreamMode,
    StreamPosition,
    StreamRequest,
    check_all_read,
    own_sizes,
    read_by_all,
)
from mimatrix.planner.model.split import Split


class MicroBatchSource:
    """The micro-batches of one rank, on its device.

    `dataset` is map-style, or iterable, or a DataLoader, whose settings replace those given here, except for
    those that are None by default. Of an iterable dataset every rank reads the whole stream and keeps its part; with
    `stream_per_rank` it takes its part of each global batch from its own stream. An evaluation may have fewer samples
    than a global batch, and a DataLoader's `drop_last` then leaves out what it leaves out by itself.
    """

    def __init__(
        self,
        dataset: Any,
        split: Split,
        rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        collate_fn: CollateFn | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        device: torch.device | str = "cpu",
        pin_memory: bool | None = None,
        stream_per_rank: bool | None = None,
        is_evaluation: bool = False,
    ) -> None:
        assert rank in range(split.ranks), f"rank {rank} of {split.ranks}"
        self._loading = LoadingConfig.resolve(
            dataset,
            global_batch=split.total,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            stream_per_rank=stream_per_rank,
        )
        self._total = split.total
        self._allow_partial = is_evaluation
        """Whether there may be fewer samples than in a global batch."""
        if is_evaluation and isinstance(dataset, DataLoader) and dataset.drop_last and dataset.batch_size:
            self._loading = self._loading.dropping_own_batches(dataset.batch_size, split.total)
        if self._loading.order is not None:
            self._check_size(self._loading.order.num_samples())
        elif self._loading.stream_per_rank:
            check_all_read(split)
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
        if self._loading.order is None:
            raise TypeError("an iterable dataset has no length")
        return self._num_batches(self.num_samples)

    @property
    def has_length(self) -> bool:
        """Whether the number of global batches in an epoch is known: not that of an iterable dataset."""
        return self._loading.order is not None

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        if self._loading.order is None:
            raise UserError(
                "an iterable dataset has no length, and epochs shared by several groups need one; use a dataset with "
                "__len__"
            )
        return self._loading.order.num_samples()

    def epoch(
        self, number: int, start: int = 0, stream: StreamPosition | None = None, order_digest: str | None = None
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Iterate over the micro-batches of epoch `number`, from global batch `start` on.

        A global batch in which this rank has no samples comes once, with None as its data. Only one epoch can be
        iterated over at a time: `head` is that of the one begun last.

        Where each rank has its own stream, this ends with the stream of this rank.

        Args:
            number: The epoch.
            start: The first global batch.
            stream: Where this rank is in an iterable dataset before it, if the number does not say it all.
            order_digest: Of the order of which the global batches before `start` were, if that is to be checked.
        """
        assert number >= 0
        assert start >= 0
        self._head = DataPosition(number, start)
        order = self._loading.order
        if order is None:
            parts = self._iterate_stream(number, start, stream or self._stream_start(start))
        else:
            requests = self._row_requests(number, start, order, order_digest)
            parts = self._loader.load(requests, self._worker_seed(number))
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
    def loading(self) -> LoadingConfig:
        """The dataset's settings as they are used."""
        return self._loading

    @property
    def global_batch(self) -> int:
        """The number of samples in a global batch."""
        return self._total

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable, so that its length is unknown."""
        return self._loading.is_stream

    @property
    def stream_mode(self) -> StreamMode | None:
        """How an iterable dataset is read; None for others."""
        return self._loading.stream_mode

    @property
    def drops_last(self) -> bool:
        """Whether a last global batch with fewer samples is left out."""
        return self._loading.drop_last

    @property
    def loads_in_workers(self) -> bool:
        """Whether worker processes load samples, in parallel with the computation."""
        return self._loading.num_workers > 0

    def split_at(self, position: DataPosition) -> Split:
        """Return the split of the global batch at `position`, as agreed so far."""
        return next(split for start, split in reversed(self._splits) if start <= position)

    def split_of(self, micro: MicroBatch) -> Split:
        """Return how the global batch of a micro-batch is split over the ranks."""
        return micro.split

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
        self._splits, self._head = [(DataPosition(0, 0), self._usable(split))], DataPosition(0, 0)

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
        self._splits.append((at, self._usable(split)))

    def _usable(self, split: Split) -> Split:
        return read_by_all(split) if self._loading.stream_per_rank else split

    def _num_batches(self, samples: int) -> int:
        return samples // self._total if self._loading.drop_last else -(-samples // self._total)

    def _check_size(self, samples: int) -> None:
        what = "sampler" if self._loading.order and self._loading.order.is_foreign else "dataset"
        if not samples:
            raise UserError(f"the {what} has no samples; give one that has some")
        if samples < self._total and not self._allow_partial:
            raise UserError(
                f"the {what} has {samples} samples, fewer than global_batch = {self._total}; use a smaller global_batch"
            )

    def _refuse_empty_epoch(self) -> None:
        if self._loading.drop_last:
            raise UserError(
                f"no loader process has the {self._total} samples of a global batch, and drop_last leaves out smaller "
                "ones; use fewer loader processes, or drop_last=False"
            )
        self._check_size(0)

    def _fix_split(self, position: DataPosition) -> Split:
        """Return the split of the global batch at `position`, which cannot change from now on."""
        self._head = DataPosition(position.epoch, position.batch + 1)
        return self.split_at(position)

    def _row_requests(
        self, epoch: int, start: int, order: SampleOrder, order_digest: str | None
    ) -> Iterator[tuple[MicroBatch, RowRequest]]:
        """Yield each micro-batch with its rows of the dataset."""
        indices = order.indices(self._seed, epoch)
        digest = digest_order(indices) if order.is_foreign else None
        if order_digest is not None and digest != order_digest:
            raise UserError(
                f"the sampler gives epoch {epoch} another order than before the checkpoint, so the rest of it would "
                "not be the samples that were not seen yet; let its order depend on set_epoch(epoch) alone, or use a "
                "checkpoint from an epoch's start"
            )
        for batch in range(start, self._num_batches(len(indices))):
            first = batch * self._total
            split = self._fix_split(DataPosition(epoch, batch)).for_samples(min(self._total, len(indices) - first))
            ranges = split.ranges(self._rank)
            for index, part in enumerate(ranges or (range(0),)):
                rows = indices[first + part.start : first + part.stop]
                micro = MicroBatch(
                    epoch=epoch,
                    batch=batch,
                    index=index,
                    sizes=split.micro[self._rank],
                    split=split,
                    digest=digest if batch == start and index == 0 else None,
                    order=digest,
                )
                seed = derive_seed(self._seed, epoch, batch, self._rank, index) if self.loads_in_workers else None
                yield micro, RowRequest(rows.tolist() if isinstance(rows, torch.Tensor) else list(rows), seed)

    def _stream_start(self, start: int) -> StreamPosition:
        """Return where a stream is at the start of an epoch, or where the number of the global batch says it all."""
        mode = self._loading.stream_mode
        assert mode
        if not start:
            return StreamPosition.start(mode.num_readers)
        assert mode == StreamMode(per_rank=False, num_readers=1), "give the position in the stream"
        return StreamPosition((start * self._total,))

    def _iterate_stream(self, epoch: int, start: int, position: StreamPosition) -> Iterator[tuple[MicroBatch, Any]]:
        requests = self._stream_requests(epoch, start, position)
        turns, batch = ReaderTurns(position), start
        per_rank = self._loading.stream_per_rank is True
        for (reader, split), reply in self._loader.load(requests, self._worker_seed(epoch)):
            if reader is None:
                continue
            samples, parts, digest, first = reply
            wanted = split.batches[self._rank] if per_rank else self._total
            if samples < wanted:
                if batch == 0 and not per_rank and len(position.samples) == 1:
                    self._check_size(samples)
                turns.end(reader)
            if samples and (samples == wanted or not self._loading.drop_last):
                turns.take(reader, samples, digest)
                if per_rank:
                    sizes = own_sizes(split, self._rank, samples)
                else:
                    split = split.for_samples(samples)
                    sizes = split.micro[self._rank]
                for index, part in enumerate(parts):
                    micro = MicroBatch(
                        epoch=epoch,
                        batch=batch,
                        index=index,
                        sizes=sizes,
                        split=split,
                        digest=digest if self._loading.stream_per_rank is None else first,
                        stream=turns.position,
                    )
                    yield micro, part
                batch += 1
            if turns.all_ended:
                if batch == 0 and not per_rank:
                    self._refuse_empty_epoch()
                return

    def _stream_requests(
        self, epoch: int, start: int, position: StreamPosition
    ) -> Iterator[tuple[tuple[int | None, Split], StreamRequest]]:
        """Request batches of the stream without end; its readers find out where it ends."""
        num_readers = len(position.samples)
        for _ in range(position.next_reader):
            yield (None, self.split_at(self._head)), StreamRequest(epoch, None, None)
        for number in count():
            split = self._fix_split(DataPosition(epoch, start + number))
            reader = (position.next_reader + number) % num_readers
            skip = position.samples[reader] if number < num_readers else None
            yield (reader, split), StreamRequest(epoch, skip, split)

    def _worker_seed(self, epoch: int) -> int:
        return derive_seed(self._seed, epoch, self._rank)
