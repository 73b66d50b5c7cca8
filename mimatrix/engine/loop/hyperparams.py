"""An optimizer's settings, such as its learning rates: the same on all ranks at every step.

A loop may set them by hand, before a step and after it. A rank without data does not run the loop's body, so it takes
them over from the others: what was set after the last step by ranks that had data in it, before this one by those that
have data now.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from mimatrix.core.errors import UserError

Hyperparams = dict[str, Any]
"""By `group/name`."""


class HyperparamSync:
    """The settings of an optimizer's param groups, and what ranks have agreed that they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._count = len(self._groups)
        self._agreed = self.all()

    def all(self) -> Hyperparams:
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

    def changed(self) -> Hyperparams:
        """What has changed on this rank since all agreed."""
        if len(self._groups) != self._count:
            raise UserError("a param group was added after run.prepare; give the optimizer all of them before")
        return {name: value for name, value in self.all().items() if self._agreed.get(name) != value}

    def agree(
        self, changes: Sequence[Hyperparams], after: Sequence[bool], before: Sequence[bool], *, rank: int
    ) -> None:
        """What has changed on all ranks since they agreed last, and who was in the loop's body since.

        `after` the last step, and `before` this one. Those that were in both must agree, and the others do as they do;
        where nobody was in both, what was set before a step comes on top of what was set after the last.
        """
        since, until = _those(after), _those(before)
        both = [each for each in since if each in until]
        for ranks in [both] if both else [since, until]:
            for other in ranks[1:]:
                _compare(changes[ranks[0]], changes[other], self._agreed, ranks[0], other)
        for source in both[:1] or [*since[:1], *until[:1]]:
            self._agreed |= changes[source]
        if rank not in both:
            self._set({name: value for name, value in self._agreed.items() if self.all().get(name) != value})

    def _set(self, values: Hyperparams) -> None:
        for name, value in values.items():
            number, _, key = name.partition("/")
            group = self._groups[int(number)]
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _those(flags: Sequence[bool]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]


def _compare(one: Hyperparams, other: Hyperparams, agreed: Hyperparams, first: int, second: int) -> None:
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
