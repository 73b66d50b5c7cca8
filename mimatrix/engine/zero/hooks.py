"""The engine's hooks on a model: on every gradient, and in stage 3 on every module that uses parameters."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.units import Unit

logger = logging.getLogger(__name__)


class ForwardBackward(Protocol):
    """What the hooks on modules call, as FSDP names it: `Zero3` implements it."""

    units: Sequence[Unit]

    def pre_forward(self, unit: Unit) -> None:
        """Make the parameters of a unit available: one of its modules is about to run."""

    def post_forward(self, unit: Unit, module: nn.Module) -> None:
        """Note that a module of a unit has run."""

    def end_forward_only(self) -> None:
        """Note that the model has run, which ends the pass if no backward pass follows."""

    def pre_backward(self, unit: Unit) -> None:
        """Make the parameters of a unit available for the backward pass."""

    def expect_backward(self, unit: Unit) -> bool:
        """Count a module of a frozen unit whose backward pass is to come; return False if none is."""

    def post_backward(self, unit: Unit) -> None:
        """Note that a module of a frozen unit has run backward."""

    def find_unit(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit whose memory a tensor views, if any."""


def register_grad_hooks(units: Sequence[Unit], on_grad: Callable[[nn.Parameter], None]) -> list[RemovableHandle]:
    """Call `on_grad`, a method, with every parameter that has just got its gradient."""
    # Torch holds hooks where Python's garbage collector does not see them: a strong reference would keep a run alive.
    reference = WeakMethod(on_grad)

    def call(parameter: nn.Parameter) -> None:
        if method := reference():
            method(parameter)

    call.is_engine_hook = True  # type: ignore[attr-defined]
    return [
        param.parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
        for unit in units
        if unit.trainable
        for param in unit.params
    ]


class GradHookCheck:
    """Looks for gradient hooks of the user's, which see the gradient of one micro-batch on one rank."""

    def __init__(self, units: Sequence[Unit], *, warns: bool) -> None:
        self._params = [param for unit in units if unit.trainable for param in unit.params]
        self._warns = warns

    def check(self) -> None:
        """Warn once of hooks, whose effect may depend on the split."""
        hooked = (
            next((param for param in self._params if _has_grad_hook(param.parameter)), None) if self._warns else None
        )
        if hooked:
            self._warns = False
            logger.warning(
                "%s has a gradient hook, which sees the gradient of one micro-batch, scaled to its part of the global "
                "batch; it must be linear, as a mask is: clip with max_grad_norm=... of mimatrix.init",
                hooked.names[0],
            )


def _has_grad_hook(param: nn.Parameter) -> bool:
    accumulated = param._post_accumulate_grad_hooks or {}
    return bool(param._backward_hooks) or any(not hasattr(hook, "is_engine_hook") for hook in accumulated.values())


def register_state_dict_copies(model: nn.Module) -> None:
    """Let `state_dict` return tensors with memory of their own.

    Parameters are views of the arena, and `torch.save` and `copy.deepcopy` take a tensor's whole memory along.
    """
    for module in model.modules():
        module.register_state_dict_post_hook(_copy_views)  # type: ignore[no-untyped-call]


def _copy_views(_: nn.Module, state_dict: dict[str, Any], *__: Any) -> None:
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and _is_part(value):
            state_dict[name] = value.clone()


def _is_part(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds more than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def register_module_hooks(model: nn.Module, strategy: ForwardBackward) -> None:
    """Unshard parameters before the modules that use them run, forward and backward, and reshard them after."""
    units_of_module: dict[nn.Module, list[Unit]] = {}
    for unit in strategy.units:
        for module in unit.modules:
            units_of_module.setdefault(module, []).append(unit)
    for module, units in units_of_module.items():
        module.register_forward_pre_hook(partial(_pre_forward, strategy, units))
        module.register_forward_hook(partial(_post_forward, strategy, units))
        frozen = [unit for unit in units if all(map(_is_frozen_leaf, unit.modules))]
        if frozen:
            module.register_forward_hook(partial(_post_forward_frozen, strategy, frozen), with_kwargs=True)
    saved = _SavedParamHooks(strategy)
    model.register_forward_pre_hook(saved.begin)
    model.register_forward_hook(saved.end, prepend=True, always_call=True)
    model.register_forward_hook(lambda *_: strategy.end_forward_only())
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_refuse_load_state_dict)  # type: ignore[no-untyped-call]


def _pre_forward(strategy: ForwardBackward, units: list[Unit], *_: Any) -> None:
    for unit in units:
        strategy.pre_forward(unit)


def _pre_backward(strategy: ForwardBackward, units: list[Unit], *_: Any) -> None:
    for unit in units:
        strategy.pre_backward(unit)


def _post_forward(strategy: ForwardBackward, units: list[Unit], module: nn.Module, _: Any, outputs: Any) -> None:
    for unit in units:
        strategy.post_forward(unit, module)
    with_grad = _tensors_with_grad(outputs)
    if with_grad and torch.is_grad_enabled():
        register_multi_grad_hook(with_grad, partial(_pre_backward, strategy, units), mode="any")


def _is_frozen_leaf(module: nn.Module) -> bool:
    """Whether the backward pass of a module ends at its inputs, since nothing in it is trainable."""
    return not any(parameter.requires_grad for parameter in module.parameters()) and not list(module.children())


def _post_forward_frozen(
    strategy: ForwardBackward, units: list[Unit], _: nn.Module, args: Any, kwargs: Any, outputs: Any
) -> None:
    """Register a hook on the backward pass of a frozen module, which has ended when its inputs have gradients."""
    if not _tensors_with_grad(outputs):
        return
    expected = [unit for unit in units if strategy.expect_backward(unit)]
    with_grad = _tensors_with_grad((args, kwargs))
    if expected and with_grad:
        register_multi_grad_hook(with_grad, partial(_post_backward, strategy, expected))


def _post_backward(strategy: ForwardBackward, units: list[Unit], *_: Any) -> None:
    for unit in units:
        strategy.post_backward(unit)


def _tensors_with_grad(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class _SavedParamHooks:
    """Hooks on what autograd saves of the parameters: they are unsharded when the backward pass unpacks them.

    Mostly the hooks on the outputs of modules have unsharded them before. They do not run where a module returns its
    results in another way, for example a loss that it stores as an attribute.
    """

    def __init__(self, strategy: ForwardBackward) -> None:
        self._strategy = strategy
        self._active: list[saved_tensors_hooks] = []

    def begin(self, *_: Any) -> None:
        """Begin to watch what autograd saves: the model runs forward."""
        self._active.append(saved_tensors_hooks(self._pack, self._unpack))
        self._active[-1].__enter__()

    def end(self, *_: Any) -> None:
        """Stop watching: the model has run, or failed."""
        if self._active:
            self._active.pop().__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._strategy.find_unit(tensor)
        return tensor if unit is None else (unit, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        unit, tensor = packed
        self._strategy.pre_backward(unit)
        unpacked: torch.Tensor = tensor
        return unpacked


def _refuse_load_state_dict(*_: Any) -> None:
    raise UserError("in stage 3 a rank has only its part of the parameters; load weights before run.prepare")


def _refuse_state_dict(*_: Any) -> None:
    raise UserError(
        "in stage 3 a rank has only its part of the parameters; use run.full_state_dict(model) or run.save()"
    )
