"""Digests tell samples apart by their types, shapes and some values, in every process alike."""

import subprocess
import sys
import time
from collections import UserDict, deque
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from mimatrix.engine.data.digest import digest_order, digest_samples


@dataclass
class Record:
    text: str
    label: int


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    label: int


class Closed:
    """Refuses to be pickled."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("closed")

    def __repr__(self) -> str:
        return f"<Closed {self._text} at {id(self):#x}>"


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
    Slotted(torch.zeros(3), 1),
    Slotted(torch.zeros(3), 2),
    Slotted(torch.ones(3), 1),
    {"one", "two"},
    {"one", "three"},
    frozenset({"one", "two"}),
    Decimal("1.5"),
    Decimal("1.50"),
    date(2020, 1, 2),
    date(2020, 1, 3),
    PurePosixPath("one/two"),
    PurePosixPath("one/three"),
    deque([1, 2]),
    deque([1, 3]),
    range(3),
    range(4),
    int,
    float,
    Closed("one"),
    Closed("two"),
    torch.tensor([0.0, 1.0]).to_sparse(),
    torch.tensor([1.0, 0.0]).to_sparse(),
    np.array([object, "one"], dtype=object),
    np.array([object, "two"], dtype=object),
]


def test_samples_of_different_kinds_and_values_have_different_digests() -> None:
    digests = [digest_samples([kind]) for kind in KINDS]
    assert len(set(digests)) == len(KINDS)
    assert digests == [digest_samples([kind]) for kind in KINDS]
    assert digest_samples([1, 2]) != digest_samples([2, 1])


def test_objects_that_show_their_address_have_the_same_digest() -> None:
    assert digest_samples([Closed("one")]) == digest_samples([Closed("one")])


@pytest.mark.parametrize("with_shape", [False, True])
def test_images_have_digests_of_their_pixels(with_shape: bool) -> None:
    new_image = pytest.importorskip("PIL.Image").new
    images = [new_image("RGB", (4, 4), color) for color in ((1, 0, 0), (0, 1, 0), (1, 0, 0))]
    samples = [np.asarray(image) if with_shape else image for image in images]
    digests = [digest_samples([{"image": sample}]) for sample in samples]
    assert digests[0] == digests[2] != digests[1]


class Exporting:
    """Exports an array and has no shape."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> Any:
        return self._array.__array_interface__


def test_arrays_that_are_only_exported_have_digests_of_their_elements() -> None:
    digests = [digest_samples([Exporting(np.full(3, value))]) for value in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([{"text": "some words", "label": 3}], marks=pytest.mark.long),
        pytest.param(["one", "two"], marks=pytest.mark.long),
        [{"some", "words", "in", "a", "set"}],
    ],
)
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
