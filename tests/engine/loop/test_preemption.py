"""Preemption: all ranks save and exit, wherever they are; the resumed run is as if it had not been interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.exit_codes import PREEMPTED
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(90)

WEIGHTS = Perceptron().double().state_dict()
DATA, EPOCHS = vectors(44), 3
"""6 global batches of 8 in an epoch, the last one smaller."""
BEFORE: list[tuple[int, dict[str, Any]]] = [
    (1, {"global_batch": 8}),
    (4, {"batch": [4, 1, 0, 3], "micro_batch": [2, 1, 1, 3], "shares": [0.4, 0.35, 0.25, 0.0], "stage": 3}),
    (3, {"batch": [0, 5, 3], "micro_batch": [1, 2, 3], "shares": [0.6, 0.0, 0.4], "stage": 2}),
]
AFTER: tuple[int, dict[str, Any]] = (2, {"batch": [3, 5], "micro_batch": [1, 5], "shares": [0.2, 0.8], "stage": 1})


class PreemptibleRank:
    """One rank of a run that may be preempted, and what it ended with."""

    def __init__(self, run: Run, folder: Path, preempt_at: int | None, by: int) -> None:
        self.code: int | None = None
        run.enable_preemption(lambda: run.rank == by and preempt_at is not None and run.step >= preempt_at, folder)
        model = Perceptron().double()
        # Ranks are threads here, and share one random generator.
        model.load_state_dict(WEIGHTS)
        adam = adamw(model)
        multi_step = torch.optim.lr_scheduler.MultiStepLR(adam, [3, 9, 12], 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, adam, DATA, multi_step, loss=cross_entropy)
        self.began = run.step
        self.phases = {run.status.phase}
        try:
            for _ in run.epochs(EPOCHS):
                for batch in loader:
                    loss = cross_entropy(model, batch)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    run.log(loss=loss)
                    self.phases.add(run.status.phase)
            self.state = run.full_state_dict(model)
        except SystemExit as stop:
            self.code = int(stop.code or 0)
        self.losses = dict(run.history)
        self.ended = run.step


def train(
    ranks: int, folder: Path, preempt_at: int | None = None, by: int = 0, **settings: Any
) -> list[PreemptibleRank]:
    return in_runs(ranks, lambda run: PreemptibleRank(run, folder, preempt_at, by), **settings)


@pytest.mark.parametrize(("ranks", "settings"), BEFORE, ids=["alone", "stage 3", "stage 2"])
@pytest.mark.parametrize("preempt_at", [1, 4, 7])
def test_a_preempted_run_resumes_as_if_not_interrupted(
    ranks: int, settings: dict[str, Any], preempt_at: int, tmp_path: Path
) -> None:
    (whole,) = train(1, tmp_path / "whole", global_batch=8)
    preempted = train(ranks, tmp_path / "saved", preempt_at, ranks - 1, **settings)
    assert [rank.code for rank in preempted] == [PREEMPTED] * ranks
    assert len({rank.ended for rank in preempted}) == 1
    assert all(rank.phases <= {"training", "saving"} for rank in preempted)
    resumed = train(AFTER[0], tmp_path / "saved", **AFTER[1])
    # The step after the one that was saved was thrown away.
    assert [rank.began for rank in resumed] == [preempted[0].ended - 1] * 2
    assert [rank.code for rank in resumed] == [None, None]
    for name, value in whole.state.items():
        assert torch.allclose(resumed[0].state[name], value, rtol=0, atol=1e-10), name
    losses = {**preempted[0].losses, **resumed[0].losses}
    assert losses.keys() == whole.losses.keys()
    for step, means in whole.losses.items():
        assert abs(losses[step]["loss"] - means["loss"]) < 1e-10


def test_without_a_request_nothing_is_saved(tmp_path: Path) -> None:
    (whole,) = train(1, tmp_path, global_batch=8)
    assert whole.code is None
    assert not list(tmp_path.iterdir())
    assert whole.phases == {"training"}


def test_a_request_after_the_last_batch_is_ignored(tmp_path: Path) -> None:
    """No global batch follows in which all ranks could agree: the run ends as usual."""
    (rank,) = train(1, tmp_path, preempt_at=17, global_batch=8)
    assert rank.code is None
    assert rank.ended == 18


def test_a_job_saves_to_the_folder_that_it_resumes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def on_rank(run: Run, folder: Path | None) -> int:
        if folder:
            run.enable_preemption(lambda: False, folder)
        model = Perceptron().double()
        _, optimizer, loader = run.prepare(model, adamw(model), DATA, loss=cross_entropy)
        resumed_at = run.step or (run.load() and run.step) or 0
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        run.save(wait=True)
        return int(resumed_at)

    for folder, where in ((tmp_path / "job-3", "job-3"), (None, "checkpoints")):
        steps = [in_runs(1, lambda run, f=folder: on_rank(run, f), global_batch=8)[0] for _ in range(2)]  # type: ignore[misc]
        assert steps == [0, 6]
        assert [path.name for path in sorted((tmp_path / where).iterdir())] == ["step-00000006", "step-00000012"]
