"""`plan="auto"`: measured where the loss was given, otherwise learned while training; the same on every rank."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.plain import plain_run
from support.runs import in_runs
from torch.utils.data import default_collate

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings

BATCH, STEPS = 12, 4

torch.manual_seed(3)
MODEL = Perceptron().double()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path / "cache"))


def train(run: Run, loss: Any) -> tuple[Run, dict[str, torch.Tensor]]:
    model = copy.deepcopy(MODEL)
    model, optimizer, loader = run.prepare(model, adamw(model), vectors(BATCH * STEPS), loss=loss, shuffle=False)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
    return run, {name: value.detach().clone() for name, value in run.full_state_dict(model).items()}


def expected() -> dict[str, torch.Tensor]:
    model, data = copy.deepcopy(MODEL), vectors(BATCH * STEPS)
    batches = [default_collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)]
    plain_run(model, adamw(model), batches, cross_entropy)
    return model.state_dict()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("has_loss", [True, False])
def test_auto_plan_measures_if_the_loss_is_given_and_learns_otherwise(ranks: int, has_loss: bool) -> None:
    results = in_runs(
        ranks, lambda run: train(run, cross_entropy if has_loss else None), global_batch=BATCH, plan="auto"
    )
    for run, state in results:
        assert (run.measurements is not None) == has_loss
        assert (run.plan is not None) == has_loss  # too few steps to have learned one
        assert run.settings.follows
        for name, value in expected().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_loss", [0, 1])
def test_auto_plan_refuses_a_loss_that_only_some_ranks_were_given(with_loss: int) -> None:
    sentence = rf"given a loss on rank {with_loss} and none on rank {1 - with_loss}; give loss=loss_fn on all ranks"
    errors: list[str] = []

    def on_rank(run: Run) -> None:
        with pytest.raises(UserError, match=sentence) as caught:
            train(run, cross_entropy if run.rank == with_loss else None)
        errors.append(str(caught.value))

    in_runs(2, on_rank, global_batch=BATCH, plan="auto")
    assert len(errors) == 2


@pytest.mark.long
def test_auto_plan_without_rebalancing_keeps_the_measured_one() -> None:
    def on_rank(run: Run) -> Run:
        return train(run, cross_entropy)[0]

    runs = in_runs(2, on_rank, global_batch=BATCH, plan="auto", rebalance=False)
    assert all(run.plan is not None and not run.settings.follows for run in runs)


def test_auto_plan_takes_a_micro_batch_as_a_stored_one_does_not() -> None:
    assert Settings(global_batch=BATCH, plan="auto", micro_batch=2, shares=[0.5, 0.5]).follows
    with pytest.raises(UserError, match="leave out either plan or batch"):
        Settings(plan="auto", batch=[6, 6])


def test_a_file_called_auto_is_still_a_file(tmp_path: Path) -> None:
    assert not Settings(global_batch=BATCH, plan=Path("auto")).follows
    with pytest.raises(UserError, match=r'cannot be read .*; use "auto", "profile", "online" or a file'):
        in_runs(1, lambda run: train(run, None), global_batch=BATCH, plan=os.fspath(tmp_path / "none"))
