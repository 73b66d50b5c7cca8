"""How long something takes: the median of a few windows, each long enough to be believed."""

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
# Workers may be stopped and let go on in periods of up to 40 ms: shorter windows would see a part of one.
_HELD_BACK_WINDOW_S = 0.2
_WINDOWS, _MOST_WINDOWS = 3, 5
_NOISY = 0.05
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, and by how much they differ from window to window, as a part."""

    seconds: float
    noise: float


def timed(run: Callable[[], object], device: torch.device, expected_s: float = 0.0) -> Timing:
    """How long `run` takes on a device, which has run it before in about `expected_s`."""
    window_s, windows = window_for(device), []
    # A GPU gets as many as fill the window before anyone waits for it, as it does in training.
    at_once = max(1, math.ceil(window_s / expected_s)) if device.type != "cpu" and expected_s > 0 else 1
    while True:
        windows.append(_window(run, device, window_s, min(at_once, 1000)))
        middle = statistics.median(windows)
        noise = (max(windows) - min(windows)) / 2 / max(middle, 1e-12)
        wanted = 1 if middle > SLOW_S else _WINDOWS if noise <= _NOISY else _MOST_WINDOWS
        if len(windows) >= wanted:
            return Timing(middle, noise)


def window_for(device: torch.device) -> float:
    """How long a window must be here."""
    if device.type != "cpu":
        return _GPU_WINDOW_S
    return _HELD_BACK_WINDOW_S if environment.SPEED.get() or cpu_quota() else WINDOW_S


def synchronise(device: torch.device) -> None:
    """Until a device has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _window(run: Callable[[], object], device: torch.device, window_s: float, at_once: int) -> float:
    synchronise(device)
    started, runs = time.perf_counter(), 0
    while True:
        for _ in range(at_once):
            run()
        synchronise(device)
        runs += at_once
        took = time.perf_counter() - started
        if took >= window_s:
            return took / runs


def processor_share(seconds: float = 0.2) -> float:
    """How much of a processor this process gets while it wants a whole one: less where a quota or others hold it back.

    Ranks that share a machine should ask at the same time, as they work.
    """
    began, used = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - began) < seconds:
        pass
    return min(1.0, max(_LEAST_SHARE, (time.thread_time() - used) / passed))
