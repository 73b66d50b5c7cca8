"""Hide gradients between `run.backward` and `optimizer.step`, where they are not what a script may think they are.

There they are sums over this rank's micro-batches so far, moved out of the parameters on several ranks. Clipping them
or unscaling them by hand would do nothing, or something that depends on the number of ranks, without a word.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.strategy import GRAD_OUTSIDE_BACKWARD

_FIXES: Mapping[tuple[str, str], str] = {
    ("torch.nn.utils", "clip_grad_norm_"): (
        "clip_grad_norm_ was called before the gradients are summed over the ranks; leave it out, give mimatrix.init "
        "max_grad_norm=..., and read the norm from run.grad_norm"
    ),
    ("torch.nn.utils", "clip_grad_value_"): (
        "clip_grad_value_ was called before the gradients are summed over the ranks; leave it out, and give "
        "mimatrix.init max_grad_norm=..."
    ),
    ("torch.amp", "unscale_"): (
        'a GradScaler scales the loss for one process; leave it out, and give mimatrix.init precision="fp16", which '
        "scales it for all ranks"
    ),
    ("torch.optim", "step"): (
        "optimizer.step was called on another optimizer than the one that run.prepare returned; call it on that one"
    ),
}
"""What to do instead, by the package and the name of the function that came upon a hidden gradient."""
_OTHERWISE = (
    "gradients are summed over the ranks by optimizer.step, and `.grad` has none between run.backward and it; read "
    "run.grad_norm, and clip with max_grad_norm=... of mimatrix.init"
)


class HiddenGrad(torch.Tensor):
    """Stands in for a gradient: it has a shape and no values, and refuses to be computed with."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> "HiddenGrad":
        """Create a stand-in for the gradient of a parameter, without memory."""
        made: HiddenGrad = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        """Refuse every operation."""
        if torch._C._current_autograd_node() is not None:
            raise UserError(GRAD_OUTSIDE_BACKWARD)
        raise UserError(next((fix for (package, name), fix in _FIXES.items() if _is_called(package, name)), _OTHERWISE))


def _is_called(package: str, function: str) -> bool:
    """Return whether a function of this name, of this package, is on the stack."""
    frame = sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__")).startswith(package):
            return True
    return False


class HiddenGrads:
    """The gradients of some parameters, and whether they can be seen."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._stand_ins = [(param, HiddenGrad(param)) for param in dict.fromkeys(params)]
        self._hidden: list[torch.Tensor | None] | None = None

    def hide(self) -> None:
        """Put a stand-in in place of every gradient."""
        if self._hidden is None:
            self._hidden = [param.grad for param, _ in self._stand_ins]
            for param, stand_in in self._stand_ins:
                param.grad = stand_in

    def check(self) -> None:
        """Refuse gradients that the loop has set or dropped since they were hidden."""
        if self._hidden is not None and any(param.grad is not stand_in for param, stand_in in self._stand_ins):
            raise UserError(
                "gradients were set or dropped between run.backward and optimizer.step, where they are not summed yet; "
                "call zero_grad after optimizer.step, or give run.backward weight=0 to leave a micro-batch out"
            )

    def restore(self) -> None:
        """Put the gradients back where autograd and the optimizer look for them."""
        if self._hidden is not None:
            for (param, _), grad in zip(self._stand_ins, self._hidden, strict=True):
                param.grad = grad
            self._hidden = None
