"""How a dataset is loaded: settings, from the arguments of `run.prepare` or from a DataLoader."""

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from mimatrix.core.errors import UserError, nearest
from mimatrix.engine.data.order import DatasetOrder, SampleOrder, WholeBatches, choose_order, order_of_dataloader
from mimatrix.engine.data.stream import StreamMode, refuse_in_stream

CollateFn = Callable[[list[Any]], Any]
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
