"""Iterable datasets: requests for their next batches, the readers that answer them, and positions to resume from.

A reader iterates over its own copy of the dataset: one in the training process, or one in each loader process. Readers
take turns as those of torch's DataLoader do, and one whose samples have ended is passed over.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import Dataset

from mimatrix.core.errors import UserError
from mimatrix.engine.data.digest import digest_samples
from mimatrix.planner.model.split import Split

StreamReply = tuple[int, list[Any], str, str]
"""Samples read, this rank's micro-batches of them, a digest of all, and one of the first of them: of as many as every
rank has, at the start of a rank's own stream."""


@dataclass(frozen=True, slots=True)
class StreamMode:
    """How streams are read: by all ranks the same or each rank its own, and by how many readers on each rank."""

    per_rank: bool
    num_readers: int


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a rank is in its stream."""

    samples: tuple[int, ...]
    """Taken from each reader."""
    next_reader: int = 0

    @classmethod
    def start(cls, num_readers: int) -> "StreamPosition":
        """Return the position at the start of an epoch."""
        return cls((0,) * num_readers)

    def after(self, reader: int, samples: int) -> "StreamPosition":
        """Return the position after `samples` more from a reader."""
        taken = tuple(count + samples * (number == reader) for number, count in enumerate(self.samples))
        return StreamPosition(taken, (reader + 1) % len(taken))


def stream_to_json(position: StreamPosition | None, mode: StreamMode | None) -> dict[str, Any] | None:
    """Describe a rank's stream in a checkpoint; None where the dataset is not a stream or at an epoch's start."""
    if position is None or mode is None:
        return None
    return {"per_rank": mode.per_rank, "samples": list(position.samples), "next_reader": position.next_reader}


def resume_stream(
    saved: "list[dict[str, Any] | None]", mode: StreamMode | None, rank: int, *, world_size: int, is_same_batch: bool
) -> StreamPosition | None:
    """Return where a rank resumes its stream inside an epoch.

    Args:
        saved: What `stream_to_json` gave on each rank.
        mode: How this run reads streams; None if its dataset is not one.
        rank: This rank.
        world_size: The number of ranks now.
        is_same_batch: Whether the global batch is the saved one.

    Returns:
        The position; None where the number of the global batch says it all.

    Raises:
        UserError: The rest of the epoch would not be the samples that were not seen yet.
    """
    stream = saved[rank if rank < len(saved) else 0] if saved else None
    if stream is None or mode is None:
        if mode is None or mode == StreamMode(per_rank=False, num_readers=1):
            return None
        raise UserError(
            "the checkpoint is from the middle of an epoch of a dataset with indices, and this one is a stream; use "
            "the same dataset, or a checkpoint from an epoch's start"
        )
    position = StreamPosition(tuple(stream["samples"]), stream["next_reader"])
    told = "the checkpoint is from the middle of an epoch"
    if stream["per_rank"] != mode.per_rank:
        raise UserError(f"{told} with stream_per_rank={stream['per_rank']}; use the same to resume it")
    if len(position.samples) != mode.num_readers:
        raise UserError(
            f"{told} of a stream read by {len(position.samples)} loader processes, and now there are "
            f"{mode.num_readers}; use the same num_workers, or a checkpoint from an epoch's start"
        )
    if mode.per_rank and len(saved) != world_size:
        raise UserError(
            f"{told} in which each of {len(saved)} ranks read its own stream, and now there are {world_size}; use as "
            "many ranks, or a checkpoint from an epoch's start"
        )
    if mode.per_rank:
        return position
    if mode.num_readers == 1:
        return None
    if not is_same_batch:
        raise UserError(f"{told} of a stream read by {mode.num_readers} loader processes; use the same global_batch")
    return position


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """The next batch of an iterable dataset; with `skip`, restart it and skip that many samples first."""

    epoch: int
    skip: int | None
    split: Split | None
    """None: nothing is read; the loader process is only given its turn."""


class StreamReader(Dataset[Any]):
    """Reads batches of an iterable dataset: the global batch, of which this rank takes its part, or its part alone."""

    def __init__(self, dataset: Any, collate_fn: Any, rank: int, *, per_rank: bool, compares: bool) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._rank = rank
        self._per_rank, self._compares = per_rank, compares
        self._samples: Iterator[Any] = iter(())
        self._is_first = False

    def __getitem__(self, request: StreamRequest) -> StreamReply:
        if request.split is None:
            return 0, [], "", ""
        if request.skip is not None:
            self._restart(request.epoch, request.skip)
        wanted = request.split.batches[self._rank] if self._per_rank else request.split.total
        # Read the whole batch before splitting it: only then is it known whether it is the last, partial one.
        samples = list(islice(self._samples, wanted))
        if len(samples) < wanted:
            self._samples = iter(())
        if not samples:
            return 0, [], "", ""
        digest = digest_samples(samples) if self._compares or self._is_first else ""
        first = digest_samples(samples[: min(request.split.batches)]) if self._per_rank and self._is_first else ""
        self._is_first = False
        if self._per_rank:
            sizes = own_sizes(request.split, self._rank, len(samples))
            rest = iter(samples)
            parts = [list(islice(rest, size)) for size in sizes]
        else:
            ranges = request.split.for_samples(len(samples)).ranges(self._rank)
            parts = [samples[part.start : part.stop] for part in ranges]
        return len(samples), [self._collate_fn(part) for part in parts] or [None], digest, first

    def _restart(self, epoch: int, skip: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._samples = iter(self.dataset)
        self._is_first = skip == 0
        deque(islice(self._samples, skip), maxlen=0)


def own_sizes(split: Split, rank: int, samples: int) -> tuple[int, ...]:
    """Return the micro-batches of a rank that has `samples` of its own in a global batch."""
    sizes = split.micro[rank]
    return sizes if samples == sum(sizes) else Split.of([samples], max(sizes)).micro[0]


def check_all_read(split: Split) -> None:
    """Refuse a split in which a rank has no samples, where each rank reads its own stream."""
    if 0 in split.batches:
        raise UserError(
            f"rank {split.batches.index(0)} has no samples in a global batch, so its own stream would not be read; "
            "give every rank some, or leave stream_per_rank out"
        )


def read_by_all(split: Split) -> Split:
    """Return the split with a sample for each rank that has none: its own stream is to be read, too."""
    sizes = [list(own) for own in split.micro]
    for own in sizes:
        if not own:
            largest = max(sizes, key=sum)
            largest[-1] -= 1
            if not largest[-1]:
                largest.pop()
            own.append(1)
    return Split(tuple(map(tuple, sizes)))


class ReaderTurns:
    """Whose samples come next, as replies of several readers arrive: round robin, past readers that have ended."""

    def __init__(self, start: StreamPosition) -> None:
        self.position = start
        self._ended: set[int] = set()
        self._first_digests: dict[int, str] = {}
        self._compares = len(start.samples) > 1 and not any(start.samples)

    @property
    def all_ended(self) -> bool:
        """Whether no reader has any more samples."""
        return len(self._ended) == len(self.position.samples)

    def take(self, reader: int, samples: int, digest: str) -> None:
        """Count samples of a reader."""
        if self._compares and not self.position.samples[reader]:
            self._check_differs(reader, digest)
        self.position = self.position.after(reader, samples)

    def end(self, reader: int) -> None:
        """Take no more samples from a reader."""
        self._ended.add(reader)

    def _check_differs(self, reader: int, digest: str) -> None:
        for other, first in self._first_digests.items():
            if first == digest:
                raise UserError(
                    f"the stream gives loader processes {other} and {reader} the same samples, which would then be "
                    "used several times; shard it in __iter__ by torch.utils.data.get_worker_info(), or use "
                    "num_workers=1"
                )
        self._first_digests[reader] = digest


def refuse_in_stream(settings: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a setting that only a dataset with indices can have."""
    for name, value in settings.items():
        if value is not None:
            raise UserError(f"an iterable dataset gives its samples in its own order; leave {name} out")
