"""N uneven ranks give what one process gives on the union batch: every stage, any split, float64 to 1e-10."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
    cross_entropy,
    images,
    momentum,
    sentences,
    token_cross_entropy,
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
from mimatrix.planner.model.split import Split

STEPS = 5
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"adamw": adamw, "momentum": momentum}
UNIT_BYTES = 300
"""So small that every model here has several units."""


@dataclass(frozen=True)
class Partition:
    """How a global batch and the sharded states are split over the ranks."""

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
def partitions(draw: st.DrawFn) -> Partition:
    ranks = draw(st.integers(1, 4))
    batches = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any))
    micro = draw(st.lists(st.integers(1, 5), min_size=ranks, max_size=ranks))
    weights = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any))
    return Partition(tuple(batches), tuple(micro), tuple(weight / sum(weights) for weight in weights))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def global_batches(data: list[Any], size: int) -> list[Any]:
    """As the loader draws them without shuffling."""
    return [default_collate(data[start : start + size]) for start in range(0, len(data), size)]


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], loss: Any) -> dict[str, Any]:
    """Run the loop that a user would write, and return its state and losses."""
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, data, halving, loss=loss, shuffle=False)
    for _ in run.epochs(1):
        for batch in loader:
            value = loss(model, batch)
            weight = float((batch != 0).sum()) if loss is token_cross_entropy else None
            run.backward(value, weight=weight)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.log(loss=value)
    assert run.step == STEPS
    state = run.full_state_dict(model)
    return {"state": state, "losses": [means["loss"] for _, means in run.history]}


def check(
    kind: type[nn.Module], partition: Partition, stage: int, optimizer: str, data: list[Any], loss: Any, **more: Any
) -> None:
    reference = build(kind)
    stepper = OPTIMIZERS[optimizer](reference)
    batches = global_batches(data, sum(partition.batches))
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    if kind is Residual:
        plain_rounds(reference, stepper, batches, loss, Split.of(partition.batches, list(partition.micro)), scheduler)
        losses = None
    else:
        clip = more.get("max_grad_norm")
        losses = plain_run(reference, stepper, batches, loss, scheduler=scheduler, max_grad_norm=clip)
    models = [build(kind) for _ in partition.batches]
    optimizers = [OPTIMIZERS[optimizer](model) for model in models]

    def on_rank(run: Run) -> dict[str, Any]:
        return train(run, models[run.rank], optimizers[run.rank], data, loss)

    for result in in_runs(partition.ranks, on_rank, **partition.settings(stage, **more)):
        expected = reference.state_dict()
        assert result["state"].keys() == expected.keys()
        for name, value in result["state"].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=partial("{}: {}".format, name))
        if losses:
            assert result["losses"] == pytest.approx(losses, abs=1e-10)


BY_HAND = [
    Partition((3, 1), (2, 1), (0.7, 0.3)),
    Partition((4, 0), (2, 1), (0.0, 1.0)),
    Partition((1, 4, 2), (1, 4, 1), (0.7, 0.2, 0.1)),
    Partition((2, 0, 3, 1), (1, 1, 3, 1), (0.25, 0.5, 0.0, 0.25)),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("layout", ["aab", pytest.param("abab", marks=pytest.mark.long)])
def test_hosts_that_mix_windows_and_messages_are_exact(
    layout: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "mixed")
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    (partition,) = [each for each in BY_HAND if each.ranks == len(layout)]
    size = sum(partition.batches)
    check(Perceptron, partition, stage, "adamw", vectors(STEPS * size), cross_entropy, hosts=list(layout))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("partition", BY_HAND, ids=str)
def test_mlp_is_exact(partition: Partition, optimizer: str, stage: int) -> None:
    check(Perceptron, partition, stage, optimizer, vectors(STEPS * sum(partition.batches)), cross_entropy)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("partition", BY_HAND, ids=str)
def test_transformer_with_token_weights_and_clipping_is_exact(partition: Partition, stage: int) -> None:
    data = sentences(STEPS * sum(partition.batches))
    check(Transformer, partition, stage, "adamw", data, token_cross_entropy, max_grad_norm=0.5)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("partition", BY_HAND, ids=str)
def test_resnet_with_batch_norm_is_exact(partition: Partition, stage: int) -> None:
    check(Residual, partition, stage, "momentum", images(STEPS * sum(partition.batches)), cross_entropy)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(
    "partition", [*BY_HAND[:2], *(pytest.param(each, marks=pytest.mark.long) for each in BY_HAND[2:])], ids=str
)
def test_zero0_is_exact_with_and_without_shared_grads(
    partition: Partition, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 has two implementations; which one is used depends on CPU cores and sizes."""
    monkeypatch.setattr(stages, "can_share_grads", lambda *_: reads)
    count = STEPS * sum(partition.batches)
    check(Perceptron, partition, 0, "adamw", vectors(count), cross_entropy)
    check(Transformer, partition, 0, "momentum", sentences(count), token_cross_entropy, max_grad_norm=0.5)
    check(Residual, partition, 0, "adamw", images(count), cross_entropy)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("pages", [24, 28])
def test_an_arena_smaller_than_the_model_is_exact(pages: int, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "host", 128)
    data = sentences(STEPS * sum(BY_HAND[2].batches))
    check(Transformer, BY_HAND[2], stage, "adamw", data, token_cross_entropy, arena_bytes=pages * ALIGNMENT)


@pytest.mark.parametrize("stage", range(4))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    partition=partitions(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    model=st.sampled_from(["mlp", "tokens", "norm"]),
)
def test_any_partition_is_exact(stage: int, partition: Partition, optimizer: str, model: str) -> None:
    count = STEPS * sum(partition.batches)
    if model == "mlp":
        check(Perceptron, partition, stage, optimizer, vectors(count), cross_entropy)
    elif model == "tokens":
        check(Transformer, partition, stage, optimizer, sentences(count), token_cross_entropy, max_grad_norm=0.5)
    else:
        check(Residual, partition, stage, optimizer, images(count), cross_entropy)
