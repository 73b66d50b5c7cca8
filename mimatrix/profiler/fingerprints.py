"""Fingerprints of models, code and devices: equal if measured curves of one hold for the other."""

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
from mimatrix.planner.model.profile import ModelSize
from mimatrix.profiler.cgroups import cpu_quota
from mimatrix.profiler.optimizer import estimate_state_bytes, trainable_params

_SLOWDOWNS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", environment.SPEED.name)
"""Variables that make a device slower than its name says."""


def model_size(
    model: nn.Module, optimizer: torch.optim.Optimizer, units_bytes: int, sample: Any = None, precision: str = "fp32"
) -> ModelSize:
    """Return the memory that a model and its optimizer need.

    Args:
        model: The model, unsharded.
        optimizer: Its optimizer.
        units_bytes: Size of the largest unit that is gathered or reduced at once.
        sample: One of the inputs, the same on every rank.
        precision: Precision of the run, the same value on every rank.
    """
    parameters = list(model.parameters())
    trainable = [param for param in parameters if param.requires_grad]
    return ModelSize(
        fingerprint=model_fingerprint(model, optimizer, sample, precision),
        name=type(model).__name__,
        parameters=sum(param.numel() for param in trainable),
        parameter_bytes=_bytes(parameters),
        gradient_bytes=_bytes(trainable),
        optimizer_bytes=estimate_state_bytes(optimizer, parameters[0].device) if trainable_params(optimizer) else 0,
        unit_bytes=units_bytes,
    )


def model_fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, precision: str) -> str:
    """Return a digest that differs between models with different curves."""
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [[name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in named]
    optimizer_class = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return _digest([name, tensors, optimizer_class, precision, _shapes(sample)])


def code_fingerprint(model: nn.Module, *others: object) -> str:
    """Return a digest of the source of a model's modules and of further functions, or classes of objects.

    What these call in turn is not included.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return _digest([*sorted(map(_source, kinds)), *(_source(_definition(other)) for other in others)])


def device_fingerprint(device: torch.device, available_bytes: int) -> str:
    """Return a digest that differs between devices with different curves, or with different free memory."""
    slowdowns = [os.environ.get(name, "") for name in _SLOWDOWNS]
    # In steps of a quarter of a power of two: other processes take a little more or less each time.
    quarter = round(4 * math.log2(max(1, available_bytes)))
    return _digest([_hardware(device), _total_bytes(device), torch.get_num_threads(), cpu_quota(), slowdowns, quarter])


def device_name(device: torch.device) -> str:
    """Return the name of a device for people: `NVIDIA A40`, `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_identity(device: torch.device) -> str:
    """Return what identifies a device on its host: ranks with the same identity share its memory."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _definition(value: object) -> object:
    """Return the function or class of a value: what a partial calls, the class of an object."""
    while isinstance(value, partial):
        value = value.func
    return value if inspect.isroutine(value) or inspect.isclass(value) else type(value)


def _source(definition: object) -> str:
    """Return the source of a function or of a class's methods, or "" if it is torch's, Python's or not available."""
    if str(getattr(definition, "__module__", "")).partition(".")[0] in ("torch", "builtins"):
        return ""
    if inspect.isclass(definition):
        # Not of the class itself: inspect does not find it in a script that another one started.
        return "".join(_source(member) for member in vars(definition).values() if inspect.isfunction(member))
    try:
        return inspect.getsource(definition)  # type: ignore[arg-type]
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
    """Return shapes and types of a nested sample; of anything else its type."""
    if isinstance(sample, torch.Tensor):
        return [list(sample.shape), str(sample.dtype)]
    if isinstance(sample, Mapping):
        return {str(key): _shapes(value) for key, value in sample.items()}
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return [_shapes(value) for value in sample]
    return type(sample).__name__


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
