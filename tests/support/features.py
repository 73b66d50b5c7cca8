"""A short training with ranks as threads beside the same in a plain loop, for trying one feature after another."""

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
class Case:
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

    def made(self) -> tuple[nn.Module, Optimizer]:
        """Always the same; not on ranks, which are threads that share a random stream."""
        torch.manual_seed(3)
        model = self.model()
        return model, self.optimizer([each for each in model.parameters() if each.requires_grad])

    def batches(self) -> list[Any]:
        cut = [list(self.data[start : start + self.size]) for start in range(0, len(self.data), self.size)]
        if dict(self.loading).get("drop_last"):
            cut = [each for each in cut if len(each) == self.size]
        return [default_collate(each) for each in cut]


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    lr: list[float]


def in_one(case: Case) -> Ended:
    """The plain loop."""
    model, optimizer = case.made()
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    losses = []
    for _ in range(case.epochs):
        losses += plain_run(
            model, optimizer, case.batches(), case.loss, scheduler=scheduler, max_grad_norm=case.max_grad_norm
        )
    return Ended(model.state_dict(), losses, [float(group["lr"]) for group in optimizer.param_groups])


def on_ranks(case: Case, stage: int, cut: dict[str, Any], **settings: Any) -> list[Ended]:
    """The same on ranks."""
    made = [case.made() for _ in cut["batch"]]

    def each(run: Run) -> Ended:
        return looped(run, case, *made[run.rank])

    more = {"unit_bytes": UNIT_BYTES, "max_grad_norm": case.max_grad_norm, **cut, **settings}
    return in_runs(len(cut["batch"]), each, stage=stage, **more)


def looped(run: Run, case: Case, model: nn.Module, optimizer: Optimizer) -> Ended:
    """The user's loop."""
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
    return Ended(run.full_state_dict(model), [means["loss"] for _, means in run.history], lr)


def check(case: Case, stage: int, cut: dict[str, Any] = THREE, **settings: Any) -> None:
    """Ranks end as one process does."""
    expected = in_one(case)
    for found in on_ranks(case, stage, cut, **settings):
        same(found.state, expected.state, case.tolerance)
        assert found.losses == pytest.approx(expected.losses, abs=max(case.tolerance, 1e-10))
        assert found.lr == pytest.approx(expected.lr, rel=1e-12)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        say = partial("{}: {}".format, name)
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=say)
