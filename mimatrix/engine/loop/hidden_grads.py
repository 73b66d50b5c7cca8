"""Hide gradients between `run.backward` and `optimizer.step`, where they are not what a script may think they are.

There they are sums over this rank's micro-batches so far, moved out of the parameters on several ranks. Clipping them
or unscaling them by hand would do nothing, or something that depends on the number of ranks, without a word. After the
step there are none, where a plain loop still has them: they stay hidden until the loop continues.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.guarded_params import OTHER_OPTIMIZER, is_called
from mimatrix.engine.zero.strategy import GRAD_OUTSIDE_BACKWARD

_SCALER = (
    'a GradScaler scales the loss for one process; leave it out, and give mimatrix.init precision="fp16", which scales '
    "it for all ranks"
)
_FIXES: Mapping[tuple[str, str], str] = {
    ("torch.nn.utils", "clip_grad_norm_"): (
        "clip_grad_norm_ was called before the gradients are summed over the ranks; leave it out, give mimatrix.init "
        "max_grad_norm=..., and read the norm from run.grad_norm"
    ),
    ("torch.nn.utils", "clip_grad_value_"): (
        "clip_grad_value_ was called before the gradients are summed over the ranks; leave it out, and give "
        "mimatrix.init max_grad_norm=..."
    ),
    ("torch.amp", "unscale_"): _SCALER,
    ("torch.amp", "step"): _SCALER,
    ("torch.optim", "step"): OTHER_OPTIMIZER,
}
"""What to do instead, by the package and the name of the function that came upon a hidden gradient."""
_OTHERWISE = (
    "gradients are summed over the ranks and used up by optimizer.step, and `.grad` has none for the script; read "
    "run.grad_norm, and clip with max_grad_norm=... of mimatrix.init"
)


class HiddenGrad(torch.Tensor):
    """Stands in for a gradient: it has a shape and no values, and refuses to be computed with."""

    is_zeroed: bool
    """Whether the script has set it to zero, as `zero_grad(set_to_none=False)` does."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> "HiddenGrad":
        """Create a stand-in for the gradient of a parameter, without memory."""
        made: HiddenGrad = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        made.is_zeroed = False
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operation but `zero_`, which a loop may call where it may drop gradients."""
        if func is torch.ops.aten.zero_.default:
            args[0].is_zeroed = True
            return args[0]
        if torch._C._current_autograd_node() is not None:
            raise UserError(GRAD_OUTSIDE_BACKWARD)
        raise UserError(next((fix for (package, name), fix in _FIXES.items() if is_called(package, name)), _OTHERWISE))


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
        if self._hidden is None:
            return
        if any(param.grad is not stand_in or stand_in.is_zeroed for param, stand_in in self._stand_ins):
            raise UserError(
                "gradients were set or dropped between run.backward and optimizer.step, where they are not summed yet; "
                "call zero_grad after optimizer.step, or give run.backward weight=0 to leave a micro-batch out"
            )

    def restore(self) -> None:
        """Put the gradients back where autograd and the optimizer look for them."""
        if self._hidden is not None:
            for (param, stand_in), grad in zip(self._stand_ins, self._hidden, strict=True):
                param.grad = grad
                stand_in.is_zeroed = False
            self._hidden = None
