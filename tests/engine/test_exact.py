"""N uneven ranks give what one process gives on the union batch: every stage, any split, float64 to 1e-10."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import (
    Perceptron,
    Residual,
    Transformer,
    adamw,
    by_tokens,
    momentum,
    pictures,
    sentences,
    squared,
    vectors,
)
from support.plain import plain_rounds, plain_run
from support.runs import in_runs
from torch import nn
from torch.utils.data import default_collate

from mimatrix.comm.execution.staging import CHUNK_BYTES
from mimatrix.comm.memory.arena import ALIGNMENT
from mimatrix.engine.run import Run
from mimatrix.engine.zero import stages
from mimatrix.planner.split import Split

STEPS = 5
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"adamw": adamw, "momentum": momentum}
UNIT_BYTES = 300
"""So small that every model here has several units."""


@dataclass(frozen=True)
class Cut:
    """How a global batch and the states are cut."""

    batches: tuple[int, ...]
    micro: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.batches)

    def settings(self, stage: int, **more: Any) -> dict[str, Any]:
        return {
            "batch": list(self.batches),
            "micro_batch": list(self.micro),
            "stage": stage,
            "shares": list(self.shares),
            "unit_bytes": UNIT_BYTES,
            **more,
        }


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    ranks = draw(st.integers(1, 4))
    batches = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any))
    micro = draw(st.lists(st.integers(1, 5), min_size=ranks, max_size=ranks))
    weights = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any))
    return Cut(tuple(batches), tuple(micro), tuple(weight / sum(weights) for weight in weights))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def global_batches(data: list[Any], size: int) -> list[Any]:
    """As the loader draws them without shuffling."""
    return [default_collate(data[start : start + size]) for start in range(0, len(data), size)]


def trained(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], loss: Any) -> dict[str, Any]:
    """The user's loop; what it ends with."""
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, data, halving, loss=loss, shuffle=False)
    for _ in run.epochs(1):
        for batch in loader:
            found = loss(model, batch)
            weight = float((batch != 0).sum()) if loss is by_tokens else None
            run.backward(found, weight=weight)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.log(loss=found)
    assert run.step == STEPS
    state = run.full_state_dict(model)
    return {"state": state, "losses": [means["loss"] for _, means in run.history]}


def check(kind: type[nn.Module], cut: Cut, stage: int, optimizer: str, data: list[Any], loss: Any, **more: Any) -> None:
    reference = made(kind)
    stepper = OPTIMIZERS[optimizer](reference)
    batches = global_batches(data, sum(cut.batches))
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    if kind is Residual:
        plain_rounds(reference, stepper, batches, loss, Split.of(cut.batches, list(cut.micro)), scheduler)
        losses = None
    else:
        clip = more.get("max_grad_norm")
        losses = plain_run(reference, stepper, batches, loss, scheduler=scheduler, max_grad_norm=clip)
    models = [made(kind) for _ in cut.batches]
    optimizers = [OPTIMIZERS[optimizer](model) for model in models]

    def each(run: Run) -> dict[str, Any]:
        return trained(run, models[run.rank], optimizers[run.rank], data, loss)

    for found in in_runs(cut.ranks, each, **cut.settings(stage, **more)):
        expected = reference.state_dict()
        assert found["state"].keys() == expected.keys()
        for name, value in found["state"].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=partial("{}: {}".format, name))
        if losses:
            assert found["losses"] == pytest.approx(losses, abs=1e-10)


BY_HAND = [
    Cut((3, 1), (2, 1), (0.7, 0.3)),
    Cut((4, 0), (2, 1), (0.0, 1.0)),
    Cut((1, 4, 2), (1, 4, 1), (0.7, 0.2, 0.1)),
    Cut((2, 0, 3, 1), (1, 1, 3, 1), (0.25, 0.5, 0.0, 0.25)),
]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cut", BY_HAND, ids=str)
def test_perceptron(cut: Cut, optimizer: str, stage: int) -> None:
    check(Perceptron, cut, stage, optimizer, vectors(STEPS * sum(cut.batches)), squared)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cut", BY_HAND, ids=str)
def test_transformer_with_tokens_and_clipping(cut: Cut, stage: int) -> None:
    data = sentences(STEPS * sum(cut.batches))
    check(Transformer, cut, stage, "adamw", data, by_tokens, max_grad_norm=0.5)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cut", BY_HAND, ids=str)
def test_residual_with_batch_norm(cut: Cut, stage: int) -> None:
    check(Residual, cut, stage, "momentum", pictures(STEPS * sum(cut.batches)), squared)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("cut", BY_HAND, ids=str)
def test_zero0_with_and_without_shared_grads(cut: Cut, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 has two ways; which one is taken depends on processors and sizes."""
    monkeypatch.setattr(stages, "can_share_grads", lambda *_: reads)
    count = STEPS * sum(cut.batches)
    check(Perceptron, cut, 0, "adamw", vectors(count), squared)
    check(Transformer, cut, 0, "momentum", sentences(count), by_tokens, max_grad_norm=0.5)
    check(Residual, cut, 0, "adamw", pictures(count), squared)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("pages", [24, 28])
def test_an_arena_with_room_for_a_part_of_the_model(pages: int, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "host", 128)
    data = sentences(STEPS * sum(BY_HAND[2].batches))
    check(Transformer, BY_HAND[2], stage, "adamw", data, by_tokens, arena_bytes=pages * ALIGNMENT)


@pytest.mark.parametrize("stage", range(4))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=cuts(), optimizer=st.sampled_from(sorted(OPTIMIZERS)), model=st.sampled_from(["mlp", "tokens", "norm"]))
def test_any_cut(stage: int, cut: Cut, optimizer: str, model: str) -> None:
    count = STEPS * sum(cut.batches)
    if model == "mlp":
        check(Perceptron, cut, stage, optimizer, vectors(count), squared)
    elif model == "tokens":
        check(Transformer, cut, stage, optimizer, sentences(count), by_tokens, max_grad_norm=0.5)
    else:
        check(Residual, cut, stage, optimizer, pictures(count), squared)
