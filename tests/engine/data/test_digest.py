"""Digests tell samples apart by their types, shapes and some values, in every process alike."""

import subprocess
import sys
import time
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mimatrix.engine.data.digest import digest_order, digest_samples


@dataclass
class Record:
    text: str
    label: int


IMAGE = torch.zeros(3, 64, 64)
IMAGE[:, 20:44, 20:44] = 1.0
KINDS: list[Any] = [
    1,
    2,
    1.0,
    True,
    None,
    "one",
    b"one",
    "x" * 1000,
    "x" * 999 + "y",
    [1, 2],
    (1, 2),
    {"a": 1},
    {"b": 1},
    {"a": 2},
    UserDict({"a": 1}),
    torch.zeros(3),
    torch.zeros(3, dtype=torch.float64),
    torch.zeros(1, 3),
    torch.tensor(5),
    torch.zeros(0),
    torch.tensor(float("nan")),
    torch.zeros(3, 64, 64),
    IMAGE,
    IMAGE.transpose(1, 2)[:, 10:, :],
    np.zeros(3),
    np.ones(3),
    np.float64(2.0),
    Record("one", 1),
    Record("one", 2),
]


def test_samples_of_different_kinds_and_values_have_different_digests() -> None:
    digests = [digest_samples([kind]) for kind in KINDS]
    assert len(set(digests)) == len(KINDS)
    assert digests == [digest_samples([kind]) for kind in KINDS]
    assert digest_samples([1, 2]) != digest_samples([2, 1])


@pytest.mark.parametrize("samples", [[{"text": "some words", "label": 3}], ["one", "two"]])
def test_a_digest_is_the_same_in_another_process(samples: Any) -> None:
    code = f"from mimatrix.engine.data.digest import digest_samples; print(digest_samples({samples!r}))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None)
    assert told.stdout.strip() == digest_samples(samples)


def test_a_digest_does_not_read_large_samples() -> None:
    large = torch.zeros(1 << 26).view(1 << 13, 1 << 13).t()
    started = time.perf_counter()
    digest_samples([large] * 1000)
    assert time.perf_counter() - started < 1.0


def test_orders_have_digests() -> None:
    assert digest_order(torch.arange(5)) == digest_order(torch.arange(5))
    assert digest_order(torch.arange(5)) != digest_order(torch.arange(5).flip(0))
    assert digest_order([(1, 2), (2, 1)]) != digest_order([(2, 1), (1, 2)])
