"""Passes of a model as the engine makes them, but alone and without a trace: what is the user's stays as it was."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimatrix.profiler.rng_state import get_rng_state, set_rng_state

DEFAULT_UNIT_BYTES = 8 << 20


@dataclass(frozen=True)
class ProfileTarget:
    """What is measured. The model is whole and on its device, and its optimizer has not stepped yet."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], torch.Tensor]
    fetch: Callable[[int], Any]
    """A batch of so many samples on the device; what loading costs is part of the time."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Mixed precision, around forward pass and loss."""
    fingerprint: str = ""
    """Of the model, as `model_size` has it."""
    precision: str = "fp32"
    """What this rank computes in."""
    unit_bytes: int = DEFAULT_UNIT_BYTES
    """Of the largest part of the model that moves at once."""
    circumstances: str = ""
    """Whatever else must be the same for earlier measurements to hold."""


class Trial:
    """Forward and backward passes of a subject; gradients go where the engine's go."""

    def __init__(self, subject: ProfileTarget) -> None:
        self._subject = subject
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        """What is held beside the model."""
        return sum(each.numel() * each.element_size() for each in self._scratch.values())

    def run(self, samples: int) -> None:
        """One pass, forward and back."""
        subject = self._subject
        batch = subject.fetch(samples)
        with torch.enable_grad():
            with subject.autocast():
                loss = subject.loss(subject.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While this lasts every gradient is copied into a buffer and dropped, as soon as it is there."""
        learning = [each for each in self._subject.model.parameters() if each.requires_grad]
        for dtype in {each.dtype for each in learning}:
            largest = max(each.numel() for each in learning if each.dtype == dtype)
            self._scratch[dtype] = torch.zeros(largest, dtype=dtype, device=self._subject.device)
        hooks = [each.register_post_accumulate_grad_hook(self._take) for each in learning]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._scratch.clear()

    def _take(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            self._scratch[parameter.dtype][: parameter.numel()].view(parameter.shape).copy_(gradient)
        parameter.grad = None


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model be trained in here, and find it afterwards as it was: buffers, gradients, modes, random states.

    Parameters are not copied, since nothing steps them.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(each, each.grad) for each in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    rng_state = get_rng_state(device)
    if not model.training:
        model.train()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        set_rng_state(rng_state, device)
        for module, mode in modes:
            module.training = mode
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                buffer.copy_(values)
