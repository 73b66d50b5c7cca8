"""An optimizer's settings, such as its learning rates: the same on all ranks at every step.

A loop may set them by hand. A rank without data does not run the loop's body, so it takes them over from the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mimatrix.core.errors import UserError

Values = dict[str, Any]
"""By `group/name`."""


class Knobs:
    """The settings of an optimizer's param groups, and what ranks have agreed that they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._count = len(self._groups)
        self._agreed = self.all()

    def all(self) -> Values:
        """Every setting that is a number or the like."""
        return {
            f"{number}/{name}": _plain(value)
            for number, group in enumerate(self._groups)
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        }

    def renew(self) -> None:
        """What they are now is agreed: a checkpoint was loaded, on all ranks."""
        self._agreed = self.all()

    def changed(self) -> Values:
        """What has changed on this rank since all agreed."""
        if len(self._groups) != self._count:
            raise UserError("a param group was added after run.prepare; give the optimizer all of them before")
        return {name: value for name, value in self.all().items() if self._agreed.get(name) != value}

    def agree(self, changes: Sequence[Values], ran: Sequence[bool], *, takes: bool) -> None:
        """What has changed on the ranks that `ran` the loop's body, on which they must agree; others take it over."""
        runners = [number for number, each in enumerate(ran) if each]
        if not runners:
            return  # nobody has been in the loop since; whatever was set outside of it, all have set
        first = changes[runners[0]]
        for other in runners[1:]:
            _compare(first, changes[other], self._agreed, runners[0], other)
        self._agreed |= first
        if takes:
            self._set({name: value for name, value in self._agreed.items() if self.all().get(name) != value})

    def _set(self, values: Values) -> None:
        for name, value in values.items():
            number, _, key = name.partition("/")
            group = self._groups[int(number)]
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _compare(one: Values, other: Values, agreed: Values, first: int, second: int) -> None:
    for name in {**one, **other}:
        mine, theirs = one.get(name, agreed.get(name)), other.get(name, agreed.get(name))
        if mine != theirs:
            number, _, key = name.partition("/")
            raise UserError(
                f"the optimizer's {key} (param group {number}) is {mine} on rank {first} and {theirs} on rank "
                f"{second}; set it from what is the same on all ranks, such as run.step or the result of run.evaluate"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(each, int | float) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """As JSON brings it back."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
