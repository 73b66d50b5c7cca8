"""Batch norm over the samples of all ranks gives what one process gives, in every stage."""

import copy
from typing import Any

import pytest
import torch
from support.features import (
    STAGES,
    STEPS,
    TrainingCase,
    assert_same,
    check,
    train_alone,
    train_on_ranks,
)
from support.models import cross_entropy, vectors
from support.runs import in_runs
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimatrix.engine.run import Run

in_stages = pytest.mark.parametrize("stage", STAGES)


class Normed(nn.Module):
    """Batch norms of one and of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.flat, self.deep = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm3d(2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.flat(self.first(x)))
        y: torch.Tensor = self.last(self.deep(x.view(-1, 2, 2, 2, 1)).flatten(1))
        return y


WHOLE: dict[str, Any] = {"batch": [2, 0, 3], "shares": [0.2, 0.8, 0.0]}
"""One micro-step on each rank, so that the union of a micro-step is the global batch."""


@in_stages
def test_batch_norms_of_any_number_of_dimensions(stage: int) -> None:
    check(TrainingCase(lambda: Normed().double(), vectors(STEPS * 5), cross_entropy), stage, WHOLE)


@in_stages
def test_batch_norms_in_eval_mode_are_not_synchronised(stage: int) -> None:
    def frozen() -> nn.Module:
        model = Normed().double()
        model.flat.eval()
        model.deep.eval()
        return model

    check(TrainingCase(frozen, vectors(STEPS * 5), cross_entropy), stage)


def test_batch_norms_unsynchronised() -> None:
    case = TrainingCase(lambda: Normed().double(), vectors(STEPS * 5), cross_entropy)
    results = train_on_ranks(case, 1, {"batch": [2, 3]}, sync_batchnorm=False)
    weights = [{name: value for name, value in result.state.items() if "running" not in name} for result in results]
    assert_same(weights[0], weights[1], 0)
    assert not torch.equal(results[0].state["flat.running_mean"], results[1].state["flat.running_mean"])
    assert not torch.allclose(results[0].state["first.weight"], train_alone(case).state["first.weight"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph breaks
def test_checkpointed_and_compiled_batch_norms() -> None:
    class Again(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return y

    def compiled() -> nn.Module:
        model: nn.Module = torch.compile(Normed().double(), backend="eager")  # type: ignore[assignment]
        return model

    check(TrainingCase(lambda: Again().double(), vectors(STEPS * 5), cross_entropy), 3, WHOLE)
    check(TrainingCase(compiled, vectors(STEPS * 5), cross_entropy), 1, WHOLE)


def test_a_copy_of_a_model_with_batch_norm() -> None:
    """As for an average of weights. A bias before the norm would get no gradient."""

    def on_rank(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        _, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), vectors(15), loss=cross_entropy
        )
        clone = copy.deepcopy(model)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        for copied, param in zip(clone.parameters(), model.parameters(), strict=True):
            assert copied is not param
            assert not torch.equal(copied, param)

    in_runs(2, on_rank, stage=1, batch=[3, 2])
