"""Which samples a rank sees, micro-batch by micro-batch, and how they come to its device.

An epoch is one permutation of the dataset, the same on all ranks and for any number of them; global batch k is its
k-th run of `split.total` samples, and a rank takes its part of each. So the global batches do not depend on who shares
them, and a position is two numbers: the epoch and the global batch.
"""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count, cycle, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from mimatrix.core.errors import UserError, WorldError, nearest
from mimatrix.planner.split import Split

CollateFn = Callable[[list[Any]], Any]
Ticket = TypeVar("Ticket")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a rank is to do next: its micro-batch number `index` of `count` in global batch `batch` of `epoch`.

    Where `count` is 0 the rank has no samples in this global batch, and the Micro comes without data.
    """

    epoch: int
    batch: int
    index: int
    count: int
    samples: int  # of this micro-batch
    total: int  # of the whole global batch, of all ranks
    rounds: int  # the most micro-steps of any rank in it

    @property
    def last(self) -> bool:
        """Whether the rank has nothing more to do in this global batch."""
        return self.index + 1 >= self.count


@dataclass(frozen=True, slots=True, order=True)
class DataPosition:
    """The next global batch to be drawn. Positions compare in the order of training."""

    epoch: int
    batch: int

    def to_json(self) -> dict[str, int]:
        """As a dict, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, int]) -> "DataPosition":
        """What `to_json` gave."""
        return cls(fields["epoch"], fields["batch"])


_LOADING = {"shuffle": "", "drop_last": "", "collate": "collate_fn", "workers": "num_workers", "pin": "pin_memory"}
_LOADING["prefetch"] = "prefetch_factor"
"""How a dataset may be read, and what torch's loader calls it where that is another name."""


def check_loading(given: Mapping[str, Any]) -> None:
    """Refuse settings that there are not, with the nearest that there is."""
    for name in given:
        if name not in _LOADING:
            ours = next((each for each, theirs in _LOADING.items() if theirs == name), None)
            fix = f'; it is called "{ours}" here' if ours else nearest(name, _LOADING)
            raise UserError(f'there is no setting "{name}" of a loader{fix}')


