"""Trial runs of a model: forward and backward as the engine runs them, without a trace in the user's objects."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimatrix.profiler.rng_state import get_rng_state, set_rng_state

DEFAULT_UNIT_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ProfileTarget:
    """The model to measure and how to run it. It is unsharded and on its device; its optimizer has not stepped yet."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], torch.Tensor]
    fetch: Callable[[int], Any]
    """Returns a batch of that many samples on the device; the time to load it counts."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Mixed precision, entered for the forward pass and the loss."""
    fingerprint: str = ""
    """Of the model, as in `ModelSize`."""
    precision: str = "fp32"
    """In which this rank computes."""
    unit_bytes: int = DEFAULT_UNIT_BYTES
    """Size of the largest unit that is gathered or reduced at once."""
    conditions: str = ""
    """Whatever else must be equal for stored measurements to hold."""


class Trial:
    """Forward and backward passes of a target; gradients go into a buffer, as in the engine."""

    def __init__(self, target: ProfileTarget) -> None:
        self._target = target
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        """Memory held in addition to the model."""
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def run(self, samples: int) -> None:
        """Run forward and backward once."""
        target = self._target
        batch = target.fetch(samples)
        with torch.enable_grad():
            with target.autocast():
                loss = target.loss(target.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def capture_grads(self) -> Iterator[None]:
        """Within this context, copy every gradient into a buffer and drop it as soon as it is accumulated."""
        params = [param for param in self._target.model.parameters() if param.requires_grad]
        for dtype in {param.dtype for param in params}:
            largest = max(param.numel() for param in params if param.dtype == dtype)
            self._scratch[dtype] = torch.zeros(largest, dtype=dtype, device=self._target.device)
        hooks = [param.register_post_accumulate_grad_hook(self._capture) for param in params]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._scratch.clear()

    def _capture(self, param: nn.Parameter) -> None:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided:
            self._scratch[param.dtype][: param.numel()].view(param.shape).copy_(grad)
        param.grad = None


@contextmanager
def preserved_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers, gradients, training modes and RNG states when the context ends.

    Parameters are not copied, since nothing steps them.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    grads = [(param, param.grad) for param in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    rng_state = get_rng_state(device)
    if not model.training:
        model.train()
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        set_rng_state(rng_state, device)
        for module, mode in modes:
            module.training = mode
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                buffer.copy_(values)
