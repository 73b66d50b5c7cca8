"""Checkpoints that are kept by a metric: the best stay, whatever was saved later and on whichever rank."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)

SPLITS = [[8], [3, 5], [0, 8], [3, 0, 5]]


def train(run: Run, each_step: Callable[[], None] = lambda: None) -> None:
    model = Perceptron().double()
    model, optimizer, loader = run.prepare(model, adamw(model), vectors(40), loss=cross_entropy)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
        if not run.in_batch:
            each_step()


def saving(folder: Path, metrics: Sequence[float], **options: Any) -> Callable[[Run], Any]:
    """Save after each step with the next metric; return what rank 0 says is there."""

    def on_rank(run: Run) -> Any:
        train(run, lambda: run.save(folder, metric=metrics[run.step - 1], **options))
        run.close()
        return run.checkpoints

    return on_rank


def steps(folder: Path) -> set[int]:
    return {storage.read_metadata(path)["step"] for path in storage.list_checkpoints(folder)}


@pytest.mark.parametrize("batch", SPLITS)
def test_the_best_checkpoints_of_a_folder_are_kept(batch: list[int], tmp_path: Path) -> None:
    accuracies = [0.3, 0.7, 0.5, 0.7, 0.6]
    infos = in_runs(len(batch), saving(tmp_path / "max", accuracies, keep=2), batch=batch, stage=2)[0]
    assert [(info.step, info.metric) for info in infos] == [(4, 0.7), (2, 0.7)]
    losses = [3.0, -1.0, 2.0, math.nan, -0.5]
    in_runs(len(batch), saving(tmp_path / "min", losses, keep=2, best="min"), batch=batch)
    assert steps(tmp_path / "min") == {2, 5}


def test_a_worse_checkpoint_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = storage.write_part

    def record(unfinished: Path, rank: int, *more: Any) -> None:
        written.append(unfinished.name.split("-")[1])
        write(unfinished, rank, *more)

    monkeypatch.setattr(storage, "write_part", record)
    in_runs(2, saving(tmp_path, [0.3, 0.7, 0.5, 0.7, math.nan], keep=1), batch=[3, 5])
    assert sorted(written) == ["00000001"] * 2 + ["00000002"] * 2
    assert steps(tmp_path) == {2}


def test_a_resumed_run_does_not_overwrite_a_better_checkpoint(tmp_path: Path) -> None:
    in_runs(2, saving(tmp_path, [0.3, 0.9, 0.5, 0.4, 0.2], keep=2), batch=[3, 5])

    def on_rank(run: Run) -> int:
        model = Perceptron().double()
        run.prepare(model, adamw(model), vectors(40), loss=cross_entropy)
        assert run.load(tmp_path)
        loaded = run.step
        run.save(tmp_path, keep=1, metric=torch.tensor(0.8), wait=True)
        return loaded

    assert in_runs(1, on_rank, batch=[8]) == [2]  # the best, not the newest
    assert steps(tmp_path) == {2, 3}


def test_nan_never_wins(tmp_path: Path) -> None:
    in_runs(1, saving(tmp_path, [math.nan] * 5, keep=3), batch=[8])
    assert steps(tmp_path) == set()


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    in_runs(1, saving(tmp_path, [-1.0, -2.0, -3.0, -4.0, -5.0], keep=1), batch=[8])
    damaged = tmp_path / "step-00000099"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    in_runs(1, saving(tmp_path, [-0.5, -2.0, -3.0, -4.0, -5.0], keep=1), batch=[8])
    assert steps(tmp_path) == {1}


def test_a_folder_has_checkpoints_with_or_without_a_metric(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        train(run)
        run.save(tmp_path / "age", wait=True)
        run.save(tmp_path / "best", metric=1.0, wait=True)
        with pytest.raises(WorldError, match=r"has checkpoints that were saved without a metric, .* folder of its own"):
            run.save(tmp_path / "age", metric=1.0, wait=True)
        run.save(tmp_path / "other", wait=True)
        with pytest.raises(WorldError, match=r"has checkpoints that were saved with a metric, .* folder of its own"):
            run.save(tmp_path / "best", wait=True)
        with pytest.raises(WorldError, match=r'keeps checkpoints by best="max", and .* folder of its own'):
            run.save(tmp_path / "best", metric=1.0, best="min", wait=True)

    in_runs(2, on_rank, batch=[3, 5])


def test_a_metric_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        train(run)
        with pytest.raises(UserError, match=r"the metric is 0.0 on rank 0 and 1.0 on rank 1; give run.save the same"):
            run.save(tmp_path, metric=float(run.rank), wait=True)

    in_runs(2, on_rank, batch=[3, 5])
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        run.enable_preemption(lambda: False, tmp_path / "job")
        train(run)
        with pytest.raises(UserError, match='best is \'most\'; give "max" or "min"'):
            run.save(tmp_path, metric=1.0, best="most")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="metric is a str; give a number"):
            run.save(tmp_path, metric="good")  # type: ignore[arg-type]
        for folder in (None, tmp_path / "job"):
            with pytest.raises(UserError, match="where the newest checkpoints are kept; give it a folder of its own"):
                run.save(folder, metric=1.0)

    in_runs(1, on_rank, batch=[8])
