"""Whole measurements on this machine's CPU: curves make sense, and limits of memory and time hold."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from support.profile_targets import convolutions, mlp, profile_target
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.planner.model.profile import Profile
from mimatrix.profiler import (
    Limits,
    measure_device,
    return_freed_blocks,
)

BUDGET = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_measured_curves_of_an_mlp_make_sense() -> None:
    progress: list[float] = []
    target = mlp(fingerprint="abc")
    profile = measure_device(target, Limits(max_samples=128, available_bytes=BUDGET, seconds=15), progress.append)
    assert (profile.device, profile.model, profile.room_bytes, profile.overflows) == ("cpu", "abc", BUDGET, 0)
    assert 16 <= profile.seconds.most <= 128
    assert profile.seconds.most == profile.memory.most
    assert profile.seconds.at(profile.seconds.most) > 1.5 * profile.seconds.at(1) > 0
    assert profile.memory.at(1) >= 4 * 1024 * 1024  # the gradient of the largest parameter
    assert profile.optimizer_s > 0
    assert profile.handling_s[:2] == (0, 0)
    assert 0 < profile.handling_s[2] < profile.handling_s[3]
    assert 0 < profile.took_s < 60
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert Profile.from_json(profile.to_json()) == profile


def test_a_model_with_batch_norm_is_measured_from_two_samples_on() -> None:
    target = profile_target(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (8,))
    profile = measure_device(target, Limits(max_samples=8, available_bytes=BUDGET, seconds=3))
    assert profile.seconds.points[0][0] == 2
    assert profile.seconds.at(1) == profile.seconds.at(2)


def _measure_within(room: int) -> Profile:
    torch.set_num_threads(1)
    return_freed_blocks()  # as the engine does where memory is limited: then readings tell what is held
    return measure_device(convolutions(side=32), Limits(max_samples=4096, available_bytes=room, seconds=10))


@pytest.mark.long
def test_measuring_stays_within_the_memory_budget() -> None:
    # In a process of its own, as a rank is: the kernel counts what threads of other tests take meanwhile, too.
    room = 30_000_000
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as rank:
        profile = rank.submit(_measure_within, room).result(timeout=60)
    assert profile.memory.points[-1][1] < room
    assert 4 <= profile.memory.most < 200


def test_a_device_without_memory_for_one_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"cpu \(cpu\) lacks at least .* for one sample .*; give it more memory"):
        measure_device(mlp(), Limits(max_samples=8, available_bytes=100_000, seconds=2))


@pytest.mark.long
def test_measuring_stops_at_the_time_limit() -> None:
    def fetch(samples: int) -> torch.Tensor:
        return torch.randn(samples, 64)

    target = mlp(2048)
    profile = measure_device(
        replace(target, fetch=fetch), Limits(max_samples=1 << 20, available_bytes=BUDGET * 8, seconds=2)
    )
    assert profile.took_s < 30
    assert profile.seconds.most < 1 << 20


def test_autocast_is_around_forward_and_loss() -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch)
        seen.append(found.dtype)
        return found.float().square().mean()

    target = mlp(64)
    for autocast, dtype in (
        (nullcontext, torch.float32),
        (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
    ):
        seen.clear()
        measure_device(
            replace(target, loss=loss, autocast=autocast), Limits(max_samples=1, available_bytes=BUDGET, seconds=1)
        )
        assert set(seen) == {dtype}
