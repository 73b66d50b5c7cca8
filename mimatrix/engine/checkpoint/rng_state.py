"""RNG states: of torch, of the device, of Python, and of NumPy if it is in use."""

import base64
import hashlib
import json
import random
import sys
from typing import Any

import torch


def now(device: torch.device) -> torch.Tensor:
    """Return the RNG states of this rank, as bytes."""
    found: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, [int(key) for key in keys], *rest]
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)


def restore(states: torch.Tensor, device: torch.device) -> None:
    """Restore the states that `now` returned; a kind of device that was not in use then keeps its state."""
    found = json.loads(bytes(states.numpy()))
    torch.set_rng_state(_bytes(found["torch"]))
    version, keys, gauss = found["python"]
    random.setstate((version, tuple(keys), gauss))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(_bytes(found["cuda"]), device)
    if "numpy" in found and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(found["numpy"])


def start_anew(seed: int, step: int, rank: int) -> None:
    """Seed every rank and step differently, for when no saved states fit this rank."""
    drawn = int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "little")
    torch.manual_seed(drawn)
    random.seed(drawn)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(drawn % 2**32)


def _text(states: torch.Tensor) -> str:
    return base64.b64encode(states.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
