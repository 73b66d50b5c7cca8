"""A scheduler has to be one of the prepared optimizer: another one would change no learning rate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.runs import in_runs
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LRScheduler, SequentialLR, StepLR

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

DATA = [torch.ones(2)] * 8
Make = Callable[[Any], Any]


def chained(optimizer: Any) -> ChainedScheduler:
    return ChainedScheduler([StepLR(optimizer, 1), ConstantLR(optimizer)])


def sequential(optimizer: Any) -> SequentialLR:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), ConstantLR(optimizer)], [2])


class OwnScheduler:
    """A scheduler of the user's own making, which does not say of which optimizer it is."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


def make_own(_: Any) -> Any:
    return OwnScheduler()


def prepare_with(make: Make, *, before: bool, other: bool) -> None:
    def on_rank(run: Run) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        if before:
            run.prepare(model, optimizer, DATA, make(stranger if other else optimizer))
            return
        _, prepared, _ = run.prepare(model, optimizer, DATA)
        for of in (stranger,) if other else (prepared, optimizer):
            run.prepare_scheduler(make(of))

    in_runs(1, on_rank, batch=[4])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("make", [lambda optimizer: StepLR(optimizer, 1), chained, sequential])
def test_scheduler_of_another_optimizer_is_refused(make: Callable[[Any], LRScheduler], before: bool) -> None:
    with pytest.raises(UserError, match=r"is a scheduler of another optimizer; make it of the one that is given to"):
        prepare_with(make, before=before, other=True)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("make", [lambda optimizer: StepLR(optimizer, 1), chained, sequential, make_own])
def test_scheduler_of_the_given_or_prepared_optimizer_is_accepted(make: Make, before: bool) -> None:
    prepare_with(make, before=before, other=False)
