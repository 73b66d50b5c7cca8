"""Computing in 16 bits: parameters, sums and optimizer stay in 32, so that ranks of different precision agree."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mimatrix.core.errors import UserError

TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROWS_AFTER = 2000
_LARGEST, _LEAST = 2.0**24, 1.0


class Precision:
    """What one rank computes in: "fp32", "bf16" or "fp16"."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._dtype, self._device = TYPES[name], device
        self._context: torch.autocast | None = None
        emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if self._dtype is torch.bfloat16 and emulated:
            raise UserError(
                f'{torch.cuda.get_device_name(device)} has no bf16; use precision="fp16" for it, '
                'for example precision={"2080": "fp16", "A40": "bf16"}'
            )

    def context(self) -> AbstractContextManager[Any]:
        """Inside of it all is computed in this precision."""
        return torch.autocast(self._device.type, self._dtype) if self._dtype else nullcontext()

    def begin(self) -> None:
        """From here to `end` all is computed in it, as inside of `torch.autocast`: the model, and the user's loss."""
        if self._dtype and not self._context:
            self._context = torch.autocast(self._device.type, self._dtype)
            self._context.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Back to 32 bits."""
        if self._context:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    def lower(self, model: nn.Module) -> None:
        """Let a model compute in it also outside of `begin` and `end`, where it returns 32 bits again."""
        dtype, forward, device = self._dtype, model.forward, self._device.type
        if dtype is None:
            return

        @wraps(forward)
        def lowered(*arguments: Any, **named: Any) -> Any:
            if torch.is_autocast_enabled(device):
                return forward(*arguments, **named)
            with torch.autocast(device, dtype):
                found = forward(*arguments, **named)
            return tree_map(_widened, found)

        model.forward = lowered


def _widened(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_low else value


@dataclass
class LossScale:
    """The one factor by which all ranks enlarge their losses where any of them computes in fp16."""

    value: float = 1.0
    good: int = 0
    on: bool = False

    @classmethod
    def start(cls, on: bool) -> "LossScale":
        """At a usual value, or at 1 where it is not needed."""
        return cls(2.0**16 if on else 1.0, 0, on)

    def update(self, finite: bool) -> None:
        """After a step: halve it on an overflow, double it after many steps without one."""
        if not self.on:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(_LEAST, self.value / 2)
        elif self.good == _GROWS_AFTER:
            self.value, self.good = min(_LARGEST, self.value * 2), 0
