"""How much memory a rank may use: settings, sharers, limits of MPS."""

import pytest
import torch

from mimatrix.core.errors import UserError
from mimatrix.profiler import available_bytes
from mimatrix.profiler.memory import resident_bytes
from mimatrix.profiler.memory_budget import mps_limit_bytes

CPU = torch.device("cpu")


def test_available_bytes_follow_the_setting_and_the_sharers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIMATRIX_MEMORY", raising=False)
    alone = available_bytes(CPU)
    assert 0 < available_bytes(CPU, device_sharers=4) <= alone / 3
    monkeypatch.setenv("MIMATRIX_MEMORY", str(resident_bytes() + 1_000_000_000))
    # Other tests of the process may give back some megabytes meanwhile.
    assert available_bytes(CPU) == pytest.approx(900_000_000, rel=0.2)
    monkeypatch.setenv("MIMATRIX_MEMORY", "1MB")
    assert available_bytes(CPU) == 0
    monkeypatch.setenv("MIMATRIX_MEMORY", "much")
    with pytest.raises(UserError, match="MIMATRIX_MEMORY"):
        available_bytes(CPU)


def test_limits_of_mps_are_read_per_gpu() -> None:
    name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    assert mps_limit_bytes(0, {name: "0=16G"}) == 16 << 30
    assert mps_limit_bytes(1, {name: "0=16G,1=800MB"}) == 800 << 20
    assert mps_limit_bytes(1, {name: "0=16G"}) is None
    assert mps_limit_bytes(0, {}) is None
