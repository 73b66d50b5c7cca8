"""Short digests of samples and of their order, by which ranks and loader processes find out that they differ."""

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

Token = str | float
"""Part of a description: a text that must be the same, or a number that may be rounded in another way elsewhere."""

_MAX_SAMPLES = 32
"""Samples of a batch that are looked at: the first, the last, and some in between."""
_MAX_ITEMS = 8
_MAX_BYTES = 64
_ELEMENTS_PER_DIM = {1: 16, 2: 6, 3: 4}
_MAX_DEPTH = 6
_MAX_PATH = 4096
_TOLERANCE = 0.01
"""As of bfloat16."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def digest_samples(samples: Sequence[Any]) -> str:
    """Return a digest of samples from their types, shapes and a few of their values; microseconds for each."""
    return _hash(token for sample in _some(samples, _MAX_SAMPLES) for token in _tokens(sample, _MAX_DEPTH))


def describe_samples(samples: Sequence[Any]) -> tuple[str, list[float]]:
    """Return a digest of what is the same wherever samples are computed, and the numbers that may be rounded."""
    tokens = [token for sample in _some(samples, _MAX_SAMPLES) for token in _tokens(sample, _MAX_DEPTH)]
    numbers = [token for token in tokens if isinstance(token, float)]
    return _hash(token if isinstance(token, str) else "float" for token in tokens), numbers


def are_close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether numbers are the same up to rounding, which may differ between kinds of CPUs and GPUs."""
    if len(numbers) != len(others):
        return False
    small = _TOLERANCE / 10 * max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    return all(
        math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=small) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(numbers, others, strict=True)
    )


def digest_order(order: "Sequence[Any] | torch.Tensor") -> str:
    """Return a digest of all indices of an epoch."""
    if isinstance(order, torch.Tensor):
        return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()
    return _hash(repr(index) for index in order)


def _hash(tokens: Iterable[Token]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for token in tokens:
        state.update(str(token).encode(errors="replace") + b"\0")
    return state.hexdigest()


def _tokens(value: Any, depth: int) -> Iterator[Token]:
    """Yield what describes a value, the same in every process: no addresses, no hashes of strings."""
    yield type(value).__name__
    if isinstance(value, float):
        yield float(value)
    elif value is None or isinstance(value, bool | int | complex):
        yield repr(value)
    elif isinstance(value, str | bytes | bytearray):
        yield _ends(_without_folder(value) if isinstance(value, str) else value)
    elif isinstance(value, os.PathLike):
        yield _ends(_without_folder(str(value)))
    elif isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__"):
        yield from _array_tokens(value, depth)
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
    elif isinstance(value, Set):
        # A set of strings has another order in each process.
        yield from sorted(_hash(_tokens(item, depth - 1)) for item in value)
    elif isinstance(value, type):
        yield value.__qualname__
    else:
        yield from _object_tokens(value, depth)


def _object_tokens(value: Any, depth: int) -> Iterator[Token]:
    """Describe an object by what pickle would write of it: its attributes and slots, or how it is made again.

    Not by pickle's bytes: in these the order of a set is that of this process.
    """
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 (an object may refuse to be pickled in any way)
        yield _ends(_ADDRESS.sub("", repr(value)))
        return
    if isinstance(made, str):
        yield made
        return
    parts = list(made)
    state = parts[2] if len(parts) > 2 else None
    yield from _tokens(parts[1], depth - 1)
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}
    yield from _tokens(state, depth - 1)
    for items in parts[3:5]:
        if items is not None:
            yield from _tokens(list(items), depth - 1)


def _array_tokens(array: Any, depth: int) -> Iterator[Token]:
    """Describe a tensor or an array by some of its elements; a view of them, so that nothing large is copied."""
    if isinstance(array, torch.Tensor) and (array.layout != torch.strided or array.is_meta or array.is_nested):
        yield f"{array.dtype} {array.layout}" if array.is_nested else f"{array.dtype} {tuple(array.shape)}"
        for part in _stored_parts(array):
            yield from _array_tokens(part, depth)
        return
    if not hasattr(array, "shape"):
        yield from _interface_tokens(array, depth)
        return
    shape = tuple(array.shape)
    count = _ELEMENTS_PER_DIM.get(len(shape), 3)
    picked = array[tuple(slice(None, None, -(-size // count) or 1) for size in shape)] if shape else array
    yield f"{array.dtype} {shape}"
    if str(array.dtype) == "object":
        yield from _tokens(picked.tolist(), max(depth - 1, 0))
    elif "float" in str(array.dtype):
        yield from picked.reshape(-1).tolist()
    else:
        yield repr(picked.tolist())


def _stored_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the dense tensors of a sparse or nested one."""
    if tensor.is_meta:
        return
    if tensor.is_nested:
        yield from _some(tensor.unbind(), _MAX_ITEMS)
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # not `indices`: that needs a coalesced one
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield tensor.values()


def _interface_tokens(value: Any, depth: int) -> Iterator[Token]:
    """Describe what only exports an array, as an image of PIL does with a copy of its bytes."""
    interface = value.__array_interface__
    data = interface.get("data")
    if isinstance(data, bytes):
        yield f"{interface['typestr']} {interface['shape']} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    elif numpy := sys.modules.get("numpy"):
        yield from _array_tokens(numpy.asarray(value), depth)


def _without_folder(text: str) -> str:
    """Return an absolute path from its last folder on: hosts may have the same files in different places."""
    return "/".join(text.split("/")[-2:]) if text.startswith("/") and len(text) < _MAX_PATH else text


def _ends(value: Any) -> str:
    return f"{len(value)} {value[:_MAX_BYTES]!r} {value[-_MAX_BYTES:]!r}"


def _some(items: Sequence[Any], count: int) -> Iterator[Any]:
    """Yield at most `count` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        yield from items
        return
    for number in range(count):
        yield items[number * (len(items) - 1) // (count - 1)]
