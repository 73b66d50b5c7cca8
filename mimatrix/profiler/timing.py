"""How long something takes: the median of a few windows, each long enough to be reliable."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimatrix.core import environment
from mimatrix.profiler.batch_search import SLOW_S, WINDOW_S
from mimatrix.profiler.cgroups import cpu_quota

_GPU_WINDOW_S = 0.02
# Slowed-down workers are stopped and continued in periods of up to 40 ms: a shorter window would see a part of one.
_THROTTLED_WINDOW_S = 0.2
_WINDOWS, _MAX_WINDOWS = 3, 5
_MAX_NOISE = 0.05
_MIN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, and how much they differ between windows, as a fraction."""

    seconds: float
    noise: float


def measure_time(run: Callable[[], object], device: torch.device, expected_s: float = 0.0) -> Timing:
    """Measure how long `run` takes on a device; the caller has run it before, in about `expected_s`."""
    window_s, windows = choose_window_s(device), []
    # A GPU gets enough runs to fill the window before it is synchronized, as in training.
    runs_at_once = max(1, math.ceil(window_s / expected_s)) if device.type != "cpu" and expected_s > 0 else 1
    while True:
        windows.append(_time_window(run, device, window_s, min(runs_at_once, 1000)))
        median = statistics.median(windows)
        noise = (max(windows) - min(windows)) / 2 / max(median, 1e-12)
        wanted = 1 if median > SLOW_S else _WINDOWS if noise <= _MAX_NOISE else _MAX_WINDOWS
        if len(windows) >= wanted:
            return Timing(median, noise)


def choose_window_s(device: torch.device) -> float:
    """Return how long a window must be on this device; longer if this process is slowed down."""
    if device.type != "cpu":
        return _GPU_WINDOW_S
    return _THROTTLED_WINDOW_S if environment.SPEED.get() or cpu_quota() else WINDOW_S


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _time_window(run: Callable[[], object], device: torch.device, window_s: float, runs_at_once: int) -> float:
    synchronize(device)
    started, runs = time.perf_counter(), 0
    while True:
        for _ in range(runs_at_once):
            run()
        synchronize(device)
        runs += runs_at_once
        elapsed = time.perf_counter() - started
        if elapsed >= window_s:
            return elapsed / runs


def measure_cpu_share(seconds: float = 0.2) -> float:
    """Measure which fraction of a CPU core this process gets while it keeps one busy.

    It is below 1 if a quota or other processes slow it down. Ranks that share a machine should call it at the same
    time, since they also compute at the same time.
    """
    started, cpu_started = time.perf_counter(), time.thread_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        pass
    return min(1.0, max(_MIN_SHARE, (time.thread_time() - cpu_started) / elapsed))
