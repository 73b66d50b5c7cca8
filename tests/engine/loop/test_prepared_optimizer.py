"""The optimizer that `run.prepare` returns: torch's interface around the user's own, stepping when the loop says so."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.prepared_optimizer import OptimizerStepper, PreparedOptimizer


@pytest.fixture
def wrapped() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)


def prepare(optimizer: torch.optim.Optimizer) -> tuple[PreparedOptimizer, list[str]]:
    """Return a prepared optimizer, and the list to which its steps are added."""
    steps: list[str] = []
    return PreparedOptimizer(optimizer, lambda **_: steps.append("step")), steps


def test_it_is_a_torch_optimizer_with_the_wrapped_ones_state(wrapped: torch.optim.Optimizer) -> None:
    prepared, _ = prepare(wrapped)
    assert isinstance(prepared, torch.optim.Optimizer)
    assert prepared.optimizer is wrapped
    assert prepared.param_groups is wrapped.param_groups
    assert prepared.state is wrapped.state
    assert prepared.defaults is wrapped.defaults
    assert prepared.state_dict() == wrapped.state_dict()
    assert "SGD" in repr(prepared)


def test_other_attributes_are_the_wrapped_ones(wrapped: torch.optim.Optimizer) -> None:
    prepared, _ = prepare(wrapped)
    wrapped.note = "hello"  # type: ignore[attr-defined]
    assert prepared.note == "hello"
    with pytest.raises(AttributeError, match="missing"):
        _ = prepared.missing


def test_step_calls_the_loop_and_not_the_wrapped_optimizer(wrapped: torch.optim.Optimizer) -> None:
    prepared, steps = prepare(wrapped)
    before = [param.detach().clone() for param in wrapped.param_groups[0]["params"]]
    for param in wrapped.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    prepared.step()
    prepared.zero_grad()
    assert steps == ["step"]
    for param, value in zip(wrapped.param_groups[0]["params"], before, strict=True):
        assert torch.equal(param, value)
        assert param.grad is not None


def test_closures_and_new_param_groups_are_refused(wrapped: torch.optim.Optimizer) -> None:
    prepared, steps = prepare(wrapped)
    with pytest.raises(UserError, match="takes no closure"):
        prepared.step(lambda: 0.0)
    with pytest.raises(UserError, match=r"a param group was added after run.prepare"):
        prepared.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert steps == []
    assert len(prepared.param_groups) == 1


@pytest.mark.filterwarnings("error")
def test_lr_schedulers_can_be_built_on_it(wrapped: torch.optim.Optimizer) -> None:
    """Without the warning that the scheduler was stepped before the optimizer."""
    prepared, steps = prepare(wrapped)
    schedulers: list[Any] = [StepLR(prepared, 1, 0.5), CosineAnnealingLR(prepared, 10)]
    for scheduler in schedulers:
        prepared.step()
        scheduler.step()
    assert steps == ["step", "step"]
    assert wrapped.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(wrapped: torch.optim.Optimizer, copies: Callable[[Any], Any]) -> None:
    with pytest.raises(UserError, match=r"cannot be copied; use run.save"):
        copies(prepare(wrapped)[0])


def test_an_unfinished_instance_does_not_recurse() -> None:
    """As pickle and copy make it, before they restore its attributes."""
    with pytest.raises(AttributeError, match="optimizer"):
        _ = PreparedOptimizer.__new__(PreparedOptimizer).param_groups


def test_the_wrapped_optimizer_refuses_steps_of_the_user_until_closed(wrapped: torch.optim.Optimizer) -> None:
    stepper = OptimizerStepper.attach(wrapped)
    with pytest.raises(UserError, match=r"call it on the one that run.prepare returned"):
        wrapped.step()
    stepper.step_optimizer()
    stepper.close()
    wrapped.step()


def test_attributes_are_set_on_the_wrapped_optimizer(wrapped: torch.optim.Optimizer) -> None:
    prepared: Any = PreparedOptimizer(wrapped, lambda **_: None)
    prepared.note = "kept"
    assert wrapped.note == "kept"  # type: ignore[attr-defined]


def test_an_optimizer_belongs_to_one_run_at_a_time(wrapped: torch.optim.Optimizer) -> None:
    first = OptimizerStepper.attach(wrapped)
    with pytest.raises(UserError, match=r"belongs to another run; call close\(\) on that run first"):
        OptimizerStepper.attach(wrapped)
    first.close()
    OptimizerStepper.attach(wrapped).close()
