"""Averages of a prepared model that are not ours: torch's `AveragedModel`, and helpers that read `state_dict`.

A loop calls them once for each micro-batch, on each rank. They must average once for each global batch, and the same
on every rank.
"""

from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn
from torch.optim.swa_utils import AveragedModel

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.global_step import GlobalStep

_UPDATE = "AveragedModel.update_parameters"


class PreparedLoop(Protocol):
    """The training loop, as far as averages of others need it."""

    global_step: GlobalStep
    stage: int

    def require_all_ranks(self, call: str) -> None:
        """Refuse a call to which a rank without data does not come."""


def guard_averages(model: nn.Module, loop: PreparedLoop) -> None:
    """Let averages of a prepared model be updated between global batches only."""
    loops = _intercept_updates()
    for module in model.modules():
        loops[module] = ref(loop)
    model.register_state_dict_pre_hook(_StateDictGuard(ref(loop)))  # type: ignore[no-untyped-call]


def _intercept_updates() -> MutableMapping[nn.Module, "ReferenceType[PreparedLoop]"]:
    """Wrap torch's method, if it is not wrapped yet; return the prepared modules that it looks at."""
    update: Any = AveragedModel.update_parameters
    if not hasattr(update, "prepared_modules"):
        update = _wrap(update)
        AveragedModel.update_parameters = update  # type: ignore[method-assign]
    loops: MutableMapping[nn.Module, ReferenceType[PreparedLoop]] = update.prepared_modules
    return loops


def _wrap(update: Callable[[AveragedModel, nn.Module], None]) -> Callable[[AveragedModel, nn.Module], None]:
    # Weak on both sides: a wrapper that stays for good must keep neither models nor runs alive.
    loops: WeakKeyDictionary[nn.Module, ReferenceType[PreparedLoop]] = WeakKeyDictionary()

    @wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        reference = loops.get(model)
        loop = reference() if reference else None
        if loop is None or _may_update(loop):
            update(self, model)

    update_parameters.prepared_modules = loops  # type: ignore[attr-defined]
    return update_parameters


def _may_update(loop: PreparedLoop) -> bool:
    """Return whether the weights are those of a complete step on all ranks; raise where that cannot be."""
    if loop.stage == 3:
        raise UserError(f"{_UPDATE} reads parameters that stage 3 has sharded over the ranks; use run.ema or run.swa")
    if loop.global_step.is_complete:
        raise UserError(f"{_UPDATE} came before optimizer.step; call optimizer.step() first, or use run.ema")
    if loop.global_step.is_open:
        return False
    loop.require_all_ranks(f"{_UPDATE}, which run.ema does by itself")
    return True


class _StateDictGuard:
    """Refuses `model.state_dict()` inside a global batch after `run.backward`, where a helper would average it."""

    def __init__(self, loop: "ReferenceType[PreparedLoop] | None") -> None:
        self._loop = loop

    def __call__(self, *_: Any) -> None:
        loop = self._loop() if self._loop else None
        if loop and loop.global_step.is_open and loop.global_step.has_run_backward:
            raise UserError(
                "model.state_dict was called inside a global batch, whose step is not complete; use run.ema for an "
                "average, or call it when `not run.in_batch`"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StateDictGuard":
        """Return a guard of nothing: a copy of the model is not prepared."""
        return _StateDictGuard(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _StateDictGuard, (None,)
