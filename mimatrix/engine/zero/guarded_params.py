"""Guard parameters at times when a script must not read or change them.

In stage 3 a parameter that is not gathered has no values. In every stage the weights inside a global batch are those of
before its step: a loop that averages, clamps or scales them after `optimizer.step` would do so once per micro-batch,
and ranks with different numbers of micro-batches would end with different weights.

A guarded parameter is the same object with another class, which torch asks before it computes. At all other times the
class is torch's own, and costs nothing.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mimatrix.core.errors import UserError

_METADATA = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "is_contiguous"),
        *("is_floating_point", "is_complex", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
        *("__hash__", "__len__"),
    ]
)
"""Methods that do not touch the values of a tensor."""
_VALUES = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])
"""Attributes that do; all others are of its form or of autograd."""
OTHER_OPTIMIZER = (
    "optimizer.step was called on another optimizer than the one that run.prepare returned; give all parameters to one "
    "optimizer, as param groups, and step what run.prepare returned"
)


class _GuardedParam(nn.Parameter):
    """A parameter that can be shown, and asked for its form."""

    guarded_name: str
    was_trainable: bool

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.guarded_name}, {list(self.shape)})"


class ParamInBatch(_GuardedParam):
    """A parameter between two micro-batches of a global batch: the model may use it, and the script may not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with the weights of before the step."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what a script does with the values, and the loss of another model that runs through this one."""
        if _touches_values(func) and _in_forward():
            if torch.is_grad_enabled() and any(
                leaf.was_trainable and not leaf.requires_grad for leaf in _of(args, cls)
            ):
                raise UserError(
                    f"{_find_name(args, cls)} is used by another model inside a global batch, whose step is not "
                    "complete; where models train each other, give each rank one micro-batch (leave out micro_batch)"
                )
        elif _touches_values(func):
            if is_called("torch.optim", "step"):
                raise UserError(OTHER_OPTIMIZER)
            raise UserError(
                f"{_find_name(args, cls)} was read or changed inside a global batch, whose step is not complete; do it "
                "when `not run.in_batch`, and use run.ema for an average"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ShardedParam(_GuardedParam):
    """A parameter that stage 3 has not gathered: it has a shape and no values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Refuse: a rank has only its part of the parameters."""
        raise UserError(
            "in stage 3 a rank has only its part of the parameters, so the model cannot be copied; copy it before "
            "run.prepare, and load run.full_state_dict(model) into the copy"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse everything that needs values."""
        if _touches_values(func):
            name = _find_name(args, cls)
            if _in_forward():
                raise UserError(
                    f"{name} is used outside its module, where stage 3 does not have it; use stage 2, or name the "
                    "class of the module that uses it: run.prepare(..., leaf_modules=(TheClass,))"
                )
            raise UserError(
                f"{name} was read or changed outside the model, and stage 3 has sharded it over the ranks; use "
                "run.full_state_dict, run.ema for an average, leaf_modules for a penalty, or another stage"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class GuardedParams:
    """Some parameters, and whether they are guarded. Parameters of special classes are left alone."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], guard: type[_GuardedParam]) -> None:
        self._params = [(name, param) for name, param in named if type(param) is nn.Parameter]
        self._guard, self._is_guarded = guard, False

    def guard(self) -> None:
        """Refuse the use of the parameters from now on."""
        if self._is_guarded:
            return
        self._is_guarded = True
        for name, param in self._params:
            param.__class__ = self._guard
            param.guarded_name, param.was_trainable = name, param.requires_grad  # type: ignore[attr-defined]

    def release(self) -> None:
        """Let the parameters be used again."""
        if not self._is_guarded:
            return
        self._is_guarded = False
        for _, param in self._params:
            param.__class__ = nn.Parameter


def _touches_values(func: Any) -> bool:
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    if func.__name__ in ("__get__", "__set__", "__delete__") and attribute is not None:
        return attribute in _VALUES
    return func.__name__ not in _METADATA


def _find_name(args: Any, guard: type[_GuardedParam]) -> str:
    return next((leaf.guarded_name for leaf in _of(args, guard)), "a parameter")


def _of(args: Any, guard: type[_GuardedParam]) -> list[Any]:
    return [leaf for leaf in tree_leaves(args) if type(leaf) is guard]


def _in_forward() -> bool:
    """Return whether a module runs."""
    return is_called("torch.nn.modules.module", "_call_impl")


def is_called(package: str, function: str) -> bool:
    """Return whether a function of this name, of this package, is on the stack."""
    frame = sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__")).startswith(package):
            return True
    return False
