"""Small values as JSON and back, exactly: hyper-parameters, what schedulers keep, an optimizer's counters."""

import base64
import pickle
from collections import Counter
from typing import Any

import torch

from mimatrix.core.errors import UserError


def pack(value: Any) -> Any:
    """A value that JSON can hold. What JSON does not know is a dict with one entry that says what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(each) for each in value]}
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: pack(each) for key, each in value.items()}}
        kind = "counter" if isinstance(value, Counter) else "pairs"
        return {kind: [[pack(key), pack(each)] for key, each in value.items()]}
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return {"tensor": value.detach().tolist(), "dtype": name_of(value.dtype)}
    return {"pickle": _pickled(value)}


def unpack(packed: Any) -> Any:
    """What `pack` was given; tensors come back on the CPU."""
    if isinstance(packed, list):
        return [unpack(each) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return torch.tensor(packed["tensor"], dtype=dtype_of(packed["dtype"]))
    ((kind, inside),) = packed.items()
    if kind == "tuple":
        return tuple(unpack(each) for each in inside)
    if kind == "pickle":
        # Only what nobody could foresee comes this way; the index of torch.distributed.checkpoint is a pickle, too.
        return pickle.loads(base64.b64decode(inside))  # noqa: S301
    if kind == "dict":
        return {key: unpack(each) for key, each in inside.items()}
    pairs = {unpack(key): unpack(each) for key, each in inside}
    return Counter(pairs) if kind == "counter" else pairs


def name_of(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type with this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _pickled(value: Any) -> str:
    try:
        return base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:
        kind = type(value).__name__
        raise UserError(
            f"a {kind} cannot be written into a checkpoint ({error}); keep numbers in optimizers and schedulers"
        ) from error
