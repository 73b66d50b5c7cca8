"""RNG states in checkpoints: of torch, of the device, of Python, and of NumPy if it is in use."""

import base64
import hashlib
import json
import random
import sys
from typing import Any

import torch

from mimatrix.profiler.rng_state import RngState, get_rng_state, set_rng_state


def save_rng_state(device: torch.device) -> torch.Tensor:
    """Return the RNG states of this rank as bytes."""
    state = get_rng_state(device)
    fields: dict[str, Any] = {"torch": _to_text(state.cpu), "python": state.python}
    if state.cuda is not None:
        fields["cuda"] = _to_text(state.cuda)
    if state.numpy is not None:
        name, keys, *rest = state.numpy
        fields["numpy"] = [name, [int(key) for key in keys], *rest]
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def load_rng_state(saved: torch.Tensor, device: torch.device) -> None:
    """Continue from what `save_rng_state` returned; a kind of device that was not in use then keeps its state."""
    fields = json.loads(bytes(saved.numpy()))
    version, keys, gauss = fields["python"]
    state = RngState(
        _to_bytes(fields["torch"]),
        (version, tuple(keys), gauss),
        _to_bytes(fields["cuda"]) if "cuda" in fields else None,
        tuple(fields["numpy"]) if "numpy" in fields else None,
    )
    set_rng_state(state, device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed every generator for this rank and step, if the saved states belong to other ranks."""
    derived = int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "little")
    torch.manual_seed(derived)
    random.seed(derived)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(derived % 2**32)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
