"""Batches on their way to a device: pinned memory, and copies that run ahead of the computation."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch

Ticket = TypeVar("Ticket")


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
