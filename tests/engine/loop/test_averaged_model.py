"""Averages that are not ours: right for a prepared model, or refused with a sentence; other models are left alone."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, THREE, assert_same
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)

DECAY, SIZE, STEPS = 0.9, 5, 4
DATA = vectors(SIZE * STEPS)
WEIGHTS = Perceptron().double().state_dict()
ONE_MICRO_BATCH: dict[str, Any] = {"batch": [5]}


def build() -> tuple[nn.Module, torch.optim.Optimizer, AveragedModel]:
    model = Perceptron().double()
    model.load_state_dict(WEIGHTS)
    average = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
    return model, adamw(model), AveragedModel(model, multi_avg_fn=average)


def plain_average() -> dict[str, torch.Tensor]:
    model, optimizer, ema = build()
    for start in range(0, len(DATA), SIZE):
        optimizer.zero_grad()
        cross_entropy(model, default_collate(DATA[start : start + SIZE])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ema.update_parameters(model)
    return ema.module.state_dict()


def train(run: Run, *, update_first: bool = False) -> AveragedModel:
    """Train as a plain loop does: the average is updated in the body of the loop."""
    model, optimizer, ema = build()
    _, optimizer, loader = run.prepare(model, optimizer, DATA, shuffle=False)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        if update_first:
            ema.update_parameters(model)
        optimizer.step()
        ema.update_parameters(model)
    return ema


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
def test_averaged_model_in_the_loop_is_updated_once_in_a_global_batch(split: dict[str, Any], stage: int) -> None:
    expected = plain_average()

    def on_rank(run: Run) -> None:
        ema = train(run)
        assert int(ema.n_averaged) == STEPS
        assert_same(ema.module.state_dict(), expected, 1e-10)

    in_runs(len(split["batch"]), on_rank, stage=stage, **split)


@pytest.mark.parametrize("split", [ALONE, PAIR, THREE], ids=["alone", "pair", "three"])
def test_averaged_model_is_refused_in_stage_3(split: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"reads parameters that stage 3 has sharded over the ranks; use run\.ema"):
        in_runs(len(split["batch"]), train, stage=3, **split)


def test_averaged_model_is_refused_where_a_rank_without_data_would_miss_it() -> None:
    def on_rank(run: Run) -> None:
        with pytest.raises(UserError, match=r"rank 1 has no data in this batch and does not come to .*run\.ema"):
            train(run)

    in_runs(3, on_rank, stage=1, **THREE)


@pytest.mark.parametrize("split", [ONE_MICRO_BATCH, PAIR], ids=["alone", "pair"])
def test_averaged_model_before_the_step_is_refused(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> None:
        with pytest.raises(UserError, match=r"came before optimizer\.step; call optimizer\.step\(\) first"):
            train(run, update_first=True)

    in_runs(len(split["batch"]), on_rank, stage=0, **split)


def test_averages_of_other_models_are_left_alone() -> None:
    def on_rank(run: Run) -> None:
        model, optimizer, _ = build()
        other, _, ema = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        for number, batch in enumerate(loader):
            run.backward(cross_entropy(model, batch))
            ema.update_parameters(other)
            assert int(ema.n_averaged) == number + 1
            optimizer.step()

    in_runs(1, on_rank, **ALONE)


def test_helpers_that_read_the_state_dict_inside_a_global_batch_are_refused() -> None:
    def on_rank(run: Run) -> None:
        model, optimizer, _ = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        for batch in loader:
            model.state_dict()
            run.backward(cross_entropy(model, batch))
            with pytest.raises(UserError, match=r"use run\.ema for an average, or call it when `not run\.in_batch`"):
                model.state_dict()
            copy.deepcopy(model).state_dict()
            optimizer.step()
            if not run.in_batch:
                model.state_dict()
        pickle.loads(pickle.dumps(model)).state_dict()

    in_runs(1, on_rank, **ALONE)


def test_guarded_models_are_freed() -> None:
    def on_rank(run: Run) -> "weakref.ref[nn.Module]":
        model, optimizer, ema = build()
        run.prepare(model, optimizer, DATA)
        ema.update_parameters(model)
        run.close()
        return weakref.ref(model)

    (model,) = in_runs(1, on_rank, **ALONE)
    gc.collect()
    assert model() is None
