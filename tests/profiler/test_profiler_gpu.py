"""The profiler on a GPU: curves, memory that runs out for real, and nothing changed. Needs an NVIDIA GPU."""

import pytest
import torch
from support.profile_targets import convolutions, mlp

from mimatrix.profiler import Limits, available_bytes, cached_measure, measure_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def test_curves_on_a_gpu() -> None:
    target = convolutions(side=64, device="cuda:0")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    rng_state = torch.cuda.get_rng_state()
    profile = measure_device(target, Limits(max_samples=256, seconds=15))
    assert profile.device == torch.cuda.get_device_name()
    assert profile.overflows == 0
    assert profile.seconds.most == 256
    activation = 4 * 16 * 64 * 64
    assert 4 * activation < profile.memory.points[-1][1] / 256 < 14 * activation
    assert profile.optimizer_s > 0
    assert 0 < profile.handling_s[2] < profile.handling_s[3]
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), rng_state)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_available_bytes_of_a_gpu() -> None:
    free, _ = torch.cuda.mem_get_info()
    assert 0.8 * free < available_bytes(torch.device("cuda:0")) < free
    kept = torch.zeros(1 << 28, device="cuda")
    assert available_bytes(torch.device("cuda:0")) < 0.93 * (free - kept.numel())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        assert available_bytes(torch.device("cuda:0")) <= 0.02 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_on_a_gpu_is_caught() -> None:
    target = convolutions(side=128, device="cuda:0")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2e9 / total)
    try:
        profile = measure_device(target, Limits(max_samples=1 << 16, available_bytes=1 << 40, seconds=30))
        assert 1 <= profile.overflows <= 2
        assert 0.4e9 < profile.memory.points[-1][1] < 2e9
        guided = measure_device(target, Limits(max_samples=1 << 16, seconds=30))
        assert guided.overflows == 0
        assert guided.memory.points[-1][1] < 2e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_gpu_is_measured_once(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    target = mlp(fingerprint="gpu", device="cuda:0")
    assert cached_measure(target, Limits(max_samples=16, seconds=5)).took_s > 0
    assert cached_measure(target, Limits(max_samples=16, seconds=5)).took_s == 0
