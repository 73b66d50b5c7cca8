"""Told to leave, all ranks save and end, wherever they are; what goes on from there is as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, squared, vectors
from support.runs import in_runs

from mimatrix.engine.loop.preemption import EXIT_PREEMPTED
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(90)

WEIGHTS = Perceptron().double().state_dict()
DATA, EPOCHS = vectors(44), 3
"""6 global batches of 8 in an epoch, the last one smaller."""
HERE: list[tuple[int, dict[str, Any]]] = [
    (1, {"global_batch": 8}),
    (4, {"batch": [4, 1, 0, 3], "micro_batch": [2, 1, 1, 3], "shares": [0.4, 0.35, 0.25, 0.0], "stage": 3}),
    (3, {"batch": [0, 5, 3], "micro_batch": [1, 2, 3], "shares": [0.6, 0.0, 0.4], "stage": 2}),
]
ELSEWHERE: tuple[int, dict[str, Any]] = (2, {"batch": [3, 5], "micro_batch": [1, 5], "shares": [0.2, 0.8], "stage": 1})


class Trained:
    """One rank's part of a run that may be told to leave: what it ended with."""

    def __init__(self, run: Run, folder: Path, asked_at: int | None, by: int) -> None:
        self.code: int | None = None
        run.enable_preemption(lambda: run.rank == by and asked_at is not None and run.step >= asked_at, folder)
        model = Perceptron().double()
        # Ranks are threads here, and share one chance.
        model.load_state_dict(WEIGHTS)
        made = adamw(model)
        slower = torch.optim.lr_scheduler.MultiStepLR(made, [3, 9, 12], 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, made, DATA, slower, loss=squared)
        self.began = run.step
        self.phases = {run.status.phase}
        try:
            for _ in run.epochs(EPOCHS):
                for batch in loader:
                    loss = squared(model, batch)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    run.log(loss=loss)
                    self.phases.add(run.status.phase)
            self.state = run.full_state_dict(model)
        except SystemExit as left:
            self.code = int(left.code or 0)
        self.losses = dict(run.history)
        self.ended = run.step


def trained(ranks: int, folder: Path, asked_at: int | None = None, by: int = 0, **settings: Any) -> list[Trained]:
    return in_runs(ranks, lambda run: Trained(run, folder, asked_at, by), **settings)


@pytest.mark.parametrize(("ranks", "settings"), HERE, ids=["alone", "stage 3", "stage 2"])
@pytest.mark.parametrize("asked_at", [1, 4, 7])
def test_goes_on_as_if_nothing_had_happened(
    ranks: int, settings: dict[str, Any], asked_at: int, tmp_path: Path
) -> None:
    (whole,) = trained(1, tmp_path / "whole", global_batch=8)
    left = trained(ranks, tmp_path / "left", asked_at, ranks - 1, **settings)
    assert [each.code for each in left] == [EXIT_PREEMPTED] * ranks
    assert len({each.ended for each in left}) == 1
    assert all(each.phases <= {"training", "saving"} for each in left)
    resumed = trained(ELSEWHERE[0], tmp_path / "left", **ELSEWHERE[1])
    # The step after the one that was saved was thrown away.
    assert [each.began for each in resumed] == [left[0].ended - 1] * 2
    assert [each.code for each in resumed] == [None, None]
    for name, value in whole.state.items():
        assert torch.allclose(resumed[0].state[name], value, rtol=0, atol=1e-10), name
    together = {**left[0].losses, **resumed[0].losses}
    assert together.keys() == whole.losses.keys()
    for step, means in whole.losses.items():
        assert abs(together[step]["loss"] - means["loss"]) < 1e-10


def test_nobody_asks(tmp_path: Path) -> None:
    (whole,) = trained(1, tmp_path, global_batch=8)
    assert whole.code is None
    assert not list(tmp_path.iterdir())
    assert whole.phases == {"training"}


def test_asked_when_all_is_nearly_done(tmp_path: Path) -> None:
    """No batch follows in which all could agree: it simply ends."""
    (found,) = trained(1, tmp_path, asked_at=17, global_batch=8)
    assert found.code is None
    assert found.ended == 18


def test_a_job_saves_where_it_will_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def each(run: Run, folder: Path | None) -> int:
        if folder:
            run.enable_preemption(lambda: False, folder)
        model = Perceptron().double()
        made = adamw(model)
        _, optimizer, loader = run.prepare(model, made, DATA, loss=squared)
        came_from = run.step or (run.load() and run.step) or 0
        for batch in loader:
            run.backward(squared(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        run.save(wait=True)
        return int(came_from)

    for folder, where in ((tmp_path / "job-3", "job-3"), (None, "checkpoints")):
        steps = [in_runs(1, lambda run, f=folder: each(run, f), global_batch=8)[0] for _ in range(2)]  # type: ignore[misc]
        assert steps == [0, 6]
        assert [path.name for path in sorted((tmp_path / where).iterdir())] == ["step-00000006", "step-00000012"]
