"""Measure one model on one device: time and memory against the micro-batch size, and what optimizer and stages cost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimatrix.core.errors import UserError
from mimatrix.core.units import format_bytes
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.profile import PerStage, Profile
from mimatrix.profiler.batch_search import BatchSizeSearch, ProbedBatch
from mimatrix.profiler.fingerprints import device_name
from mimatrix.profiler.memory import OutOfMemory, catch_oom, peak_bytes, retry_smaller
from mimatrix.profiler.memory_budget import available_bytes
from mimatrix.profiler.optimizer import TWIN_ELEMENTS, measure_optimizer, trainable_params
from mimatrix.profiler.timing import measure_time, synchronize
from mimatrix.profiler.trial import ProfileTarget, Trial, preserved_state

# A process that exceeds the limit of its control group is killed without an error to catch; a GPU raises one in time.
_CPU_FRACTION = 0.85
_REST = 0.15
"""Fraction of the time for the optimizer and the costs of stages."""
_GROWTH_EXTENSION = 2.0
"""Larger batches may take this many times the time limit on top, while they bring more throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a measurement may go."""

    max_samples: int
    """No rank needs a larger micro-batch: the global batch."""
    available_bytes: int | None = None
    """Memory for everything that this rank holds of the job, parameters included; None to use all that is free."""
    seconds: float = 20.0
    """About how long it may take."""
    device_sharers: int = 1
    """Ranks that share the memory of this device, this one included."""
    cgroup_sharers: int = 1
    """Ranks that share the limit of a control group, this one included."""


def measure_device(
    target: ProfileTarget, limits: Limits, on_progress: Callable[[float], None] = lambda _: None
) -> Profile:
    """Measure a model on this rank's device; nothing that belongs to the user is changed.

    Args:
        target: The model and how to run it.
        limits: How far to go.
        on_progress: Called with the fraction done, from 0 to 1.

    Raises:
        UserError: The device has not enough memory for one sample.
    """
    budget_bytes = memory_budget(target, limits)
    profile = catch_oom(lambda: _measure(target, limits, budget_bytes, on_progress), target.device)
    if isinstance(profile, OutOfMemory):  # even before the first sample
        raise _too_small(target.device, budget_bytes, profile.lacking_bytes)
    return profile


def _measure(target: ProfileTarget, limits: Limits, budget_bytes: int, on_progress: Callable[[float], None]) -> Profile:
    started, device = time.monotonic(), target.device
    with preserved_state(target.model, device):
        trial = Trial(target)
        with trial.capture_grads():
            search = _BatchProber(target, trial, limits, budget_bytes, on_progress).run(started)
        cost = retry_smaller(
            lambda elements: measure_optimizer(target.optimizer, device, elements), TWIN_ELEMENTS, device
        )
        handling_s = retry_smaller(lambda size: measure_handling(target, size), target.unit_bytes, device)
    on_progress(1.0)
    return Profile(
        device=device_name(device),
        model=target.fingerprint,
        seconds=Curve.of((point.samples, point.seconds) for point in search.points),
        # The optimizer steps after the micro-batches, so the larger of the two must fit.
        memory=Curve.of((point.samples, max(point.memory_bytes, cost.transient_bytes)) for point in search.points),
        room_bytes=budget_bytes,
        optimizer_s=cost.seconds,
        handling_s=handling_s,
        noise=search.noise,
        took_s=time.monotonic() - started,
        overflows=search.oom_count,
    )


def memory_budget(target: ProfileTarget, limits: Limits) -> int:
    """Return the bytes that this rank may hold of the job: what is free, and the parameters that exist already."""
    if limits.available_bytes is not None:
        return limits.available_bytes
    return available_bytes(target.device, limits.device_sharers, limits.cgroup_sharers) + _parameter_bytes(target)


def measure_handling(target: ProfileTarget, unit_bytes: int) -> PerStage:
    """Measure what each ZeRO stage adds to a micro-batch, apart from the one copy of gradients in every pass.

    Stage 2 adds its shard of each unit to the sums. Stage 3 also allocates each unit, in forward and in backward, and
    copies its shard there. A shard counts as a whole unit, since the shares of ranks are not known here.
    """
    device = target.device
    unit = torch.zeros(max(1, unit_bytes // 4), device=device)
    sums = torch.zeros_like(unit)
    add_s = measure_time(lambda: sums.add_(unit), device).seconds
    copy_s = measure_time(lambda: torch.empty_like(unit).copy_(unit), device).seconds
    grad_units = sum(param.nbytes for param in trainable_params(target.optimizer)) / unit.nbytes
    param_units = _parameter_bytes(target) / unit.nbytes
    return (0.0, 0.0, grad_units * add_s, grad_units * add_s + 2 * param_units * copy_s)


class _BatchProber:
    """Measures on the device what a `BatchSizeSearch` asks for."""

    def __init__(
        self,
        target: ProfileTarget,
        trial: Trial,
        limits: Limits,
        budget_bytes: int,
        on_progress: Callable[[float], None],
    ) -> None:
        self._target, self._trial, self._limits, self._on_progress = target, trial, limits, on_progress
        self._device = target.device
        self._budget_bytes = budget_bytes
        self._progress = 0.0

    def run(self, started: float) -> BatchSizeSearch:
        """Measure all sizes that the search asks for within the time limit."""
        min_samples = self._warm_up()
        held_bytes = _parameter_bytes(self._target) + self._trial.scratch_bytes
        left_bytes = (_CPU_FRACTION if self._device.type == "cpu" else 1.0) * (self._budget_bytes - held_bytes)
        search = BatchSizeSearch(
            max(min_samples, self._limits.max_samples),
            max(0.0, left_bytes),
            min_samples,
            may_oom=self._device.type != "cpu",
        )
        deadline = started + (1 - _REST) * self._limits.seconds
        growth_deadline = deadline + _GROWTH_EXTENSION * self._limits.seconds
        while (samples := search.next(deadline - time.monotonic(), growth_deadline - time.monotonic())) is not None:
            point = catch_oom(lambda samples=samples: self._probe(samples), self._device)  # type: ignore[misc]
            if isinstance(point, OutOfMemory):
                search.add_oom(samples)
                if not search.points:
                    raise _too_small(self._device, self._budget_bytes, point.lacking_bytes)
            else:
                search.add(point)
                self._check_smallest(search.points[0])
            self._report_progress(samples, 1 - (deadline - time.monotonic()) / max(self._limits.seconds, 1e-9))
        return search

    def _warm_up(self) -> int:
        """Run the smallest batch once, so that one-time allocations exist; return how many samples it has."""
        try:
            outcome = catch_oom(lambda: self._trial.run(1), self._device)
            samples = 1
        except ValueError as error:
            # Batch norm cannot train on one value; over all ranks it has more.
            if "more than 1 value per channel" not in str(error):
                raise
            outcome, samples = catch_oom(lambda: self._trial.run(2), self._device), 2
        if isinstance(outcome, OutOfMemory):
            raise _too_small(self._device, self._budget_bytes, outcome.lacking_bytes)
        return samples

    def _probe(self, samples: int) -> ProbedBatch:
        device = self._device
        if device.type != "cpu":
            # Libraries try several kernels the first time they see a size, and need memory for it.
            self._trial.run(samples)
        memory = peak_bytes(lambda: self._trial.run(samples), device)
        began = time.perf_counter()
        if device.type != "cpu":
            self._trial.run(samples)  # reading the peak emptied the allocator's cache, and filling it takes time
            synchronize(device)
        timing = measure_time(lambda: self._trial.run(samples), device, time.perf_counter() - began)
        return ProbedBatch(samples, timing.seconds, memory, timing.noise)

    def _check_smallest(self, smallest: ProbedBatch) -> None:
        """Refuse a device that cannot hold the activations of the smallest batch in any stage."""
        lacking_bytes = smallest.memory_bytes - self._budget_bytes
        if lacking_bytes > 0:
            raise _too_small(self._device, self._budget_bytes, int(lacking_bytes))

    def _report_progress(self, samples: int, time_spent: float) -> None:
        growth = math.log2(samples + 1) / math.log2(self._limits.max_samples + 2)
        self._progress = max(self._progress, min(1 - _REST, max(time_spent, (1 - _REST) * growth)))
        self._on_progress(self._progress)


def _too_small(device: torch.device, budget_bytes: int, lacking_bytes: int) -> UserError:
    lacks = f"at least {format_bytes(lacking_bytes)}" if lacking_bytes else "memory"
    return UserError(
        f"{device_name(device)} ({device}) lacks {lacks} for one sample in addition to the model, with "
        f"{format_bytes(budget_bytes)} in total; give it more memory, use a smaller model, or leave it out"
    )


def _parameter_bytes(target: ProfileTarget) -> int:
    return sum(param.nbytes for param in target.model.parameters())
