"""How samples are loaded: DataLoader settings, worker processes, iterable datasets, pinned memory, device copies.

This module answers requests. Which samples are requested, and in which order, is decided in `source`.
"""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from mimatrix.core.errors import UserError, nearest
from mimatrix.engine.data.order import (
    DatasetOrder,
    SampleOrder,
    WholeBatches,
    choose_order,
    order_of_dataloader,
    seed_generators,
)
from mimatrix.engine.data.stream import StreamMode, StreamReader, refuse_in_stream

CollateFn = Callable[[list[Any]], Any]
Ticket = TypeVar("Ticket")
LOADING_SETTINGS = (
    "shuffle",
    "sampler",
    "batch_sampler",
    "drop_last",
    "collate_fn",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "stream_per_rank",
)
"""What `run.prepare` and `run.evaluate` accept; all but the last are named as in torch's DataLoader."""


def dataset_size(dataset: Any) -> int | None:
    """Return the number of samples of a dataset or a DataLoader; None for a stream."""
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    return None if _is_stream(samples) else len(samples)


def describe_dataset(dataset: Any) -> str:
    """Return what ranks compare of a dataset: its size, and which rows a subset has, such as of `random_split`."""
    size = dataset_size(dataset)
    if size is None:
        return "a stream"
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    rows: list[Any] = []
    while isinstance(samples, Subset):
        rows.append([int(row) for row in samples.indices])
        samples = samples.dataset
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=4).hexdigest()
    return f"a dataset of {size} samples" + (f" (rows {digest})" if rows else "")


