"""The states of all random number generators that training draws from: torch, its GPU, Python and NumPy."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RngState:
    """One moment of every generator."""

    cpu: torch.Tensor
    """Of torch."""
    python: tuple[Any, ...]
    cuda: torch.Tensor | None = None
    """None on a CPU."""
    numpy: tuple[Any, ...] | None = None
    """None if NumPy was not imported."""


def get_rng_state(device: torch.device) -> RngState:
    """Return the current state of every generator; of GPUs, that of `device`."""
    numpy = sys.modules.get("numpy")
    return RngState(
        torch.get_rng_state(),
        random.getstate(),
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        numpy.random.get_state() if numpy else None,
    )


def set_rng_state(state: RngState, device: torch.device) -> None:
    """Continue from `state`; a generator that it does not know keeps its own."""
    torch.set_rng_state(state.cpu)
    random.setstate(state.python)
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)
    if state.numpy is not None and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state.numpy)
