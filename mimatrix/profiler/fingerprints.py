"""Which measurements hold for which: short names of models and devices that change when curves would."""

import hashlib
import inspect
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimatrix.core import environment
from mimatrix.planner.profile import ModelSize
from mimatrix.profiler.cgroups import cpu_quota
from mimatrix.profiler.optimizer import learning, state_bytes

_TOLD = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", environment.SPEED.name)
"""What makes a device slower than its name says."""


def model_size(
    model: nn.Module, optimizer: torch.optim.Optimizer, units_bytes: int, sample: Any = None, precision: str = "fp32"
) -> ModelSize:
    """What a model and its optimizer hold. `sample` is one of its inputs, the same on every rank, as is `precision`."""
    parameters = list(model.parameters())
    learns = [each for each in parameters if each.requires_grad]
    return ModelSize(
        fingerprint=model_fingerprint(model, optimizer, sample, precision),
        name=type(model).__name__,
        parameters=sum(each.numel() for each in learns),
        parameter_bytes=_bytes(parameters),
        gradient_bytes=_bytes(learns),
        optimizer_bytes=state_bytes(optimizer, parameters[0].device) if learning(optimizer) else 0,
        unit_bytes=units_bytes,
    )


def model_fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, precision: str) -> str:
    """Differs where the curves of one model do not hold for the other."""
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [[name, list(each.shape), str(each.dtype), each.requires_grad] for name, each in named]
    optimizer_class = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return _digest([name, tensors, optimizer_class, precision, _shapes(sample)])


def code_fingerprint(model: nn.Module, *others: object) -> str:
    """Differs where what runs is written differently: the model's own modules, functions, the class of a dataset.

    Not what these call in turn.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return _digest([*sorted(map(_written, kinds)), *(_written(_definition(each)) for each in others)])


def device_fingerprint(device: torch.device, room_bytes: int) -> str:
    """Differs where the curves of one device do not hold for the other: also the same one with less of it free."""
    told = [os.environ.get(name, "") for name in _TOLD]
    # In steps of a quarter of a power of two: what else is going on takes a little more or less each time.
    quarter = round(4 * math.log2(max(1, room_bytes)))
    return _digest([_hardware(device), _total_bytes(device), torch.get_num_threads(), cpu_quota(), told, quarter])


def device_name(device: torch.device) -> str:
    """For people: `NVIDIA A40`, `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_identity(device: torch.device) -> str:
    """Which one it is on its host: ranks with the same share its memory."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _definition(found: object) -> object:
    """A function or a class: of a partial that which it calls, of an object its class."""
    while isinstance(found, partial):
        found = found.func
    return found if inspect.isroutine(found) or inspect.isclass(found) else type(found)


def _written(found: object) -> str:
    """The source of a function or of a class's methods, where it is not torch's or Python's and can be had."""
    if str(getattr(found, "__module__", "")).partition(".")[0] in ("torch", "builtins"):
        return ""
    if inspect.isclass(found):
        # Not the class's: where a script was started by another one, nobody would find it.
        return "".join(_written(each) for each in vars(found).values() if inspect.isfunction(each))
    try:
        return inspect.getsource(found)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def _hardware(device: torch.device) -> str:
    if device.type != "cpu":
        return device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shapes(sample: Any) -> Any:
    """Shapes and types of a nested sample; of anything else its type."""
    if isinstance(sample, torch.Tensor):
        return [list(sample.shape), str(sample.dtype)]
    if isinstance(sample, Mapping):
        return {str(key): _shapes(value) for key, value in sample.items()}
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return [_shapes(value) for value in sample]
    return type(sample).__name__


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
