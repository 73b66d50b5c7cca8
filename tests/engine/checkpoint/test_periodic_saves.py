"""A run saves by itself every few minutes or steps, in agreement of all ranks and beside what the script saves."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.loop.automatic_saves import PeriodicSaves
from mimatrix.engine.run import Run
from mimatrix.engine.save_interval import SaveInterval
from mimatrix.engine.settings import Settings

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parents[1] / "scripts" / "periodic.py"
SPLITS = [[8], [3, 5], [0, 8], [8, 0], [3, 0, 5]]
BATCHES = 5


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        (None, None),
        ("never", None),
        (90, SaveInterval(seconds=90.0)),
        ("15m", SaveInterval(seconds=900.0)),
        ("1h30m", SaveInterval(seconds=5400.0)),
        ("120", SaveInterval(seconds=120.0)),
        ("500 steps", SaveInterval(steps=500)),
        ("1 step", SaveInterval(steps=1)),
    ],
)
def test_an_interval_is_a_time_or_steps(given: Any, interval: SaveInterval | None) -> None:
    assert Settings(checkpoint_every=given).save_interval == interval


@pytest.mark.parametrize("given", [0, -1, True, "0 steps", "0s", "often", "5 epochs", "", float("nan"), float("inf")])
def test_other_intervals_are_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r'checkpoint_every is .*; give a time such as "15m"'):
        Settings(checkpoint_every=given)


@pytest.mark.parametrize("given", [0, -1, True, 1.5])
def test_training_stops_after_at_least_one_failed_save(given: Any) -> None:
    with pytest.raises(UserError, match=r"max_failed_saves is .*, at least 1"):
        Settings(max_failed_saves=given)


def test_a_time_is_measured_from_the_last_periodic_save() -> None:
    now = [100.0]
    saves = PeriodicSaves(SaveInterval(seconds=10.0), lambda: now[0])
    due = []
    for now[0] in (105.0, 110.0, 111.0):
        due.append(saves.is_due(1, is_busy=now[0] == 110.0))
    saves.restart()
    for now[0] in (120.0, 121.0):
        due.append(saves.is_due(2, is_busy=False))
    assert due == [False, False, True, False, True]


def test_steps_are_multiples_also_while_a_save_is_written() -> None:
    saves = PeriodicSaves(SaveInterval(steps=3), lambda: 0.0)
    assert [step for step in range(1, 10) if saves.is_due(step, is_busy=step == 6)] == [3, 6, 9]


def train(run: Run, each_step: Callable[[], None] = lambda: None, epochs: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Perceptron().double()
    model, optimizer, loader = run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
    for _ in run.epochs(epochs):
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if not run.in_batch:
                each_step()
    run.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def kinds(folder: Path) -> dict[int, bool]:
    """Return by step whether a checkpoint was saved automatically."""
    metadata = [storage.read_metadata(path) for path in storage.list_checkpoints(folder)]
    return {each["step"]: each["automatic"] for each in metadata}


@pytest.mark.parametrize("batch", SPLITS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_saves_by_itself(batch: list[int], stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def load(run: Run) -> int:
        model = Perceptron().double()
        run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
        assert run.load()
        return run.step

    in_runs(len(batch), train, batch=batch, stage=stage, checkpoint_every="2 steps")
    assert kinds(tmp_path / "checkpoints") == {4: True, 2: True}
    assert set(in_runs(2, load, batch=[4, 4])) == {4}


@pytest.mark.parametrize("batch", SPLITS)
def test_rank_0_decides_by_its_clock(batch: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_runs(len(batch), lambda run: train(run, epochs=3), batch=batch, checkpoint_every=1e-6)
    saved = kinds(tmp_path / "checkpoints")
    assert all(saved.values())
    assert 1 <= len(saved) <= 3


@pytest.mark.parametrize("stage", [0, 2])
def test_results_do_not_change_by_a_bit(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without = in_runs(2, lambda run: train(run, epochs=2), batch=[3, 5], stage=stage)[0]
    periodic = in_runs(2, lambda run: train(run, epochs=2), batch=[3, 5], stage=stage, checkpoint_every="1 step")[0]
    assert all(torch.equal(value, periodic[name]) for name, value in without.items())


@pytest.mark.parametrize("batch", SPLITS)
def test_periodic_saves_go_where_the_script_saves(batch: list[int], tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        def save() -> None:
            if run.step == 1:
                run.save(tmp_path / "own")
            if run.step == 2:
                run.save(tmp_path / "best", metric=1.0)

        train(run, save)

    in_runs(len(batch), on_rank, batch=batch, checkpoint_every="3 steps")
    assert kinds(tmp_path / "own") == {3: True, 1: False}
    assert kinds(tmp_path / "best") == {2: False}


def test_periodic_saves_go_where_the_script_loads_from_before_it_saves(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        model = Perceptron().double()
        model, optimizer, loader = run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
        assert not run.load(tmp_path / "own")
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        run.close()

    in_runs(2, on_rank, batch=[3, 5], checkpoint_every="4 steps")
    assert kinds(tmp_path / "own") == {4: True}


@pytest.mark.parametrize("batch", SPLITS)
def test_periodic_saves_remove_only_periodic_ones(batch: list[int], tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(tmp_path, keep=2) if run.step in (1, 2, 7) else None, epochs=2)

    in_runs(len(batch), on_rank, batch=batch, checkpoint_every="1 step")
    # The script's two newest, and of the periodic ones those among the two newest of all.
    assert kinds(tmp_path) == {10: True, 9: True, 7: False, 2: False}


def test_preemption_does_not_remove_what_the_script_has_saved(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        run.enable_preemption(lambda: run.step >= 4, tmp_path)
        with pytest.raises(SystemExit):
            train(run, lambda: run.save(tmp_path, keep=10), epochs=2)

    in_runs(2, on_rank, batch=[3, 5])
    assert set(kinds(tmp_path)) >= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("batch", SPLITS)
def test_a_save_of_the_script_replaces_a_periodic_one_of_the_same_step(batch: list[int], tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        model = Perceptron().double()
        model, optimizer, loader = run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
        run.load(tmp_path)
        for _ in run.epochs(2):
            for each in loader:
                run.backward(cross_entropy(model, each))
                optimizer.step()
            run.save(tmp_path)
        run.close()

    in_runs(len(batch), on_rank, batch=batch, checkpoint_every="5 steps")
    assert kinds(tmp_path) == {10: False, 5: False}


def test_the_newest_checkpoint_stays_when_the_clock_was_ahead(tmp_path: Path) -> None:
    in_runs(1, lambda run: train(run, lambda: run.save(tmp_path, keep=1)), batch=[8])
    (old,) = storage.list_checkpoints(tmp_path)
    metadata = json.loads((old / "run.json").read_text())
    metadata["saved_at"] += 1e9
    (old / "run.json").write_text(json.dumps(metadata))

    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(tmp_path, keep=1) if run.step == 3 else None)

    in_runs(1, on_rank, batch=[8])
    assert kinds(tmp_path) == {3: False}


@pytest.mark.parametrize("batch", SPLITS)
def test_a_registered_state_is_saved_as_it_is_then(batch: list[int], tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        model = Perceptron().double()
        model, optimizer, loader = run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
        seen: list[int] = []
        run.register_user_state(lambda: {"steps": seen[-1]})
        run.load(tmp_path)
        for each in loader:
            run.backward(cross_entropy(model, each))
            optimizer.step()
            seen.append(run.step)
        run.close()

    def load(run: Run) -> Any:
        model = Perceptron().double()
        run.prepare(model, adamw(model), vectors(8 * BATCHES), loss=cross_entropy)
        run.load(tmp_path)
        return run.step, run.user_state

    in_runs(len(batch), on_rank, batch=batch, checkpoint_every="2 steps")
    assert in_runs(1, load, batch=[8]) == [(4, {"steps": 4})]


def test_without_a_registered_state_the_last_one_that_was_given_is_saved(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        def save() -> None:
            if run.step == 1:
                run.save(tmp_path, user_state={"saved at": run.step})

        train(run, save)
        assert run.user_state == {"saved at": 1}

    in_runs(2, on_rank, batch=[3, 5], checkpoint_every="4 steps")
    assert kinds(tmp_path) == {4: True, 1: False}


def test_a_state_that_is_not_plain_data_is_refused_with_its_name(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        model = Perceptron().double()
        run.prepare(model, adamw(model), vectors(8), loss=cross_entropy)
        run.register_user_state(lambda: {"file": sys.stdout})
        with pytest.raises(UserError, match=r"user_state\['file'\] is a .*, which a checkpoint cannot hold"):
            run.save(tmp_path)

    in_runs(1, on_rank, batch=[8])


def run_script(folder: Path, every: str, *more: str) -> tuple[dict[int, float], float]:
    """Return the losses of the attempt that finished, by step, and the sum that the script keeps."""
    folder.mkdir()
    words = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", "2", "--max-restarts", "1", str(SCRIPT)]
    words += [str(folder), every, *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, total = json.loads((folder / f"losses-{len(more)}.json").read_text())
    return {int(step): loss for step, loss in losses.items()}, total


def test_a_run_that_is_killed_resumes_from_the_last_periodic_save(tmp_path: Path) -> None:
    whole, total = run_script(tmp_path / "whole", "never")
    assert not (tmp_path / "whole" / "checkpoints").exists()
    resumed, resumed_total = run_script(tmp_path / "lost", "5 steps", "lose")
    assert sorted(whole) == list(range(20))
    # The checkpoint of step 10 is written while training continues, three steps before the worker is lost.
    assert min(resumed) in (5, 10)
    assert max(resumed) == 19
    assert list(resumed.values()) == pytest.approx([whole[step] for step in resumed], abs=1e-10)
    assert resumed_total == pytest.approx(total, abs=1e-10)
