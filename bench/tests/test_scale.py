"""The bench of a large state, with a small one: a server, its workers and ten dashboards for a moment."""

import time

import pytest

from bench.scale import measure, section
from bench.server.synthetic_history import WEEK_S, HistorySize, points, synthetic_jobs
from mimatrix.monitor.downsampling import TIERS


def test_a_week_leaves_in_every_tier_what_its_time_holds() -> None:
    size, now_s = HistorySize(jobs=40, devices=20), 2e9
    found = synthetic_jobs(size, now_s)
    assert [each.number for each in found] == list(range(1, 41))
    running = [each for each in found if each.started_s and each.ended_s is None]
    assert len(running) == size.running == 2
    assert len({device for each in running for device in each.devices}) == 16
    # A job or two, and the cluster, at all times.
    at_once = size.running + 1
    for number, tier in enumerate(TIERS):
        times = [at for at, of, _ in points(found, now_s) if of == number]
        assert now_s - min(times) <= min(tier.kept_s, WEEK_S)
        assert len(times) == pytest.approx(at_once * min(tier.kept_s, WEEK_S) / tier.every_s, rel=0.02)


@pytest.mark.long
def test_a_small_state_is_measured() -> None:
    began = time.monotonic()
    found = measure(HistorySize(jobs=40, devices=20), seconds=2.0, is_browsed=False)
    assert found["answers"]["all"]["count"] > 50
    assert found["reports"]["lost"] == 0
    assert found["database"]["points"] > 20_000
    assert "## A thousand jobs" in section(found)
    assert time.monotonic() - began < 60
