"""A short training on ranks that are threads, compared with a plain loop in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from mimatrix.engine.run import Run
from support.plain import plain_run
from support.runs import in_runs

STEPS = 3
STAGES = range(4)
UNIT_BYTES = 300
ALONE: dict[str, Any] = {"batch": [5], "micro_batch": 2}
PAIR: dict[str, Any] = {"batch": [3, 2], "micro_batch": [1, 2], "shares": [0.7, 0.3]}
THREE: dict[str, Any] = {"batch": [1, 0, 4], "micro_batch": [1, 1, 2], "shares": [0.2, 0.8, 0.0]}
"""Uneven in every way: the second rank has no data and most of the states, the third no states."""

Optimizer = torch.optim.Optimizer
Parameters = list[nn.Parameter]


def adamw(params: Parameters) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6, weight_decay=0.1)


@dataclass(frozen=True)
class TrainingCase:
    """What is trained, and how."""

    model: Callable[[], nn.Module]
    data: Sequence[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[Parameters], Optimizer] = adamw
    scheduler: Callable[[Optimizer], Any] | None = None
    max_grad_norm: float | None = None
    weight: Callable[[Any], float] | None = None
    epochs: int = 1
    tolerance: float = 1e-10
    loading: tuple[tuple[str, Any], ...] = ()
    size: int = 5
    """Samples in a global batch."""

    def build(self) -> tuple[nn.Module, Optimizer]:
        """Return the same model and optimizer each time; not on ranks, which share a random generator."""
        torch.manual_seed(3)
        model = self.model()
        return model, self.optimizer([param for param in model.parameters() if param.requires_grad])

    def batches(self) -> list[Any]:
        batches = [list(self.data[start : start + self.size]) for start in range(0, len(self.data), self.size)]
        if dict(self.loading).get("drop_last"):
            batches = [batch for batch in batches if len(batch) == self.size]
        return [default_collate(batch) for batch in batches]


@dataclass(frozen=True)
class TrainResult:
    """The model, losses and learning rates at the end of a training."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    lr: list[float]


def train_alone(case: TrainingCase) -> TrainResult:
    """Train in a plain loop in one process."""
    model, optimizer = case.build()
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    losses = []
    for _ in range(case.epochs):
        losses += plain_run(
            model, optimizer, case.batches(), case.loss, scheduler=scheduler, max_grad_norm=case.max_grad_norm
        )
    return TrainResult(model.state_dict(), losses, [float(group["lr"]) for group in optimizer.param_groups])


def train_on_ranks(case: TrainingCase, stage: int, split: dict[str, Any], **settings: Any) -> list[TrainResult]:
    """Train on ranks, which are threads."""
    built = [case.build() for _ in split["batch"]]

    def on_rank(run: Run) -> TrainResult:
        return train_loop(run, case, *built[run.rank])

    more = {"unit_bytes": UNIT_BYTES, "max_grad_norm": case.max_grad_norm, **split, **settings}
    return in_runs(len(split["batch"]), on_rank, stage=stage, **more)


def train_loop(run: Run, case: TrainingCase, model: nn.Module, optimizer: Optimizer) -> TrainResult:
    """Run the loop that a user would write."""
    given: Any = (case.scheduler(optimizer),) if case.scheduler else ()
    prepared: Any = run.prepare(
        model, optimizer, case.data, *given, loss=case.loss, **{"shuffle": False, **dict(case.loading)}
    )
    _, optimizer, loader, *schedulers = prepared
    for _ in run.epochs(case.epochs):
        for batch in loader:
            loss = case.loss(model, batch)
            run.backward(loss, weight=case.weight(batch) if case.weight else None)
            optimizer.step()
            optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            run.log(loss=loss)
    lr = [float(group["lr"]) for group in optimizer.param_groups]
    return TrainResult(run.full_state_dict(model), [means["loss"] for _, means in run.history], lr)


def check(case: TrainingCase, stage: int, split: dict[str, Any] = THREE, **settings: Any) -> None:
    """Check that ranks end with what one process ends with."""
    expected = train_alone(case)
    for result in train_on_ranks(case, stage, split, **settings):
        assert_same(result.state, expected.state, case.tolerance)
        assert result.losses == pytest.approx(expected.losses, abs=max(case.tolerance, 1e-10))
        assert result.lr == pytest.approx(expected.lr, rel=1e-12)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        say = partial("{}: {}".format, name)
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=say)
