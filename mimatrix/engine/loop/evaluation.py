"""Weighted means over a dataset, every sample once, on all ranks together."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.zero.zero3 import Zero3

Sums = dict[str, list[float]]
"""By name: the sum of weighted figures, and of their weights."""
MetricFn = Callable[[nn.Module, Any], dict[str, Any]]


def measured(model: nn.Module, feed: MicroBatchSource, measure: MetricFn, cut: Zero3 | None) -> Sums:
    """Sums and weights of this rank's part of a dataset."""
    sums: Sums = {}
    for micro, batch in feed.epoch(0):
        passes = cut.passes if cut else 0
        if micro.num_micro_steps:
            _add_measured(sums, measure(model, batch), micro.num_samples)
        if cut and micro.num_micro_steps and cut.passes != passes + 1:
            raise UserError(
                f"measure ran the model {cut.passes - passes} times for a batch, and in stage 3 all ranks run it "
                "together; run it once for each batch"
            )
        if cut and micro.is_last:
            for _ in range(micro.num_micro_steps, micro.max_micro_steps):
                cut.look_without_data()
    return sums


def _add_measured(sums: Sums, figures: dict[str, Any], samples: int) -> None:
    weight = float(figures.get("weight", samples))
    for name, value in figures.items():
        if name != "weight":
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + float(value) * weight, total[1] + weight


def joined(messages: Sequence[Sums]) -> dict[str, float]:
    """The means over what all ranks have found."""
    names = dict.fromkeys(name for message in messages for name in message)
    found = {name: [message[name] for message in messages if name in message] for name in names}
    return {name: sum(total for total, _ in each) / sum(weight for _, weight in each) for name, each in found.items()}


def length(dataset: Any, otherwise: int) -> int:
    """How many samples it has, if it says so."""
    try:
        return len(dataset)
    except TypeError:
        return otherwise
