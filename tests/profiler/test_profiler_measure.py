"""Whole measurements on this machine's processor: curves that make sense, and nothing of the user's changed."""

import random
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from support.profile_targets import convolutions, mlp, subject
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.planner.profile import Profile
from mimatrix.profiler import (
    Limits,
    ProfileTarget,
    cache,
    cached_measure,
    give_back_at_once,
    measure_device,
    model_size,
)
from mimatrix.profiler.optimizer import optimizer_cost

ROOM = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_curves_of_a_network() -> None:
    told: list[float] = []
    measured = mlp(fingerprint="abc")
    profile = measure_device(measured, Limits(128, ROOM, seconds=15), told.append)
    assert (profile.device, profile.model, profile.room_bytes, profile.overflows) == ("cpu", "abc", ROOM, 0)
    assert 16 <= profile.seconds.most <= 128
    assert profile.seconds.most == profile.memory.most
    assert profile.seconds.at(profile.seconds.most) > 1.5 * profile.seconds.at(1) > 0
    assert profile.memory.at(1) >= 4 * 1024 * 1024  # the gradient of the largest parameter
    assert profile.optimizer_s > 0
    assert profile.handling_s[:2] == (0, 0)
    assert 0 < profile.handling_s[2] < profile.handling_s[3]
    assert 0 < profile.took_s < 60
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert Profile.from_json(profile.to_json()) == profile


def state(measured: ProfileTarget) -> list[Any]:
    """All that must be as before, as bytes."""
    tensors = [value.clone() for value in measured.model.state_dict().values()]
    modes = [module.training for module in measured.model.modules()]
    learns = [parameter.requires_grad for parameter in measured.model.parameters()]
    grads = [parameter.grad is None for parameter in measured.model.parameters()]
    hooks = [bool(parameter._post_accumulate_grad_hooks) for parameter in measured.model.parameters()]
    chance = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
    return [[each.numpy().tobytes() for each in tensors], modes, learns, grads, hooks, chance, measured.optimizer.state]


@pytest.mark.parametrize("trains", [True, False])
def test_nothing_is_changed(trains: bool) -> None:
    measured = convolutions()
    measured.model.train(trains)
    measured.model[1].eval()  # type: ignore[index]  # a frozen one among others
    measured.model[0].bias.requires_grad_(False)  # type: ignore[index]
    before = state(measured)
    numbers = iter(range(1_000_000))

    def fetch(samples: int) -> torch.Tensor:
        random.random(), np.random.rand(next(numbers) % 2)
        return torch.randn(samples, 3, 16, 16)

    shaken = ProfileTarget(measured.model, measured.optimizer, measured.loss, fetch, CPU)
    measure_device(shaken, Limits(8, ROOM, seconds=3))
    assert state(measured) == before


def test_the_running_statistics_did_move_meanwhile() -> None:
    measured, seen = convolutions(), []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(float(model[1].running_mean.abs().sum()))  # type: ignore[index]
        found: torch.Tensor = model(batch).square().mean()
        return found

    measure_device(
        ProfileTarget(measured.model, measured.optimizer, loss, measured.fetch, CPU), Limits(4, ROOM, seconds=3)
    )
    assert max(seen) > 0
    assert float(measured.model[1].running_mean.abs().sum()) == 0  # type: ignore[index]


def test_a_gradient_that_was_there_is_there() -> None:
    measured = mlp(64)
    first = next(iter(measured.model.parameters()))
    first.grad = torch.ones_like(first)
    measure_device(measured, Limits(2, ROOM, seconds=2))
    assert first.grad is not None
    assert bool((first.grad == 1).all())


def test_an_error_of_the_model_leaves_it_as_it_was() -> None:
    measured = convolutions()
    before = state(measured)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 2:
            raise RuntimeError("of the user's own")
        found: torch.Tensor = model(batch).square().mean()
        return found

    with pytest.raises(RuntimeError, match="user's own"):
        measure_device(ProfileTarget(measured.model, measured.optimizer, loss, measured.fetch, CPU), Limits(64, ROOM))
    assert state(measured) == before


def test_batch_norm_that_wants_two_samples() -> None:
    measured = subject(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (8,))
    profile = measure_device(measured, Limits(8, ROOM, seconds=3))
    assert profile.seconds.points[0][0] == 2
    assert profile.seconds.at(1) == profile.seconds.at(2)


def _measured_in(room: int) -> Profile:
    torch.set_num_threads(1)
    give_back_at_once()  # as the engine does where memory is limited: then readings tell what is held
    return measure_device(convolutions(side=32), Limits(4096, room, seconds=10))


