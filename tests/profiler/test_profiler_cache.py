"""Stored profiles: measured once, and again if conditions differ or a file is damaged."""

from typing import Any

import pytest
import torch
from support.profile_targets import mlp

from mimatrix.profiler import (
    Limits,
    cache,
    cached_measure,
)

BUDGET = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_model_is_measured_once_and_then_read_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_MAX_NOISE", 1e9)
    target, limits = mlp(64, fingerprint="one"), Limits(max_samples=2, available_bytes=BUDGET, seconds=0.2)
    first = cached_measure(target, limits)
    assert first.took_s > 0
    again = cached_measure(target, limits)
    assert again.took_s == 0
    assert (again.seconds, again.memory) == (first.seconds, first.memory)
    assert cached_measure(target, Limits(max_samples=1, available_bytes=BUDGET, seconds=0.2)).seconds.most == 1
    assert cached_measure(mlp(64, fingerprint="two"), limits).took_s > 0
    monkeypatch.setenv("MIMATRIX_SPEED", "0.5")
    assert cached_measure(target, limits).took_s > 0
    files = sorted((tmp_path / "mimatrix" / "profiles").iterdir())
    assert len(files) == 4
    for file, damage in zip(files, ("", "{", '{"device": 3}', "[1]"), strict=True):
        file.write_text(damage)
    assert cached_measure(target, limits).took_s > 0
    assert cached_measure(target, limits).took_s == 0


def test_noisy_profiles_are_not_stored_nor_fresh_ones_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    target, limits = mlp(64, fingerprint="one"), Limits(max_samples=1, available_bytes=BUDGET, seconds=0.2)
    monkeypatch.setattr(cache, "_MAX_NOISE", -1.0)
    assert cached_measure(target, limits).took_s > 0
    monkeypatch.setattr(cache, "_MAX_NOISE", 1e9)
    assert cached_measure(target, limits).took_s > 0
    assert cached_measure(target, limits).took_s == 0
    monkeypatch.setenv("MIMATRIX_FRESH", "1")
    assert cached_measure(target, limits).took_s > 0
