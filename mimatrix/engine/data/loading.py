"""How samples are loaded: requests, answered in the training process or in worker processes.

Which samples are requested, and in which order, is decided in `source`.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mimatrix.engine.data.device_transfer import pin
from mimatrix.engine.data.loading_config import CollateFn, LoadingConfig
from mimatrix.engine.data.order import seed_generators
from mimatrix.engine.data.stream import StreamReader

Ticket = TypeVar("Ticket")


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
