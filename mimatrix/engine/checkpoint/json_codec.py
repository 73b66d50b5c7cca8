"""Small values as JSON and back, exactly: hyper-parameters, the state of schedulers, counters of an optimizer.

Only the types that are listed here: to read a checkpoint must never run code, so there is no pickle for the others.
"""

import base64
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from mimatrix.core.errors import UserError, WorldError

_DTYPES: dict[str, torch.dtype] = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_ARRAY_KINDS, _MOST_ITEM_BYTES = "biuf", 8
"""The NumPy types whose numbers JSON holds exactly: bool, integers and floats of up to 64 bits."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands in JSON for a tensor that a checkpoint holds under a key of its own."""

    key: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one class are written."""

    kind: type
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


_CODECS = {
    "tuple": _Codec(tuple, lambda value: [pack(item) for item in value], lambda items: tuple(map(unpack, items))),
    "set": _Codec(set, lambda value: [pack(item) for item in value], lambda items: {*map(unpack, items)}),
    "frozenset": _Codec(
        frozenset, lambda value: [pack(item) for item in value], lambda items: frozenset(map(unpack, items))
    ),
    "stored": _Codec(
        StoredTensor, lambda value: [value.key, value.shape, value.dtype], lambda content: StoredTensor(*content)
    ),
    "complex": _Codec(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": _Codec(bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "datetime": _Codec(datetime, datetime.isoformat, datetime.fromisoformat),
    "date": _Codec(date, date.isoformat, date.fromisoformat),
    "timedelta": _Codec(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)
    ),
    "path": _Codec(PurePath, str, Path),
    "device": _Codec(torch.device, str, torch.device),
    "dtype": _Codec(torch.dtype, lambda value: dtype_name(value), lambda name: parse_dtype(name)),
}


def pack(value: Any) -> Any:
    """Return a value that JSON can hold. A type that JSON lacks becomes a dict with one entry that names the type.

    Raises:
        UserError: A checkpoint cannot hold values of this type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return _pack_dict(value)
    if isinstance(value, torch.Tensor):
        numbers = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        return {"tensor": numbers.tolist(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array(value)
    for name, codec in _CODECS.items():
        if isinstance(value, codec.kind):
            return {name: codec.to_json(value)}
    raise _refusal(value)


def unpack(packed: Any) -> Any:
    """Return what `pack` was given; tensors come back on the CPU.

    Raises:
        WorldError: It is not what `pack` writes.
    """
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return _unpack_tensor(packed)
    if "array" in packed:
        array = np.array(packed["array"], dtype=np.dtype(packed["type"]))
        return array if array.ndim or packed["is_array"] else array[()]
    if len(packed) != 1:
        raise WorldError(
            f"the checkpoint has a value with the entries {sorted(packed)}, which this version does not know"
        )
    ((name, content),) = packed.items()
    if name == "dict":
        return {key: unpack(item) for key, item in content.items()}
    if name in ("pairs", "counter"):
        pairs = {unpack(key): unpack(item) for key, item in content}
        return Counter(pairs) if name == "counter" else pairs
    if name not in _CODECS:
        raise WorldError(f'the checkpoint has a value of the kind "{name}", which is not read: it could run code')
    return _CODECS[name].from_json(content)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name."""
    if name not in _DTYPES:
        raise WorldError(f'the checkpoint has the dtype "{name}", which this version of torch does not know')
    return _DTYPES[name]


def _pack_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: pack(item) for key, item in value.items()}}
    kind = "counter" if isinstance(value, Counter) else "pairs"
    return {kind: [[pack(key), pack(item)] for key, item in value.items()]}


def _pack_array(value: "np.ndarray[Any, Any] | np.generic") -> dict[str, Any]:
    if value.dtype.kind not in _ARRAY_KINDS or value.dtype.itemsize > _MOST_ITEM_BYTES:
        raise _refusal(value)
    return {"array": value.tolist(), "type": value.dtype.str, "is_array": isinstance(value, np.ndarray)}


def _unpack_tensor(packed: dict[str, Any]) -> torch.Tensor:
    dtype = parse_dtype(packed["dtype"])
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(packed["tensor"], dtype=dtype.to_real()))
    return torch.tensor(packed["tensor"], dtype=dtype)


def _refusal(value: Any) -> UserError:
    return UserError(
        f"a {type(value).__name__} cannot be written to a checkpoint, which holds plain data only; keep numbers, "
        "strings, tensors, and lists and dicts of them in optimizers and schedulers"
    )
