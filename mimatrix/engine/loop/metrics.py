"""Figures that the user's loop logs: weighted means over all ranks, for whole steps only."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mimatrix.engine.rank_exchange import Message

Sums = dict[str, list[Any]]
_EVERY_S = 2.0


class MetricLog:
    """What was logged on this rank and not yet joined with the others', and what was."""

    def __init__(self, *, prints: bool) -> None:
        self._open: dict[int, Sums] = {}
        self._joined: list[tuple[int, dict[str, Any]]] = []
        self._prints, self._printed = prints, time.monotonic()

    def add(self, step: int, weight: float, values: Mapping[str, Any]) -> None:
        """Figures of one micro-batch of a step."""
        if not weight:
            return  # a mean over nothing is no number
        sums = self._open.setdefault(step, {})
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else float(value)
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + kept * weight, total[1] + weight

    def message(self, before: int) -> Message:
        """Sums of this rank for the steps before a number, for the others. A step's figures may come after it ended."""
        return {
            str(step): {name: [float(total), weight] for name, (total, weight) in sums.items()}
            for step, sums in self._open.items()
            if step < before
        }

    def join(self, messages: Iterable[Message]) -> None:
        """Means over what all ranks said, by step."""
        found: dict[int, Sums] = {}
        for message in messages:
            for step, sums in message.items():
                for name, (total, weight) in sums.items():
                    joined = found.setdefault(int(step), {}).setdefault(name, [0.0, 0.0])
                    joined[0], joined[1] = joined[0] + total, joined[1] + weight
        self._keep(found)

    def join_alone(self, before: int) -> None:
        """The same with nobody else: figures stay where they are, on a GPU perhaps, until somebody looks."""
        self._keep({step: sums for step, sums in self._open.items() if step < before})

    def history(self, start: int = 0) -> list[tuple[int, dict[str, float]]]:
        """(step, means) of the steps with figures, from the `start`-th on; below 0 counted from the last."""
        return [(step, {name: float(value) for name, value in means.items()}) for step, means in self._joined[start:]]

    def _keep(self, found: Mapping[int, Sums]) -> None:
        for step in sorted(found):
            self._open.pop(step, None)
            means = {name: total / weight if weight else total for name, (total, weight) in found[step].items()}
            self._joined.append((step, means))
        if self._prints and self._joined and time.monotonic() - self._printed > _EVERY_S:
            self._printed = time.monotonic()
            step, means = self._joined[-1]
            shown = "  ".join(f"{name} {float(value):.4g}" for name, value in means.items())
            sys.stderr.write(f"step {step + 1}  {shown}\n")
