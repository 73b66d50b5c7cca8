"""Weighted means over all ranks: of what the user's loop logs, step by step, and of an evaluation."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.zero.strategy import ShardingStrategy

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 2.0
MetricFn = Callable[[nn.Module, Any], dict[str, Any]]
"""Metrics of a batch by name, each a mean over its samples."""


class WeightedMeans:
    """Sums of weighted metrics and of their weights, by name. Sums stay tensors, on their device, until asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add metrics that count by `weight`."""
        for name, value in values.items():
            number = value.detach() if isinstance(value, torch.Tensor) else float(value)
            self._add_sum(name, number * weight, weight)

    def add_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Add what `sums` of another rank gave."""
        for name, (total, weight) in sums.items():
            self._add_sum(name, total, weight)

    def sums(self) -> dict[str, list[float]]:
        """Return sums and weights as plain numbers, for the other ranks."""
        return {name: [float(total), weight] for name, (total, weight) in self._sums.items()}

    def means(self) -> dict[str, Any]:
        """Return the means by name."""
        return {name: total / weight if weight else total for name, (total, weight) in self._sums.items()}

    def _add_sum(self, name: str, total: Any, weight: float) -> None:
        kept = self._sums.setdefault(name, [0.0, 0.0])
        kept[0], kept[1] = kept[0] + total, kept[1] + weight


class MetricLog:
    """What was logged on this rank and is not merged with the others' yet, and what is."""

    def __init__(self, *, shows: bool) -> None:
        self._open: dict[int, WeightedMeans] = {}
        self._merged: list[tuple[int, dict[str, Any]]] = []
        self._shows, self._shown_s = shows, time.monotonic()
        self._step = 0
        self._weight: float | None = None
        """Weight of the current micro-batch, once it is known."""
        self._unweighted: list[Mapping[str, Any]] = []

    def begin_micro_step(self, step: int) -> None:
        """Begin a micro-batch of a step; its weight is not known yet."""
        self._step, self._weight = step, None

    def log(self, values: Mapping[str, Any]) -> None:
        """Add metrics of the current micro-batch."""
        if self._weight is None:
            self._unweighted.append(values)
        elif self._weight:  # a mean over nothing is NaN
            self._open.setdefault(self._step, WeightedMeans()).add(values, self._weight)

    def set_weight(self, weight: float) -> None:
        """Say how much the current micro-batch counts, what was logged before included."""
        self._weight = weight
        for values in self._unweighted:
            self.log(values)
        self._unweighted.clear()

    def end_micro_step(self, weight: float) -> None:
        """Count what was logged without a weight by `weight`: the loop did not call `run.backward`."""
        if self._weight is None and self._unweighted:
            self.set_weight(weight)

    def sums_before(self, step: int) -> dict[str, dict[str, list[float]]]:
        """Return this rank's sums by step, for the steps before `step`: metrics may be logged after a step ended."""
        return {str(number): means.sums() for number, means in self._open.items() if number < step}

    def merge(self, reports: Iterable[Mapping[str, Mapping[str, Sequence[float]]]]) -> None:
        """Merge what all ranks reported."""
        merged: dict[int, WeightedMeans] = {}
        for report in reports:
            for number, sums in report.items():
                merged.setdefault(int(number), WeightedMeans()).add_sums(sums)
        self._keep(merged)

    def merge_local(self, step: int) -> None:
        """Merge the steps before `step` where there is one rank; values may stay on a GPU until they are read."""
        self._keep({number: means for number, means in self._open.items() if number < step})

    def history(self, start: int = 0) -> list[tuple[int, dict[str, float]]]:
        """Return (step, means) from the `start`-th entry on; negative numbers count from the last."""
        return [(step, {name: float(value) for name, value in means.items()}) for step, means in self._merged[start:]]

    def _keep(self, merged: Mapping[int, WeightedMeans]) -> None:
        for step in sorted(merged):
            self._open.pop(step, None)
            self._merged.append((step, merged[step].means()))
        if self._shows and self._merged and time.monotonic() - self._shown_s > _LOG_EVERY_S:
            self._shown_s = time.monotonic()
            step, means = self._merged[-1]
            logger.info("step %d  %s", step + 1, "  ".join(f"{name} {float(mean):.4g}" for name, mean in means.items()))


def evaluate(
    model: nn.Module, source: MicroBatchSource, metric_fn: MetricFn, strategy: ShardingStrategy | None
) -> WeightedMeans:
    """Run `metric_fn` on this rank's part of a dataset; where forward passes are collective, with all ranks."""
    means = WeightedMeans()
    for micro, batch in source.epoch(0):
        passes = strategy.forward_passes() if strategy else 0
        if micro.num_micro_steps:
            metrics = metric_fn(model, batch)
            weight = float(metrics.get("weight", micro.num_samples))
            means.add({name: float(value) for name, value in metrics.items() if name != "weight"}, weight)
        if strategy and strategy.counts_forward_passes:
            _check_one_pass(strategy.forward_passes() - passes, has_data=micro.num_micro_steps > 0)
            if micro.is_last:
                for _ in range(micro.num_micro_steps, micro.max_micro_steps):
                    strategy.forward_without_data()
    return means


def _check_one_pass(passes: int, *, has_data: bool) -> None:
    if has_data and passes != 1:
        raise UserError(
            f"the metric function ran the model {passes} times for a batch, and in stage 3 all ranks run it together; "
            "run it once for each batch"
        )


def merge_means(sums_of_ranks: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the means over what all ranks found."""
    merged = WeightedMeans()
    for sums in sums_of_ranks:
        merged.add_sums(sums)
    for name, (_, weight) in merged.sums().items():
        if not weight:
            raise UserError(f"the weights of {name} sum to 0, so it has no mean; give at least one batch a weight")
    return merged.means()
