"""Small values survive JSON exactly, with their types."""

import json
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint.json_codec import pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        None,
        0.1,
        float("inf"),
        (0.9, 0.999),
        {"a": [1, (2, {"b": None})], "tuple": {"tensor": 3}},
        {3: "x", (1, 2): 4},
        Counter({3: 2}),
        torch.tensor([0.1, 2.5], dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.int64),
        1 + 2j,
        torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64),
        b"\x00\xff",
        {1, (2, 3)},
        frozenset({"a"}),
        np.float32(0.1),
        np.int64(2**62),
        datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        date(2026, 1, 2),
        timedelta(days=-1, microseconds=7),
        Path("a/b"),
        torch.device("cpu"),
        torch.bfloat16,
        torch.random.get_rng_state(),
    ],
)
def test_values_survive_json_with_their_types(value: Any) -> None:
    unpacked = unpack(json.loads(json.dumps(pack(value))))
    assert type(unpacked) is type(value)
    assert torch.equal(unpacked, value) if isinstance(value, torch.Tensor) else unpacked == value


def test_numpy_arrays_survive_json() -> None:
    for value in (np.arange(6.0, dtype=np.float16).reshape(2, 3), np.array(3), np.array([True])):
        unpacked = unpack(json.loads(json.dumps(pack([value]))))[0]
        assert (type(unpacked), unpacked.dtype) == (type(value), value.dtype)
        assert np.array_equal(unpacked, value)


class Custom:
    """A class of the user's."""


@pytest.mark.parametrize("value", [Custom(), print, np.array([Custom()], dtype=object), np.array(["text"])])
def test_what_is_not_plain_data_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(UserError, match=r"a \w+ cannot be written to a checkpoint, .*; keep numbers"):
        pack({"setting": [value]})


@pytest.mark.parametrize("packed", [{"pickle": "gASVAAAAAA=="}, {"eval": "1"}, {"a": 1, "b": 2}])
def test_a_kind_that_is_not_known_is_refused(packed: Any) -> None:
    with pytest.raises(WorldError, match="the checkpoint has a value"):
        unpack({"dict": {"setting": [packed]}})


@pytest.mark.parametrize("name", ["load", "float33", "__builtins__"])
def test_only_dtypes_are_dtypes(name: str) -> None:
    with pytest.raises(WorldError, match="does not know"):
        unpack({"tensor": [1], "dtype": name})