class MicroBatchSource:
    """The micro-batches of one rank, on its device.

    `dataset` is map-style, iterable (every rank reads the whole stream and keeps its part, in the order it comes), or
    a DataLoader, which brings its own settings: then those given here do not count, but for `collate` and `pin`.
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
        collate: CollateFn | None = None,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device | str = "cpu",
        pin: bool | None = None,
    ) -> None:
        assert rank in range(split.ranks), f"rank {rank} of {split.ranks}"
        if isinstance(dataset, DataLoader):
            self._reading = _reading_of(dataset, collate, pin)
        else:
            self._reading = _LoadingConfig(
                dataset, shuffle, drop_last, collate or default_collate, workers, prefetch, pin
            )
        self._streams = _is_stream(self._reading.dataset)
        _check_reading(self._reading, self._streams)
        self._total = split.total
        if not self._streams:
            self._check_size(len(self._reading.dataset))
        self._rank = rank
        self._seed = seed
        self._device = torch.device(device)
        self._splits = [(DataPosition(0, 0), split)]  # as agreed one after the other, each from its position on
        self._head = DataPosition(0, 0)
        self._requests = _Requests()

    def __len__(self) -> int:
        """Global batches of an epoch."""
        if self._streams:
            raise TypeError("an iterable dataset has no length")
        samples = len(self._reading.dataset)
        return samples // self._total if self._reading.drop_last else -(-samples // self._total)

    @property
    def samples(self) -> int:
        """In an epoch."""
        if self._streams:
            raise UserError(
                "an iterable dataset has no length, and epochs of several groups need one; give one with it"
            )
        return len(self._reading.dataset)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches of epoch `number` from global batch `start` on.

        With no data, and None in its place, comes each global batch in which this rank has no samples. One epoch
        runs at a time: the head is that of the one begun last.
        """
        assert number >= 0
        assert start >= 0
        self._head = DataPosition(number, start)
        parts = self._of_stream(number, start) if self._streams else self._of_rows(number, start)
        if self._device.type == "cuda":
            return self._copied_ahead(parts)
        return ((micro, _moved(data, self._device)) for micro, data in parts)

    def sample(self, count: int = 1) -> Any:
        """A batch of the first samples, for whoever runs the model without data of its own; a short set repeats."""
        dataset = self._reading.dataset
        first = iter(dataset) if self._streams else (dataset[row] for row in range(len(dataset)))
        drawn = list(islice(cycle(first), count))
        if not drawn:
            raise UserError("the dataset has no samples; give run.prepare one that has some")
        return _moved(self._reading.collate(drawn), self._device)

    @property
    def dataset(self) -> Any:
        """Where samples come from."""
        return self._reading.dataset

    @property
    def is_stream(self) -> bool:
        """Whether nobody knows how many samples there are."""
        return self._streams

    @property
    def hides_loading(self) -> bool:
        """Whether samples are made by other processes, beside the computation."""
        return self._reading.workers > 0

    def split_at(self, position: DataPosition) -> Split:
        """The split that holds for the global batch at `position`, as far as is agreed."""
        return next(split for at, split in reversed(self._splits) if at <= position)

    def head(self) -> DataPosition:
        """The first global batch that is not yet asked for. Loaders run ahead of what `epoch` has yielded."""
        return self._head

    def restart(self, split: Split) -> None:
        """Wherever the next epoch begins, `split` holds: all that was agreed before is forgotten. On all ranks."""
        self._splits, self._head = [(DataPosition(0, 0), split)], DataPosition(0, 0)

    def change(self, split: Split, at: DataPosition) -> None:
        """From global batch `at` on `split` holds, in place of whatever was agreed for later ones.

        All ranks must choose the same `at`, and none may be past it: the furthest of their heads will do.
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

    def _draw(self, position: DataPosition) -> Split:
        """The split of the global batch at `position`, which from now on cannot change."""
        self._head = DataPosition(position.epoch, position.batch + 1)
        return self.split_at(position)

    def _of_rows(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        return self._load(epoch, self._rows(epoch, start))

    def _rows(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Each micro-batch with the rows of the dataset that are in it."""
        order = self._order(epoch)
        for batch in range(start, len(self)):
            first = batch * self._total
            split = self._draw(DataPosition(epoch, batch)).for_samples(min(self._total, len(order) - first))
            for micro, part in _micros(epoch, batch, split, self._rank):
                rows = order[first + part.start : first + part.stop]
                yield micro, list(rows) if isinstance(rows, range) else rows.tolist()

    def _order(self, epoch: int) -> "range | torch.Tensor":
        samples = len(self._reading.dataset)
        if not self._reading.shuffle:
            return range(samples)
        return torch.randperm(samples, generator=torch.Generator().manual_seed(_mixed(self._seed, epoch)))

    def _of_stream(self, epoch: int, start: int) -> Iterator[tuple[MicroBatch, Any]]:
        for (batch, split), (samples, parts) in self._load(epoch, self._cuts(epoch, start)):
            if batch == 0:
                self._check_size(samples)
            whole = samples == self._total
            if not samples or (self._reading.drop_last and not whole):
                return
            micros = _micros(epoch, batch, split.for_samples(samples), self._rank)
            yield from ((micro, part) for (micro, _), part in zip(micros, parts, strict=True))
            if not whole:
                return

    def _cuts(self, epoch: int, start: int) -> Iterator[tuple[tuple[int, Split], "_StreamRequest"]]:
        """Each global batch of the stream; whoever reads it finds out where it ends."""
        for batch in count(start):
            split = self._draw(DataPosition(epoch, batch))
            yield (batch, split), _StreamRequest(epoch, start * self._total if batch == start else None, split)

    def _load(self, epoch: int, asked: Iterator[tuple[Ticket, Any]]) -> Iterator[tuple[Ticket, Any]]:
        """What each request brings, with the ticket that it was asked with. Workers draw ahead from `asked`."""
        tickets: deque[Ticket] = deque()

        def requests() -> Generator[Any, None, None]:
            for ticket, request in asked:
                tickets.append(ticket)
                yield request

        ahead = requests()
        try:
            for reply in self._by_workers(epoch, ahead) if self._reading.workers else map(self._here, ahead):
                yield tickets.popleft(), reply
        finally:
            # Persistent workers would keep it, and it keeps this feed: neither would end with its last user.
            ahead.close()

    def _here(self, request: Any) -> Any:
        reply = self._source[request]
        return _pinned(reply) if self._pins else reply

    def _by_workers(self, epoch: int, requests: Iterator[Any]) -> Iterator[Any]:
        self._requests.pending = requests
        # Workers are seeded from this generator: otherwise each epoch would take a number from the random stream of
        # the model, and dropout depend on whether there are workers.
        self._loader.generator.manual_seed(_mixed(self._seed, epoch, self._rank))
        return iter(self._loader)

    @property
    def _pins(self) -> bool:
        return self._device.type == "cuda" and self._reading.pin is not False

    @cached_property
    def _source(self) -> "_Rows | _Stream":
        reading = self._reading
        if self._streams:
            return _Stream(reading.dataset, reading.collate, self._rank)
        return _Rows(reading.dataset, reading.collate)

    @cached_property
    def _loader(self) -> "DataLoader[Any]":
        return DataLoader(
            self._source,
            batch_size=None,
            sampler=self._requests,
            collate_fn=_unchanged,
            num_workers=self._reading.workers,
            prefetch_factor=self._reading.prefetch,
            pin_memory=self._pins,
            worker_init_fn=_Entry(self._reading.init),
            timeout=self._reading.timeout_s,
            multiprocessing_context=self._reading.context,
            persistent_workers=self._reading.persistent,
            generator=torch.Generator(),
        )

    def _copied_ahead(self, parts: Iterator[tuple[MicroBatch, Any]]) -> Iterator[tuple[MicroBatch, Any]]:
        """Copy one micro-batch ahead on a stream of its own, while the device computes on the one before."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ready: deque[tuple[MicroBatch, Any, torch.cuda.Event]] = deque()
        for micro, data in parts:
            # Memory that an earlier micro-batch has left may still be read by what is queued here.
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                ready.append((micro, _moved(data, self._device), side.record_event()))
            if len(ready) > 1:
                yield self._handed_over(*ready.popleft())
        if ready:
            yield self._handed_over(*ready.popleft())

    def _handed_over(self, micro: MicroBatch, data: Any, copied: torch.cuda.Event) -> tuple[MicroBatch, Any]:
        torch.cuda.current_stream(self._device).wait_event(copied)
        return micro, data


@dataclass(frozen=True, slots=True)
class _LoadingConfig:
    """A dataset and how it is read."""

    dataset: Any
    shuffle: bool
    drop_last: bool
    collate: CollateFn
    workers: int
    prefetch: int
    pin: bool | None  # None: where the device gains from it
    init: Callable[[int], None] | None = None
    timeout_s: float = 0
    context: Any = None
    persistent: bool = False


def _reading_of(loader: "DataLoader[Any]", collate: CollateFn | None, pin: bool | None) -> _LoadingConfig:
    """What a DataLoader says about reading; which samples go together is not its to say."""
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise _refused(loader.batch_sampler)
    if loader.batch_size is None:
        raise UserError("the DataLoader has batch_size = None, so nobody can cut its batches; let it make batches")
    return _LoadingConfig(
        dataset=loader.dataset,
        shuffle=not isinstance(loader.dataset, IterableDataset) and _shuffles(loader.sampler, loader.dataset),
        drop_last=loader.drop_last,
        collate=collate or loader.collate_fn,
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        pin=loader.pin_memory if pin is None else pin,
        init=loader.worker_init_fn,
        timeout_s=loader.timeout,
        context=loader.multiprocessing_context,
        persistent=loader.persistent_workers,
    )


def _shuffles(sampler: Any, dataset: Any) -> bool:
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    if type(sampler) is SequentialSampler:
        return False
    raise _refused(sampler)


def _refused(sampler: Any) -> UserError:
    return UserError(
        f"the DataLoader has a {type(sampler).__name__} of its own, but which rank sees which samples follows from the "
        f"split; give it shuffle = True or False instead"
    )


def _is_stream(dataset: Any) -> bool:
    # The order matters: torch's IterableDataset inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__getitem__") or not hasattr(dataset, "__iter__"):
        raise UserError(
            f"{type(dataset).__name__} is no dataset; give it __len__ and __getitem__, or __iter__ alone for a stream"
        )
    if isinstance(dataset, Generator):
        raise UserError("a generator can be read only once; give an object whose __iter__ starts anew for each epoch")
    return True


def _check_reading(reading: _LoadingConfig, streams: bool) -> None:
    if reading.workers < 0:
        raise UserError(f"workers = {reading.workers} is negative; use 0 to load in the process itself")
    if reading.workers and reading.prefetch < 1:
        raise UserError(f"prefetch = {reading.prefetch} leaves the workers idle; use 1 or more")
    if streams and reading.workers > 1:
        raise UserError(
            f"an iterable dataset is read in order by one worker process, but workers = {reading.workers}; "
            f"use workers = 1 or 0"
        )


def _micros(epoch: int, batch: int, split: Split, rank: int) -> Iterator[tuple[MicroBatch, range]]:
    """What `rank` does in this global batch, each with its positions; one without any where it has no samples."""
    parts = split.ranges(rank)
    for index, part in enumerate(parts or (range(0),)):
        yield MicroBatch(epoch, batch, index, len(parts), len(part), split.total, split.rounds), part


def _mixed(*numbers: int) -> int:
    """A seed that differs for any other `numbers`, however close; the same on every machine."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Requests:
    """What is to be loaded next, in the place where a DataLoader looks for it."""

    def __init__(self) -> None:
        self.pending: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.pending