def check_loading(settings: Mapping[str, Any]) -> None:
    """Raise a `UserError` for an unknown setting; it names the nearest known one."""
    for name in settings:
        if name not in LOADING_SETTINGS:
            raise UserError(f'unknown loading setting "{name}"{nearest(name, LOADING_SETTINGS)}')


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingConfig:
    """A dataset and how it is read."""

    dataset: Any
    order: SampleOrder | None
    """Of the samples in an epoch; None for a stream."""
    drop_last: bool
    collate_fn: CollateFn
    num_workers: int
    prefetch_factor: int
    pin_memory: bool | None
    """None: pin if the device gains from it."""
    stream_per_rank: bool | None = None
    """Whether each rank has a stream of its own; None: all have the same, which is checked."""
    worker_init_fn: Callable[[int], None] | None = None
    timeout_s: float = 0
    multiprocessing_context: Any = None
    persistent_workers: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UserError(f"num_workers = {self.num_workers} is negative; use 0 to load in the training process")
        if self.num_workers and self.prefetch_factor < 1:
            raise UserError(f"prefetch_factor = {self.prefetch_factor} leaves the workers idle; use 1 or more")
        if not isinstance(self.stream_per_rank, bool | None):
            raise UserError(f"stream_per_rank is {self.stream_per_rank!r}; use True or False, or leave it out")
        if self.stream_per_rank is not None and not self.is_stream:
            raise UserError("stream_per_rank says how ranks read an iterable dataset, which this is not; leave it out")

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterable."""
        return self.order is None

    @property
    def shuffles(self) -> bool:
        """Whether the samples of a dataset are shuffled here, and not by a sampler or a stream."""
        return isinstance(self.order, DatasetOrder) and self.order.shuffle

    @property
    def stream_mode(self) -> StreamMode | None:
        """How an iterable dataset is read; None for others."""
        return StreamMode(self.stream_per_rank is True, max(1, self.num_workers)) if self.is_stream else None

    @classmethod
    def resolve(
        cls,
        dataset: Any,
        *,
        global_batch: int,
        shuffle: bool,
        sampler: Any,
        batch_sampler: Any,
        drop_last: bool,
        collate_fn: CollateFn | None,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool | None,
        stream_per_rank: bool | None,
    ) -> "LoadingConfig":
        """Combine a dataset with the given settings; a DataLoader brings its own, except those that are not None."""
        samples = dataset
        if isinstance(dataset, DataLoader):
            samples = dataset.dataset
            if dataset.batch_size is None and dataset.batch_sampler is None:
                raise UserError(
                    "the DataLoader has batch_size = None, so its batches cannot be split over ranks; give it a "
                    "batch_size"
                )
        order: SampleOrder | None = None
        if _is_stream(samples):
            refuse_in_stream({"sampler": sampler, "batch_sampler": batch_sampler})
        elif isinstance(dataset, DataLoader) and sampler is None and batch_sampler is None:
            order = order_of_dataloader(dataset, global_batch)
        else:
            order = choose_order(
                samples, global_batch=global_batch, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler
            )
        if isinstance(dataset, DataLoader):
            return cls._from_dataloader(dataset, order, collate_fn, pin_memory, stream_per_rank)
        return cls(
            dataset=dataset,
            order=order,
            drop_last=drop_last,
            collate_fn=collate_fn or default_collate,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            stream_per_rank=stream_per_rank,
        )

    @classmethod
    def _from_dataloader(
        cls,
        loader: "DataLoader[Any]",
        order: SampleOrder | None,
        collate_fn: CollateFn | None,
        pin_memory: bool | None,
        stream_per_rank: bool | None,
    ) -> "LoadingConfig":
        """Take over how a DataLoader reads."""
        return cls(
            dataset=loader.dataset,
            order=order,
            drop_last=loader.drop_last,
            collate_fn=collate_fn or loader.collate_fn,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor or 2,
            pin_memory=loader.pin_memory if pin_memory is None else pin_memory,
            stream_per_rank=stream_per_rank,
            worker_init_fn=loader.worker_init_fn,
            timeout_s=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
        )

    def dropping_own_batches(self, batch_size: int, global_batch: int) -> "LoadingConfig":
        """Return a config that leaves out what a DataLoader with `drop_last` does, not the last global batch."""
        if self.order is None:
            if batch_size == global_batch:
                return self
            raise UserError(
                f"the DataLoader of a stream has drop_last=True and batch_size = {batch_size}, but the stream is read "
                f"in global batches of {global_batch}; leave drop_last out"
            )
        samples = self.order.num_samples()
        if samples < batch_size:
            raise UserError(
                f"the DataLoader has {samples} samples, fewer than its batch_size = {batch_size}, and drop_last leaves "
                "them out; leave drop_last out"
            )
        return replace(self, order=WholeBatches(self.order, batch_size), drop_last=False)


def _is_stream(dataset: Any) -> bool:
    # The order matters: torch's IterableDataset inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__getitem__") or not hasattr(dataset, "__iter__"):
        raise UserError(
            f"{type(dataset).__name__} is not a dataset; give it __len__ and __getitem__, or __iter__ alone for a "
            f"stream"
        )
    if isinstance(dataset, Generator):
        raise UserError("a generator can be read only once; give an object whose __iter__ restarts for each epoch")
    return True


@dataclass(frozen=True, slots=True)
class RowRequest:
    """Rows of a map-style dataset that make a micro-batch."""

    rows: list[Any]
    seed: int | None
    """For the random numbers of a loader process while it reads them: they then depend neither on which process reads
    what, nor on where a run was resumed. None in the training process, whose generators are in checkpoints."""


class RequestLoader:
    """Answers requests for samples of one rank, in this process or in worker processes.

    A request is a `RowRequest`, or a `StreamRequest` if the dataset is iterable.
    """

    def __init__(self, config: LoadingConfig, rank: int, *, pins: bool) -> None:
        self._config, self._rank, self._pins = config, rank, pins
        self._requests = _RequestSampler()

    def load(self, requests: Iterator[tuple[Ticket, Any]], worker_seed: int) -> Iterator[tuple[Ticket, Any]]:
        """Yield the reply to each request with the ticket that came with it. Workers take requests ahead of time."""
        tickets: deque[Ticket] = deque()

        def take_requests() -> Generator[Any, None, None]:
            for ticket, request in requests:
                tickets.append(ticket)
                yield request

        ahead = take_requests()
        try:
            for reply in self._from_workers(ahead, worker_seed) if self._config.num_workers else map(self._get, ahead):
                yield tickets.popleft(), reply
        finally:
            # Persistent workers would keep a reference to it, and it keeps the source alive.
            ahead.close()

    def _get(self, request: Any) -> Any:
        reply = self._reader[request]
        return pin(reply) if self._pins else reply

    def _from_workers(self, requests: Iterator[Any], worker_seed: int) -> Iterator[Any]:
        self._requests.pending = requests
        # Without a generator of its own, a DataLoader draws the workers' seed from torch's global one: dropout would
        # then depend on whether there are workers.
        self._dataloader.generator.manual_seed(worker_seed)
        return iter(self._dataloader)

    @cached_property
    def _reader(self) -> "_RowReader | StreamReader":
        config = self._config
        if config.is_stream:
            compares = config.stream_per_rank is None
            per_rank = config.stream_per_rank is True
            return StreamReader(config.dataset, config.collate_fn, self._rank, per_rank=per_rank, compares=compares)
        return _RowReader(config.dataset, config.collate_fn)

    @cached_property
    def _dataloader(self) -> "DataLoader[Any]":
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._requests,
            collate_fn=return_unchanged,
            num_workers=self._config.num_workers,
            prefetch_factor=self._config.prefetch_factor,
            pin_memory=self._pins,
            worker_init_fn=WorkerInit(self._config.worker_init_fn),
            timeout=self._config.timeout_s,
            multiprocessing_context=self._config.multiprocessing_context,
            persistent_workers=self._config.persistent_workers,
            generator=torch.Generator(),
        )


class _RequestSampler:
    """The pending requests, as the sampler of a DataLoader."""

    def __init__(self) -> None:
        self.pending: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.pending


class _RowReader(Dataset[Any]):
    """Reads micro-batches of a map-style dataset: rows are collated, and none of them give None."""

    def __init__(self, dataset: Any, collate_fn: CollateFn) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, request: RowRequest) -> Any:
        rows = request.rows
        if not rows:
            return None
        if request.seed is not None:
            seed_generators(request.seed)
        if getattr(self.dataset, "__getitems__", None):
            return self._collate_fn(self.dataset.__getitems__(rows))
        return self._collate_fn([self.dataset[row] for row in rows])


class WorkerInit:
    """The first call in a worker process, whose dataset is a reader around the user's."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        """Show user code its own dataset, and call its `worker_init_fn`."""
        info: Any = get_worker_info()
        # User code asks torch for the dataset of its worker and means its own, not our wrapper; torch offers no other
        # way to replace it.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def return_unchanged(value: Any) -> Any:
    """Return a reply as it is: it is collated already."""
    return value


