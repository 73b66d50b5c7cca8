"""Optimizer settings that a user's loop changes by hand, such as learning rates, and how ranks agree on them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.batch_report import BatchReport

Hyperparams = dict[str, Any]
"""By `group/name`."""


class HyperparamSync:
    """The settings of an optimizer's param groups, such as learning rates, kept the same on all ranks.

    A loop may set them by hand, before a step and after it. A rank without data takes over what was set after the last
    step by ranks that had data in it, and before this step by ranks that have data now.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._count = len(self._groups)
        self._agreed = self.current()

    def current(self) -> Hyperparams:
        """Return every setting that is a number or similar."""
        return {
            f"{number}/{name}": _to_json(value)
            for number, group in enumerate(self._groups)
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        }

    def reset(self) -> None:
        """Take the current values as agreed: a checkpoint was loaded, on all ranks."""
        self._agreed = self.current()

    def changed(self) -> Hyperparams:
        """Return what has changed on this rank since all agreed."""
        if len(self._groups) != self._count:
            raise UserError("a param group was added after run.prepare; give the optimizer all of them before")
        return {name: value for name, value in self.current().items() if self._agreed.get(name) != value}

    def agree(self, reports: Sequence[BatchReport], *, rank: int) -> None:
        """Take over what changed on other ranks since all agreed.

        Ranks that ran the loop's body both after the last step and before this one must agree, and the others follow
        them. If there are none, what was set before this step overrides what was set after the last.
        """
        changes = [report.hyperparams for report in reports]
        after = [rank for rank, report in enumerate(reports) if report.was_in_body[0]]
        before = [rank for rank, report in enumerate(reports) if report.was_in_body[1]]
        both = [busy for busy in after if busy in before]
        for ranks in [both] if both else [after, before]:
            for other in ranks[1:]:
                _check_equal(changes[ranks[0]], changes[other], self._agreed, ranks[0], other)
        for source in both[:1] or [*after[:1], *before[:1]]:
            self._agreed |= changes[source]
        if rank not in both:
            current = self.current()
            self._set({name: value for name, value in self._agreed.items() if current.get(name) != value})

    def _set(self, values: Hyperparams) -> None:
        for name, value in values.items():
            number, _, key = name.partition("/")
            group = self._groups[int(number)]
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _check_equal(
    one: Mapping[str, Any], other: Mapping[str, Any], agreed: Hyperparams, first: int, second: int
) -> None:
    for name in {**one, **other}:
        value, other_value = one.get(name, agreed.get(name)), other.get(name, agreed.get(name))
        if value != other_value:
            number, _, key = name.partition("/")
            raise UserError(
                f"the optimizer's {key} (param group {number}) is {value} on rank {first} and {other_value} on rank "
                f"{second}; set it from what is the same on all ranks, such as run.step or the result of run.evaluate"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