class _Rows(Dataset[Any]):
    """A map-style dataset by micro-batches: a list of rows brings them collated, an empty one brings None."""

    def __init__(self, dataset: Any, collate: CollateFn) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, rows: list[int]) -> Any:
        if not rows:
            return None
        if getattr(self.dataset, "__getitems__", None):
            return self._collate(self.dataset.__getitems__(rows))
        return self._collate([self.dataset[row] for row in rows])


@dataclass(frozen=True, slots=True)
class _StreamRequest:
    """The next global batch of a stream; with `skip` the stream begins anew, that many samples on."""

    epoch: int
    skip: int | None
    split: Split


class _Stream(Dataset[Any]):
    """An iterable dataset by global batches: how many samples came, and this rank's micro-batches of them."""

    def __init__(self, dataset: Any, collate: CollateFn, rank: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._rank = rank
        self._samples: Iterator[Any] = iter(())

    def __getitem__(self, cut: _StreamRequest) -> tuple[int, list[Any]]:
        if cut.skip is not None:
            self._begin(cut.epoch, cut.skip)
        # The whole of it before any is cut: only then is it known whether it is the last, partial one.
        samples = list(islice(self._samples, cut.split.total))
        if len(samples) < cut.split.total:
            self._samples = iter(())
        if not samples:
            return 0, []
        ranges = cut.split.for_samples(len(samples)).ranges(self._rank)
        return len(samples), [self._collate(samples[part.start : part.stop]) for part in ranges] or [None]

    def _begin(self, epoch: int, skip: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._samples = iter(self.dataset)
        deque(islice(self._samples, skip), maxlen=0)


class _Entry:
    """What a worker process does first."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        here = get_worker_info()
        assert here is not None
        assert isinstance(here.dataset, _Rows | _Stream)
        # Users' code asks for the dataset of its worker and means its own, not what we wrapped it in; torch offers
        # no other way to say so.
        object.__setattr__(here, "dataset", here.dataset.dataset)
        if self._init is not None:
            self._init(worker)


def _unchanged(value: Any) -> Any:
    return value


def _pinned(value: Any) -> Any:
    """`value` with its tensors in pinned memory, from which copies to a GPU need not wait."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" else value
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    return _each(value, _pinned)


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; what has a `to` of its own moves itself, other things stay."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if hasattr(value, "to"):
        return _moved_by_itself(value, device)
    return _each(value, lambda part: _moved(part, device))


def _moved_by_itself(value: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        try:
            return value.to(device, non_blocking=True)
        except TypeError:
            pass  # an older BatchEncoding knows no `non_blocking`
    return value.to(device)


def _each(value: Any, act: Callable[[Any], Any]) -> Any:
    """A container of the same kind with every part acted on; what is no container comes back as it is."""
    match value:
        case Mapping():
            parts = {key: act(part) for key, part in value.items()}
            if type(value) is dict or not isinstance(value, MutableMapping):
                return parts
            clone = copy.copy(value)
            clone.update(parts)
            return clone
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(act, value))
        case tuple() | list():
            return type(value)(map(act, value))
    return value
