"""Datasets of equal length with other samples are refused, and augmentation is not mistaken for that."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import cross_entropy, seeded_perceptron, vectors
from support.runs import in_runs
from torch.utils.data import Dataset, get_worker_info

from mimatrix.core.errors import UserError
from mimatrix.engine.data.digest import are_close, describe_samples
from mimatrix.engine.data.fingerprint import check_same_rows, fingerprint_rows
from mimatrix.engine.data.loading_config import LoadingConfig
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.run import Run
from mimatrix.planner import Split

pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning")

DATA = vectors(12)


class FunctionRows(Dataset[Any]):
    """Rows made by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


def loading_of(dataset: Any, **options: Any) -> LoadingConfig:
    return MicroBatchSource(dataset, Split.of([4]), 0, **options).loading


def shuffled(run: Run) -> list[Any]:
    return random.Random(run.rank).sample(DATA, len(DATA))


def says(call: str, row: int) -> str:
    return (
        f"rank 1 has another row {row} in its dataset than rank 0; give {call} the same samples in the same order on "
        "all ranks, e.g. make and shuffle them with the same seed"
    )


@pytest.mark.parametrize("call", ["run.prepare", "run.evaluate"])
def test_datasets_that_each_rank_has_shuffled_are_refused(call: str) -> None:
    def on_rank(run: Run) -> str:
        model, optimizer = seeded_perceptron()
        train_on, evaluate_on = (shuffled(run), DATA) if call == "run.prepare" else (DATA, shuffled(run))

        def use() -> None:
            run.prepare(model, optimizer, train_on)
            run.evaluate(model, evaluate_on, lambda model, batch: {"loss": cross_entropy(model, batch)})

        with pytest.raises(UserError) as caught:
            use()
        return str(caught.value)

    assert in_runs(2, on_rank, batch=[3, 2]) == [says(call, 0)] * 2


def augmented(row: int) -> Any:
    """With random numbers of torch, Python and NumPy."""
    return DATA[row][0] + torch.randn(6) + random.random() + float(np.random.standard_normal())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_augmentation_is_the_same_on_all_ranks_and_leaves_generators_alone(num_workers: int) -> None:
    before = torch.initial_seed(), torch.get_rng_state().sum(), random.getstate(), str(np.random.get_state())
    prints = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            prints.append(fingerprint_rows(loading_of(FunctionRows(augmented), num_workers=num_workers)))
    assert prints[0] == prints[1] is not None
    assert [row for row, _, _ in prints[0] or []] == [0, 6, 11]
    after = torch.initial_seed(), torch.get_rng_state().sum(), random.getstate(), str(np.random.get_state())
    assert after == before


def compare(dataset: Any, other: Any) -> None:
    """Compare as the rank that has the first one does."""
    own, others = loading_of(dataset), loading_of(other)
    check_same_rows(RankExchange(None), own, [fingerprint_rows(own), fingerprint_rows(others)], "run.prepare")


def test_augmentation_with_a_generator_of_its_own_is_not_compared() -> None:
    generator = random.Random(1)
    flipping = FunctionRows(lambda row: DATA[row][0] * generator.choice([1, -1]))
    compare(flipping, FunctionRows(lambda row: -DATA[row][0]))
    with pytest.raises(UserError) as caught:
        compare(FunctionRows(lambda row: DATA[row][0]), FunctionRows(lambda row: DATA[row][0] - int(row == 6)))
    assert str(caught.value) == says("run.prepare", 6)


def in_worker_only(row: int) -> Any:
    assert get_worker_info()
    return DATA[row]


def test_rows_are_read_where_the_loop_reads_them() -> None:
    assert fingerprint_rows(loading_of(FunctionRows(in_worker_only))) is None
    assert fingerprint_rows(loading_of(FunctionRows(in_worker_only), num_workers=2)) == fingerprint_rows(
        loading_of(DATA)
    )


def test_rows_that_fail_are_left_to_the_loop() -> None:
    compare(FunctionRows(lambda row: 1 / row), FunctionRows(lambda row: row))


def test_rounding_and_folders_of_hosts_do_not_tell_samples_apart() -> None:
    def describe(scale: float, folder: str) -> tuple[str, list[float]]:
        return describe_samples([(DATA[0][0] * scale, f"{folder}/cat/1.png", Path(folder) / "cat" / "1.png", 0.5)])

    one, other = describe(1.0, "/scratch/0"), describe(1 + 1e-6, "/home/someone")
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert are_close(one[1], other[1])
    assert not are_close(one[1], describe(1.1, "/scratch/0")[1])
    assert are_close([float("nan"), float("inf")], [float("nan"), float("inf")])
    assert not are_close([float("nan")], [1.0])
