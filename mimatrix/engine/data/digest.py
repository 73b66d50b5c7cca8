"""Short digests of samples and of their order, by which ranks and loader processes find out that they differ."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

_MAX_SAMPLES = 32
"""Samples of a batch that are looked at: the first, the last, and some in between."""
_MAX_ITEMS = 8
_MAX_BYTES = 64
_ELEMENTS_PER_DIM = {1: 16, 2: 6, 3: 4}
_MAX_DEPTH = 6


def digest_samples(samples: Sequence[Any]) -> str:
    """Return a digest of samples from their types, shapes and a few of their values; microseconds for each."""
    return _hash(token for sample in _some(samples, _MAX_SAMPLES) for token in _tokens(sample, _MAX_DEPTH))


def digest_order(order: "Sequence[Any] | torch.Tensor") -> str:
    """Return a digest of all indices of an epoch."""
    if isinstance(order, torch.Tensor):
        return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()
    return _hash(repr(index) for index in order)


def _hash(tokens: Iterable[str]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for token in tokens:
        state.update(token.encode(errors="replace") + b"\0")
    return state.hexdigest()


def _tokens(value: Any, depth: int) -> Iterator[str]:
    """Yield texts that describe a value, the same in every process: no addresses, no hashes of strings."""
    yield type(value).__name__
    if value is None or isinstance(value, bool | int | float | complex):
        yield repr(value)
    elif isinstance(value, str | bytes | bytearray):
        yield f"{len(value)} {value[:_MAX_BYTES]!r} {value[-_MAX_BYTES:]!r}"
    elif isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__"):
        yield _describe_array(value)
    elif not depth:
        return
    elif isinstance(value, Mapping):
        yield str(len(value))
        for key in sorted(value, key=str)[:_MAX_ITEMS]:
            yield str(key)
            yield from _tokens(value[key], depth - 1)
    elif isinstance(value, tuple | list):
        yield str(len(value))
        for item in _some(value, _MAX_ITEMS):
            yield from _tokens(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _tokens(vars(value), depth - 1)


def _describe_array(array: Any) -> str:
    """Describe a tensor or an array by some of its elements; a view of them, so that nothing large is copied."""
    shape = tuple(array.shape)
    count = _ELEMENTS_PER_DIM.get(len(shape), 3)
    if isinstance(array, torch.Tensor) and (array.layout != torch.strided or array.is_meta):
        return f"{array.dtype} {shape}"
    picked = array[tuple(slice(None, None, -(-size // count) or 1) for size in shape)] if shape else array
    return f"{array.dtype} {shape} {picked.tolist()!r}"


def _some(items: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield at most `count` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        yield from items
        return
    for number in range(count):
        yield items[number * (len(items) - 1) // (count - 1)]
