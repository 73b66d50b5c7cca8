"""What the user logs: weighted means over all ranks in the loop's body, step by step; outside it at once."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.metric_mailbox import MetricMailbox, SumsByStep

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 2.0
_HALF_BYTES = 2


class WeightedMeans:
    """Sums of weighted metrics and of their weights, by name. Sums stay tensors, on their device, until asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Any], weight: float) -> None:
        """Add metrics that count by `weight`."""
        for name, value in values.items():
            self._add_sum(name, _number(value) * weight, weight)

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
    """What was logged on this rank and is not merged with the others' yet, and what is.

    In the loop's body values are of a micro-batch, and wait for the next meeting of the ranks. Outside they
    are recorded at once, as this rank gave them.
    """

    def __init__(self, *, shows: bool, mailbox: MetricMailbox | None = None) -> None:
        self._open: dict[int, WeightedMeans] = {}
        self._recorded: list[tuple[int, dict[str, Any]]] = []
        self._mailbox = mailbox
        """None with one rank."""
        self._posted_step: int | None = None
        """Where the loop's body was left, if ranks have not met since."""
        self._lines = _LogLines() if shows else None
        self._step = 0
        self._in_body = False
        self._weight: float | None = None
        """Weight of the current micro-batch, once it is known."""
        self._unweighted: list[Mapping[str, Any]] = []

    def begin_micro_step(self, step: int) -> None:
        """Enter the loop's body with a micro-batch of a step; its weight is not known yet."""
        self._step, self._weight, self._in_body = step, None, True

    def leave_body(self, step: int) -> None:
        """Leave the loop's body after `step` steps: what is logged from now on is of no micro-batch."""
        if not self._in_body:
            return
        self._in_body = False
        self.end_micro_step(1.0)
        if self._mailbox:
            self._mailbox.post(step, self.sums_before(step))
            self._posted_step = step
        else:
            self.merge_local(step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add metrics of the current micro-batch; outside the loop's body record them at once, after `step` steps."""
        for name, value in values.items():
            check_number(f"run.log({name}=...) was given", value)
        if self._in_body:
            self._add(values)
        elif values:
            means = {name: to_float(value) for name, value in values.items()}
            self._recorded.append((step, means))
            if self._lines:
                self._lines.show_outside(step, means)

    def _add(self, values: Mapping[str, Any]) -> None:
        if self._weight is None:
            self._unweighted.append(values)
        elif self._weight:  # a mean over nothing is NaN
            self._open.setdefault(self._step, WeightedMeans()).add(values, self._weight)

    def log_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Add metrics of a whole step, which only one rank logs."""
        self._open.setdefault(step, WeightedMeans()).add(values, 1.0)

    def set_weight(self, weight: float) -> None:
        """Say how much the current micro-batch counts, what was logged before included."""
        self._weight = weight
        for values in self._unweighted:
            self._add(values)
        self._unweighted.clear()

    def end_micro_step(self, weight: float) -> None:
        """Count what was logged without a weight by `weight`: the loop did not call `run.backward`."""
        if self._weight is None and self._unweighted:
            self.set_weight(weight)

    def sums_before(self, step: int) -> SumsByStep:
        """Return this rank's sums by step, for the steps before `step`: metrics may be logged after a step ended."""
        return {str(number): means.sums() for number, means in self._open.items() if number < step}

    def sums_outside(self, step: int) -> SumsByStep:
        """Return `sums_before` if the loop's body was left; until then more may be logged for the last step."""
        return {} if self._in_body else self.sums_before(step)

    def merge(self, reports: Iterable[SumsByStep]) -> None:
        """Merge what all ranks reported."""
        merged: dict[int, WeightedMeans] = {}
        for report in reports:
            for number, sums in report.items():
                merged.setdefault(int(number), WeightedMeans()).add_sums(sums)
        self._posted_step = None
        self._record(merged)

    def merge_local(self, step: int) -> None:
        """Merge the steps before `step` where there is one rank; values may stay on a GPU until they are read."""
        self._record({number: means for number, means in self._open.items() if number < step})

    def finish(self, step: int) -> None:
        """Record after `step` steps what is not yet: the run ends, and ranks do not meet again."""
        self.leave_body(step)
        if self._mailbox is None:
            self.merge_local(self._step + 1)  # also of a step that does not end
        elif self._posted_step is not None:
            self.merge(self._mailbox.collect(self._posted_step, self.sums_before(step)))
        if self._lines:
            self._lines.finish()

    def history(self, start: int = 0) -> list[tuple[int, dict[str, float]]]:
        """Return (step, means) from the `start`-th entry on; negative numbers count from the last."""
        entries = self._recorded[start:]
        return [(step, {name: float(value) for name, value in means.items()}) for step, means in entries]

    def _record(self, merged: Mapping[int, WeightedMeans]) -> None:
        for step in sorted(merged):
            self._open.pop(step, None)
            self._recorded.append((step, merged[step].means()))
        if self._lines and merged:
            self._lines.show_step(*self._recorded[-1])


class _LogLines:
    """Log lines of the newest metrics, every few seconds; those from outside the loop's body are all shown."""

    def __init__(self) -> None:
        self._step_shown_s = time.monotonic()
        self._outside_shown_s = float("-inf")
        self._held: tuple[int, dict[str, float]] | None = None

    def show_step(self, step: int, means: Mapping[str, Any]) -> None:
        """Show the means of a step in the loop's body, the first of which is number 1 here."""
        now_s = time.monotonic()
        if now_s - self._step_shown_s > _LOG_EVERY_S:
            self.finish()
            self._step_shown_s = now_s
            _log_line(step + 1, means)

    def show_outside(self, step: int, means: Mapping[str, float]) -> None:
        """Show what was logged after `step` steps; together with what came shortly before for the same step."""
        now_s = time.monotonic()
        held_step, held = self._held or (step, {})
        if held_step != step:
            self.finish()
            held = {}
        self._held = step, {**held, **means}
        if now_s - self._outside_shown_s > _LOG_EVERY_S:
            self.finish()

    def finish(self) -> None:
        """Show what was held back."""
        if self._held:
            _log_line(*self._held)
            self._held, self._outside_shown_s = None, time.monotonic()


def _log_line(step: int, means: Mapping[str, Any]) -> None:
    logger.info("step %d  %s", step, "  ".join(f"{name} {float(mean):.4g}" for name, mean in means.items()))


def check_number(said: str, value: Any) -> None:
    """Refuse what is not a real number or a tensor with one element; NaN and infinities are numbers.

    `said` begins the sentence, e.g. "run.log(v=...) was given".
    """
    shape = getattr(value, "shape", ())
    if value is None:
        given = "None"
    elif isinstance(value, str):
        given = f"the string {value[:50]!r}"
    elif math.prod(shape) != 1:
        given = f"a {type(value).__name__} of shape {list(shape)}"
    elif isinstance(value, int) and not _is_real(value):
        given = "an integer that is too large for a float"
    elif not _is_real(value):
        given = f"a {type(value).__name__} that is not a real number"
    else:
        return
    raise UserError(f"{said} {given}; give a number or a tensor with one element")


def to_float(value: Any) -> float:
    """Return a number, or the only element of a tensor or an array."""
    return float(value.item() if hasattr(value, "item") else value)


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_complex()
    try:
        to_float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _number(value: Any) -> Any:
    """Return a value to be summed: a tensor stays on its device, in a type that sums of halves do not overflow."""
    if not isinstance(value, torch.Tensor):
        return to_float(value)
    number = value.detach().reshape(())
    return number.float() if number.element_size() <= _HALF_BYTES else number
