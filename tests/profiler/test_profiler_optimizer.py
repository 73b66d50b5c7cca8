"""What optimizers cost and keep, found without a step of the user's own."""

from typing import Any

import pytest
import torch
from torch import nn

from mimatrix.profiler import (
    model_size,
)
from mimatrix.profiler.optimizer import measure_optimizer

BUDGET = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class OddSGD(torch.optim.SGD):
    """Takes something that its defaults do not tell."""

    def __init__(self, parameters: Any, secret: object) -> None:
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.SGD([{"params": list(p), "momentum": 0.9}], lr=0.1), 1),
        (lambda p: torch.optim.LBFGS(p), 2),
        (lambda p: OddSGD(p, object()), 2),
    ],
)
def test_state_of_optimizers_is_estimated_without_a_step(make: Any, states: int) -> None:
    model = nn.Sequential(nn.Embedding(3000, 2048), nn.Linear(2048, 16))
    optimizer = make(model.parameters())
    size = model_size(model, optimizer, 1 << 20)
    assert size.parameters == 3000 * 2048 + 2048 * 16 + 16
    assert size.parameter_bytes == size.gradient_bytes == 4 * size.parameters
    assert size.optimizer_bytes == pytest.approx(states * size.parameter_bytes, rel=1e-3)
    cost = measure_optimizer(optimizer, CPU)
    assert cost.state_bytes == pytest.approx(states * size.parameter_bytes, rel=1e-3)
    assert 1e-5 < cost.seconds < 10
    assert not optimizer.state


def test_param_groups_of_an_optimizer_count_by_their_own_settings() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 50, bias=False))
    groups: list[dict[str, Any]] = [{"params": [model[0].weight], "momentum": 0.9}, {"params": [model[1].weight]}]
    assert model_size(model, torch.optim.SGD(groups, lr=0.1), 1).optimizer_bytes == 40_000
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "amsgrad": True}]
    assert model_size(model, torch.optim.AdamW(groups), 1).optimizer_bytes == 2 * 40_000 + 3 * 20_000


def test_frozen_parameters_need_no_gradient_and_no_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[0].requires_grad_(False)
    size = model_size(model, torch.optim.Adam(model.parameters()), 1)
    assert (size.parameters, size.parameter_bytes, size.gradient_bytes, size.optimizer_bytes) == (110, 880, 440, 880)
