"""Mixed precision: parameters, sums and optimizer stay in 32 bits, so that ranks of different precision agree."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mimatrix.core.errors import UserError

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROWTH_INTERVAL = 2000
_MAX_SCALE, _MIN_SCALE = 2.0**24, 1.0


class Precision:
    """The precision that one rank computes in: "fp32", "bf16" or "fp16"."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype, self._device = DTYPES[name], device
        self._context: torch.autocast | None = None
        is_emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if self._dtype is torch.bfloat16 and is_emulated:
            raise UserError(
                f'{torch.cuda.get_device_name(device)} does not support bf16; use precision="fp16" for it, '
                'for example precision={"2080": "fp16", "A40": "bf16"}'
            )

    def context(self) -> AbstractContextManager[Any]:
        """Return a context manager within which everything is computed in this precision."""
        return torch.autocast(self._device.type, self._dtype) if self._dtype else nullcontext()

    def begin(self) -> None:
        """Enter `torch.autocast` until `end`: for the model and the user's loss."""
        if self._dtype and not self._context:
            self._context = torch.autocast(self._device.type, self._dtype)
            self._context.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave the `torch.autocast` that `begin` entered, if any."""
        if self._context:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def autocast_forward(self, model: nn.Module) -> None:
        """Let a model's forward use this precision outside `begin` and `end` too, and return 32 bits there."""
        dtype, forward, device = self._dtype, model.forward, self._device.type
        if dtype is None:
            return

        @wraps(forward)
        def autocast(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(device):
                return forward(*args, **kwargs)
            with torch.autocast(device, dtype):
                outputs = forward(*args, **kwargs)
            return tree_map(_to_fp32, outputs)

        model.forward = autocast


def _to_fp32(value: Any) -> Any:
    is_16_bit = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_16_bit else value


@dataclass
class LossScale:
    """The factor by which all ranks scale their losses if any of them computes in fp16."""

    value: float = 1.0
    good: int = 0
    """Steps without an overflow since the scale changed."""
    on: bool = False

    @classmethod
    def start(cls, on: bool) -> "LossScale":
        """Return a scale at its usual first value, or at 1 if it is not needed."""
        return cls(2.0**16 if on else 1.0, 0, on)

    def update(self, is_finite: bool) -> None:
        """Halve the scale after a step with an overflow, double it after many steps without one."""
        if not self.on:
            return
        self.good = self.good + 1 if is_finite else 0
        if not is_finite:
            self.value = max(_MIN_SCALE, self.value / 2)
        elif self.good == _GROWTH_INTERVAL:
            self.value, self.good = min(_MAX_SCALE, self.value * 2), 0
