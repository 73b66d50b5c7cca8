"""What the engine hangs on a model: it hears of every gradient, and in stage 3 of every module that runs."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.units import Unit
from mimatrix.engine.zero.zero3 import Zero3


def hear_gradients(units: tuple[Unit, ...], arrived: Callable[[nn.Parameter], None]) -> list[RemovableHandle]:
    """Call `arrived`, a method, with every parameter that has just got its gradient."""
    # Torch holds hooks where Python's collector does not see them: with more than this a run would never go.
    known = WeakMethod(arrived)

    def heard(parameter: nn.Parameter) -> None:
        if found := known():
            found(parameter)

    return [
        piece.parameter.register_post_accumulate_grad_hook(heard)  # type: ignore[no-untyped-call]
        for unit in units
        if unit.learns
        for piece in unit.pieces
    ]


def hear_modules(model: nn.Module, sharding: Zero3) -> None:
    """Let parameters come before the modules that use them run, forward and back, and go after."""
    uses: dict[nn.Module, list[Unit]] = {}
    for unit in sharding.units:
        for module in unit.modules:
            uses.setdefault(module, []).append(unit)
    for module, units in uses.items():
        module.register_forward_pre_hook(partial(_before, sharding, units))
        module.register_forward_hook(partial(_after, sharding, units))
        frozen = [unit for unit in units if all(map(_is_plainly_frozen, unit.modules))]
        if frozen:
            module.register_forward_hook(partial(_after_frozen, sharding, frozen), with_kwargs=True)
    keeping = _SavedParamHooks(sharding)
    model.register_forward_pre_hook(keeping.begin)
    model.register_forward_hook(keeping.end, prepend=True, always_call=True)
    model.register_forward_hook(lambda *_: sharding.looked())
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_refuse_load_state_dict)  # type: ignore[no-untyped-call]


def _before(sharding: Zero3, units: list[Unit], *_: Any) -> None:
    for unit in units:
        sharding.needed(unit)


def _before_back(sharding: Zero3, units: list[Unit], *_: Any) -> None:
    for unit in units:
        sharding.needed_back(unit)


def _after(sharding: Zero3, units: list[Unit], module: nn.Module, arguments: Any, outputs: Any) -> None:  # noqa: ARG001
    for unit in units:
        sharding.used(unit, module)
    flowing = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if flowing and torch.is_grad_enabled():
        register_multi_grad_hook(flowing, partial(_before_back, sharding, units), mode="any")


def _is_plainly_frozen(module: nn.Module) -> bool:
    """Whether the way back through a module ends with its inputs: nothing in it learns."""
    return not any(parameter.requires_grad for parameter in module.parameters()) and not list(module.children())


def _after_frozen(sharding: Zero3, units: list[Unit], _: nn.Module, arguments: Any, named: Any, outputs: Any) -> None:
    """Hear when a module has run back: when its inputs have their gradients."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
        return
    counted = [unit for unit in units if sharding.comes_back(unit)]
    inputs = tree_leaves((arguments, named))
    flowing = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if counted and flowing:
        register_multi_grad_hook(flowing, partial(_came_back, sharding, counted))


def _came_back(sharding: Zero3, units: list[Unit], *_: Any) -> None:
    for unit in units:
        sharding.came_back(unit)


class _SavedParamHooks:
    """What autograd keeps of the parameters for the way back: it finds them there when it asks.

    The outputs of modules say mostly before that they will be asked for; not where a module hands its results on in
    another way, as a loss beside the output.
    """

    def __init__(self, sharding: Zero3) -> None:
        self._sharding = sharding
        self._open: list[saved_tensors_hooks] = []

    def begin(self, *_: Any) -> None:
        """The model runs forward."""
        self._open.append(saved_tensors_hooks(self._keep, self._give))
        self._open[-1].__enter__()

    def end(self, *_: Any) -> None:
        """It has run, or failed."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _keep(self, tensor: torch.Tensor) -> Any:
        unit = self._sharding.unit_of(tensor)
        return tensor if unit is None else (unit, tensor)

    def _give(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        unit, tensor = kept
        self._sharding.needed_back(unit)
        found: torch.Tensor = tensor
        return found


def _refuse_load_state_dict(*_: Any) -> None:
    raise UserError("in stage 3 a rank has only its part of the parameters; load weights before run.prepare")


def _refuse_state_dict(*_: Any) -> None:
    raise UserError(
        "in stage 3 a rank has only its part of the parameters; use run.full_state_dict(model) or run.save()"
    )
