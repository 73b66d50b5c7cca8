"""Small values survive JSON exactly, with their types."""

import json
from collections import Counter
from typing import Any

import pytest
import torch

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
    ],
)
def test_values_survive_json_with_their_types(value: Any) -> None:
    unpacked = unpack(json.loads(json.dumps(pack(value))))
    assert type(unpacked) is type(value)
    assert torch.equal(unpacked, value) if isinstance(value, torch.Tensor) else unpacked == value