def copy_ahead(parts: Iterator[tuple[Ticket, Any]], device: torch.device) -> Iterator[tuple[Ticket, Any]]:
    """Copy one micro-batch ahead to a CUDA device on its own stream, while the device computes on the previous one."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copies: deque[tuple[Ticket, Any, torch.cuda.Event]] = deque()

    def wait_for_oldest() -> tuple[Ticket, Any]:
        ticket, data, copied = copies.popleft()
        torch.cuda.current_stream(device).wait_event(copied)
        return ticket, data

    for ticket, data in parts:
        # Kernels already queued may still read memory that an earlier micro-batch has freed.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copies.append((ticket, move(data, device), stream.record_event()))
        if len(copies) > 1:
            yield wait_for_oldest()
    if copies:
        yield wait_for_oldest()


# Not `torch.utils._pytree`: it treats a UserDict, and any subclass of dict, list or tuple, as a leaf, so that the
# tensors of such batches would stay where they are.


def pin(batch: Any) -> Any:
    """Return `batch` with its tensors in pinned memory, from which copies to a GPU are asynchronous."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    return _map_items(batch, pin)


def move(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; objects with a `to` method move themselves."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if hasattr(batch, "to"):
        return _move_object(batch, device)
    return _map_items(batch, lambda item: move(item, device))


def _move_object(batch: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        try:
            return batch.to(device, non_blocking=True)
        except TypeError:
            pass  # an older BatchEncoding has no `non_blocking`
    return batch.to(device)


def _map_items(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with every item converted; return anything else unchanged."""
    match value:
        case Mapping():
            items = {key: convert(item) for key, item in value.items()}
            if type(value) is dict or not isinstance(value, MutableMapping):
                return items
            clone = copy.copy(value)
            clone.update(items)
            return clone
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(convert, value))
        case tuple() | list():
            return type(value)(map(convert, value))
    return value
