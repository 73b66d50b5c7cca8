"""The pulse that slows without root: the share holds however late the switches come, and nobody stays stopped."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mimatrix.launch.throttle.signals import PERIOD_S, Pulse, pulse


def share(speed: float, late_s: float, seconds: float = 20.0) -> float:
    """Return the part of the time that a pulse lets run when every switch comes up to `late_s` late."""
    chance = random.Random(1)
    pulse, now_s, ran_s = Pulse(speed, 0.0), 0.0, 0.0
    while now_s < seconds:
        then_s = max(now_s, pulse.due_s) + chance.uniform(0, late_s)
        ran_s += (then_s - now_s) if pulse.runs else 0.0
        now_s = then_s
        pulse.switch(now_s)
    return ran_s / now_s


@pytest.mark.parametrize("speed", [0.01, 0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.02, 0.1])
def test_the_share_is_the_speed(speed: float, late_s: float) -> None:
    assert share(speed, late_s, 200.0) == pytest.approx(speed, rel=0.03, abs=0.002)


def test_periods_are_short_where_switches_come_in_time() -> None:
    pulse, now_s, stops = Pulse(0.5, 0.0), 0.0, 0
    while now_s < 1.0:
        now_s = pulse.due_s
        pulse.switch(now_s)
        stops += not pulse.runs
    assert stops == pytest.approx(1 / PERIOD_S, abs=2)


@pytest.mark.parametrize("switches", [1, 2])
def test_a_long_absence_is_forgiven(switches: int) -> None:
    pulse = Pulse(0.1, 0.0)
    for _ in range(switches):
        pulse.switch(pulse.due_s)
    pulse.switch(3600.0)
    pulse.switch(pulse.due_s)
    assert 3600.0 <= pulse.due_s < 3600.0 + 2 * PERIOD_S


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_group_runs_again_at_the_end() -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as sleeper:
        try:
            seen = set()
            with pulse([sleeper.pid], {0: 0.1}):
                deadline = time.monotonic() + 10
                while "T" not in seen and time.monotonic() < deadline:
                    seen.add(state(sleeper.pid))
                    time.sleep(0.003)
            assert "T" in seen
            assert state(sleeper.pid) != "T"
        finally:
            os.killpg(sleeper.pid, signal.SIGKILL)


def test_a_group_that_is_gone_is_left_alone() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as gone:
        gone.wait(timeout=10)
    began = time.monotonic()
    with pulse([gone.pid], {0: 0.5}):
        time.sleep(2 * PERIOD_S)
    assert time.monotonic() - began < 5
