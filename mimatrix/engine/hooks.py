"""What the engine hangs on a model: it hears of every gradient, and in stage 3 of every module that runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mimatrix.core.errors import UserError
from mimatrix.engine.sharding import ParametersCut
from mimatrix.engine.units import Unit


def hear_gradients(units: tuple[Unit, ...], arrived: Callable[[nn.Parameter], None]) -> list[RemovableHandle]:
    """Call `arrived` with every parameter that has just got its gradient."""
    return [
        piece.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        for unit in units
        if unit.learns
        for piece in unit.pieces
    ]


def hear_modules(model: nn.Module, sharding: ParametersCut) -> None:
    """Let parameters come before the modules that use them run, forward and back, and go after."""
    uses: dict[nn.Module, list[Unit]] = {}
    for unit in sharding.units:
        for module in unit.modules:
            uses.setdefault(module, []).append(unit)
    for module, units in uses.items():
        module.register_forward_pre_hook(partial(_before, sharding, units))
        module.register_forward_hook(partial(_after, sharding, units))
    model.register_forward_hook(lambda *_: sharding.looked())
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]


def _before(sharding: ParametersCut, units: list[Unit], *_: Any) -> None:
    for unit in units:
        sharding.needed(unit)


def _after(sharding: ParametersCut, units: list[Unit], module: nn.Module, arguments: Any, outputs: Any) -> None:  # noqa: ARG001
    for unit in units:
        sharding.used(unit, module)
    flowing = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if flowing and torch.is_grad_enabled():
        register_multi_grad_hook(flowing, partial(_before, sharding, units), mode="any")


def _refuse_state_dict(*_: Any) -> None:
    raise UserError(
        "in stage 3 a rank has only its part of the parameters; use run.full_state_dict(model) or run.save()"
    )
