"""Small values as JSON and back, exactly: hyper-parameters, the state of schedulers, counters of an optimizer."""

import base64
import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from mimatrix.core.errors import UserError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands in JSON for a tensor that a checkpoint holds under a key of its own."""

    key: str
    shape: list[int]
    dtype: str


def pack(value: Any) -> Any:
    """Return a value that JSON can hold. A type that JSON lacks becomes a dict with one entry that names the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(item) for item in value]}
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: pack(item) for key, item in value.items()}}
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {kind: [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, StoredTensor):
        return {"stored": [value.key, value.shape, value.dtype]}
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return {"tensor": value.detach().tolist(), "dtype": dtype_name(value.dtype)}
    return {"pickle": _pickle_base64(value)}


def unpack(packed: Any) -> Any:
    """Return what `pack` was given; tensors come back on the CPU."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return torch.tensor(packed["tensor"], dtype=parse_dtype(packed["dtype"]))
    ((kind, content),) = packed.items()
    if kind == "tuple":
        return tuple(unpack(item) for item in content)
    if kind == "stored":
        return StoredTensor(*content)
    if kind == "pickle":
        # Only types that are not listed here; the index of torch.distributed.checkpoint is a pickle, too.
        return pickle.loads(base64.b64decode(content))  # noqa: S301
    if kind == "dict":
        return {key: unpack(item) for key, item in content.items()}
    pairs = {unpack(key): unpack(item) for key, item in content}
    return Counter(pairs) if kind == "counter" else pairs


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. `float32`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pickle_base64(value: Any) -> str:
    try:
        return base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:
        kind = type(value).__name__
        raise UserError(
            f"a {kind} cannot be written to a checkpoint ({error}); keep only numbers in optimizers and schedulers"
        ) from error