def test_room_is_kept() -> None:
    # In a process of its own, as a rank is: the kernel counts what threads of other tests take meanwhile, too.
    room = 30_000_000
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as rank:
        profile = rank.submit(_measured_in, room).result(timeout=60)
    assert profile.memory.points[-1][1] < room
    assert 4 <= profile.memory.most < 200


def test_no_room_for_one_sample() -> None:
    with pytest.raises(UserError, match=r"cpu \(cpu\) lacks at least .* for one sample .*; give it more memory"):
        measure_device(mlp(), Limits(8, room_bytes=100_000, seconds=2))


def test_time_is_kept() -> None:
    def fetch(samples: int) -> torch.Tensor:
        return torch.randn(samples, 64)

    measured = mlp(2048)
    slow = ProfileTarget(measured.model, measured.optimizer, measured.loss, fetch, CPU)
    profile = measure_device(slow, Limits(1 << 20, ROOM * 8, seconds=2))
    assert profile.took_s < 30
    assert profile.seconds.most < 1 << 20


def test_autocast_is_around_forward_and_loss() -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch)
        seen.append(found.dtype)
        return found.float().square().mean()

    measured = mlp(64)
    for autocast, dtype in (
        (nullcontext, torch.float32),
        (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
    ):
        seen.clear()
        lower = ProfileTarget(measured.model, measured.optimizer, loss, measured.fetch, CPU, autocast)
        measure_device(lower, Limits(1, ROOM, seconds=1))
        assert set(seen) == {dtype}


class Odd(torch.optim.SGD):
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
        (lambda p: Odd(p, object()), 2),
    ],
)
def test_what_optimizers_keep(make: Any, states: int) -> None:
    model = nn.Sequential(nn.Embedding(3000, 2048), nn.Linear(2048, 16))
    optimizer = make(model.parameters())
    size = model_size(model, optimizer, 1 << 20)
    assert size.parameters == 3000 * 2048 + 2048 * 16 + 16
    assert size.parameter_bytes == size.gradient_bytes == 4 * size.parameters
    assert size.optimizer_bytes == pytest.approx(states * size.parameter_bytes, rel=1e-3)
    cost = optimizer_cost(optimizer, CPU)
    assert cost.state_bytes == pytest.approx(states * size.parameter_bytes, rel=1e-3)
    assert 1e-5 < cost.seconds < 10
    assert not optimizer.state


def test_groups_of_an_optimizer_keep_what_their_settings_say() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 50, bias=False))
    groups: list[dict[str, Any]] = [{"params": [model[0].weight], "momentum": 0.9}, {"params": [model[1].weight]}]
    assert model_size(model, torch.optim.SGD(groups, lr=0.1), 1).optimizer_bytes == 40_000
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight], "amsgrad": True}]
    assert model_size(model, torch.optim.AdamW(groups), 1).optimizer_bytes == 2 * 40_000 + 3 * 20_000


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[0].requires_grad_(False)
    size = model_size(model, torch.optim.Adam(model.parameters()), 1)
    assert (size.parameters, size.parameter_bytes, size.gradient_bytes, size.optimizer_bytes) == (110, 880, 440, 880)


def test_a_model_is_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_NOISY", 1e9)
    measured, limits = mlp(64, fingerprint="one"), Limits(2, ROOM, seconds=0.2)
    first = cached_measure(measured, limits)
    assert first.took_s > 0
    again = cached_measure(measured, limits)
    assert again.took_s == 0
    assert (again.seconds, again.memory) == (first.seconds, first.memory)
    assert cached_measure(measured, Limits(1, ROOM, seconds=0.2)).seconds.most == 1
    assert cached_measure(mlp(64, fingerprint="two"), limits).took_s > 0
    monkeypatch.setenv("MIMATRIX_SPEED", "0.5")
    assert cached_measure(measured, limits).took_s > 0
    files = sorted((tmp_path / "mimatrix" / "profiles").iterdir())
    assert len(files) == 4
    for file, damage in zip(files, ("", "{", '{"device": 3}', "[1]"), strict=True):
        file.write_text(damage)
    assert cached_measure(measured, limits).took_s > 0
    assert cached_measure(measured, limits).took_s == 0


def test_what_was_noisy_or_is_to_be_fresh_is_measured_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    measured, limits = mlp(64, fingerprint="one"), Limits(1, ROOM, seconds=0.2)
    monkeypatch.setattr(cache, "_NOISY", -1.0)
    assert cached_measure(measured, limits).took_s > 0
    monkeypatch.setattr(cache, "_NOISY", 1e9)
    assert cached_measure(measured, limits).took_s > 0
    assert cached_measure(measured, limits).took_s == 0
    monkeypatch.setenv("MIMATRIX_FRESH", "1")
    assert cached_measure(measured, limits).took_s > 0
