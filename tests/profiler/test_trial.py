"""Measuring changes nothing that belongs to the user: buffers, gradients, modes, hooks, RNG states."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.profile_targets import convolutions, mlp
from torch import nn

from mimatrix.profiler import (
    Limits,
    ProfileTarget,
    measure_device,
)

BUDGET = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state(target: ProfileTarget) -> list[Any]:
    """All that must be as before, as bytes."""
    tensors = [value.clone() for value in target.model.state_dict().values()]
    modes = [module.training for module in target.model.modules()]
    trainable = [parameter.requires_grad for parameter in target.model.parameters()]
    grads = [parameter.grad is None for parameter in target.model.parameters()]
    hooks = [bool(parameter._post_accumulate_grad_hooks) for parameter in target.model.parameters()]
    rng_states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    return [
        [each.numpy().tobytes() for each in tensors],
        modes,
        trainable,
        grads,
        hooks,
        rng_states,
        target.optimizer.state,
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_measuring_preserves_model_optimizer_and_rng_states(trains: bool) -> None:
    target = convolutions()
    target.model.train(trains)
    target.model[1].eval()  # type: ignore[index]  # a frozen one among others
    target.model[0].bias.requires_grad_(False)  # type: ignore[index]
    before = state(target)
    numbers = iter(range(1_000_000))

    def fetch(samples: int) -> torch.Tensor:
        random.random(), np.random.rand(next(numbers) % 2)
        return torch.randn(samples, 3, 16, 16)

    measure_device(replace(target, fetch=fetch), Limits(max_samples=8, available_bytes=BUDGET, seconds=3))
    assert state(target) == before


def test_running_statistics_change_while_measuring_and_are_restored() -> None:
    target, seen = convolutions(), []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(float(model[1].running_mean.abs().sum()))  # type: ignore[index]
        found: torch.Tensor = model(batch).square().mean()
        return found

    measure_device(replace(target, loss=loss), Limits(max_samples=4, available_bytes=BUDGET, seconds=3))
    assert max(seen) > 0
    assert float(target.model[1].running_mean.abs().sum()) == 0  # type: ignore[index]


def test_existing_gradients_are_restored() -> None:
    target = mlp(64)
    first = next(iter(target.model.parameters()))
    first.grad = torch.ones_like(first)
    measure_device(target, Limits(max_samples=2, available_bytes=BUDGET, seconds=2))
    assert first.grad is not None
    assert bool((first.grad == 1).all())


def test_an_exception_of_the_model_restores_its_state() -> None:
    target = convolutions()
    before = state(target)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 2:
            raise RuntimeError("of the user's own")
        found: torch.Tensor = model(batch).square().mean()
        return found

    with pytest.raises(RuntimeError, match="user's own"):
        measure_device(replace(target, loss=loss), Limits(max_samples=64, available_bytes=BUDGET))
    assert state(target) == before
