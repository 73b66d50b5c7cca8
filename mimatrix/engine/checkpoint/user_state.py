"""What a script wants back with a checkpoint: nested dicts, lists and tuples of numbers, strings and tensors."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.json_codec import StoredTensor, dtype_name, pack, parse_dtype, unpack
from mimatrix.engine.checkpoint.tensor_files import TensorReader, TensorSlice

_PREFIX = "user"


@dataclass(frozen=True, slots=True)
class UserState:
    """The last state that the script gave `run.save`, or that was loaded."""

    value: dict[Any, Any] = field(default_factory=dict)
    """A copy, with tensors on the CPU."""
    given_at: int = 0
    """The number of the call of `run.save` that was given it; ranks without data may have missed later ones."""

    def stage(self) -> tuple[Any, dict[str, TensorSlice]]:
        """Return the structure as JSON, and the tensors by key."""
        tensors: dict[str, TensorSlice] = {}

        def store(tensor: torch.Tensor) -> StoredTensor:
            key = f"{_PREFIX}.{len(tensors)}"
            flat = tensor.reshape(-1)
            tensors[key] = TensorSlice(flat, 0, flat.numel())
            return StoredTensor(key, list(tensor.shape), dtype_name(tensor.dtype))

        structure = pack(_map_tensors(self.value, store))
        return structure, {key: part for key, part in tensors.items() if part.count}

    def digests(self) -> dict[str, str]:
        """Return a checksum of each entry by its key, for ranks that were given the same.

        Of tensors of floats only the shape counts: devices round differently, as in an average of weights.
        """
        return {repr(key): f"{_digest(item):08x}" for key, item in self.value.items()}


def copy_user_state(state: object) -> dict[Any, Any]:
    """Return a copy of what the user gave, with tensors on the CPU.

    Raises:
        UserError: A checkpoint cannot hold it; the message names the key.
    """
    if not isinstance(state, Mapping):
        raise UserError(f'user_state is a {type(state).__name__}; give a dict, such as {{"best": 0.9}}')
    try:
        copied: dict[Any, Any] = _copy(state, "user_state")
    except RecursionError:
        raise UserError(
            "user_state contains itself, or is nested too deeply; give dicts, lists and tuples without cycles"
        ) from None
    return copied


def read_user_state(structure: Any, reader: TensorReader) -> dict[Any, Any]:
    """Read what `UserState.stage` returned from a checkpoint."""
    value = unpack(structure)
    parts: dict[str, TensorSlice] = {}
    tensors: dict[str, torch.Tensor] = {}
    for stored in _find_stored(value):
        tensors[stored.key] = torch.empty(stored.shape, dtype=parse_dtype(stored.dtype))
        if tensors[stored.key].numel():
            parts[stored.key] = TensorSlice(tensors[stored.key].view(-1), 0, tensors[stored.key].numel())
    if parts:
        reader.read(parts)
    state: dict[Any, Any] = _map_stored(value, tensors)
    return state


def _copy(value: Any, path: str) -> Any:
    value = _to_plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UserError(f"{path} is a sparse tensor, which a checkpoint cannot hold; give it dense")
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {_check_key(key, path): _copy(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copy(item, f"{path}[{number}]") for number, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise UserError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; give numbers, strings, tensors, or "
        "dicts, lists and tuples of them"
    )


def _to_plain(value: Any) -> Any:
    """Return Python's number or string for a NumPy scalar."""
    return value.item() if isinstance(value, np.generic) else value


def _check_key(key: object, path: str) -> object:
    key = _to_plain(key)
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise UserError(f"{path} has the key {key!r}; give keys that are strings or numbers")


def _map_tensors(value: Any, store: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return store(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, store) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, store) for item in value)
    return value


def _map_stored(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, StoredTensor):
        return tensors[value.key]
    if isinstance(value, dict):
        return {key: _map_stored(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_stored(item, tensors) for item in value)
    return value


def _find_stored(value: Any) -> Iterator[StoredTensor]:
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_stored(item)


def _digest(value: Any) -> int:
    return zlib.crc32(repr(_map_tensors(value, _describe_tensor)).encode(errors="replace"))


def _describe_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    if tensor.is_floating_point() or tensor.is_complex():
        # One number is a result, such as a loss, that has to be the same; more are weights.
        return shape, tensor.dtype, tensor.item() if tensor.numel() == 1 else None
    return shape, tensor.dtype, zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
