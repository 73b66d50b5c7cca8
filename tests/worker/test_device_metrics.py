"""Metrics of devices and links: sampled less and less often."""

import pytest

from mimatrix.worker import device_metrics


def test_a_throttled_sampler_samples_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, samples = 0.0, []
    monkeypatch.setattr("mimatrix.worker.device_metrics.time.monotonic", lambda: now_s)
    sample = device_metrics.throttled(lambda: samples.append(now_s) or len(samples))  # type: ignore[func-returns-value]
    for second in range(30):
        now_s = float(second)
        assert sample() == len(samples)
    assert samples == [0, 1, 2, 4, 8, 13, 18, 23, 28]
