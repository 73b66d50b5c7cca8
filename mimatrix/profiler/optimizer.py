"""What an optimizer costs, measured on a small twin of it; the user's own does not step."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimatrix.profiler.memory_budget import segmented_bytes
from mimatrix.profiler.timing import Timing, measure_time

TWIN_ELEMENTS = 4 << 20
_LARGEST_FRACTION = 0.25
"""Largest parameter of a twin, as a fraction of its elements."""
_FEW_ELEMENTS = 1 << 16
"""Enough to see how much state is kept per element."""
_PASSES = 3
"""Passes over the parameters in a step of an optimizer that has no twin: read, read the gradient, write."""
_STATES = 2
"""Tensors of the size of the parameters that such an optimizer keeps: Adam keeps two, and few keep more."""


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """The time of one step over all parameters, and the memory of the optimizer's state."""

    seconds: float
    state_bytes: int
    transient_bytes: int = 0
    """Memory that a step holds only while it runs; some optimizers allocate copies of all parameters."""


def trainable_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the trainable parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in _trainable(group)]


def estimate_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Estimate the memory of the state that an optimizer will keep for all its parameters."""
    return _Twin(optimizer, device, _FEW_ELEMENTS).state_bytes()


def measure_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, elements: int = TWIN_ELEMENTS
) -> OptimizerCost:
    """Measure the cost of one step on this device, by a twin of about `elements` elements."""
    if not trainable_params(optimizer):
        return OptimizerCost(0.0, 0)
    twin = _Twin(optimizer, device, elements)
    if twin.optimizer is None:
        timing = twin.measure_passes(device)
    else:
        timing = measure_time(twin.optimizer.step, device, _expected_s(twin.optimizer, device))
    transient_bytes = _transient_bytes(twin.optimizer, device, twin.scale)
    return OptimizerCost(timing.seconds * twin.scale, twin.state_bytes(), transient_bytes)


class _Twin:
    """An optimizer of the same class and settings with few elements, which has stepped once."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, elements: int) -> None:
        self._groups = [group for group in optimizer.param_groups if _trainable(group)]
        total = max(1, sum(_count_elements(_trainable(group)) for group in self._groups))
        self._params = [
            _sample_params(_trainable(group), device, max(1, elements * _count_elements(_trainable(group)) // total))
            for group in self._groups
        ]
        self.scale = total / max(1, sum(map(_count_elements, self._params)))
        """How many times as many elements the original has."""
        self.optimizer = self._build(optimizer)
        """None if the class cannot be constructed from its defaults."""

    def state_bytes(self) -> int:
        """Scale the twin's state up to all parameters; scalars such as a step count do not grow."""
        if self.optimizer is None:
            return _STATES * sum(param.nbytes for group in self._groups for param in _trainable(group))
        return sum(
            round(
                _state_bytes(self.optimizer, params)
                * _count_elements(_trainable(group))
                / max(1, _count_elements(params))
            )
            for group, params in zip(self._groups, self._params, strict=True)
        )

    def measure_passes(self, device: torch.device) -> Timing:
        """Estimate the time of a step without an optimizer, by copying."""
        source = torch.zeros(max(1, sum(map(_count_elements, self._params))), device=device)
        target = torch.zeros_like(source)
        timing = measure_time(lambda: target.copy_(source), device)
        return Timing(timing.seconds * _PASSES, timing.noise)

    def _build(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        kind = type(optimizer)
        try:
            accepted = inspect.signature(kind).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
            groups = [
                {**{name: value for name, value in group.items() if name != "param_names"}, "params": params}
                for group, params in zip(self._groups, self._params, strict=True)
            ]
            twin = kind(groups, **settings)
            twin.step()
        except Exception:  # noqa: BLE001 (it is the user's code, and there is another way)
            return None
        return twin


def _transient_bytes(twin: torch.optim.Optimizer | None, device: torch.device, scale: float) -> int:
    """Measure the temporary memory of a step on a GPU, which steps all parameters at once.

    A CPU steps one parameter after another, which needs next to nothing.
    """
    if twin is None or device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    twin.step()
    peak_bytes = round(max(0, torch.cuda.max_memory_allocated(device) - before) * scale)
    return segmented_bytes(peak_bytes)


def _expected_s(twin: torch.optim.Optimizer, device: torch.device) -> float:
    """Time one step, to know how many fill a window; not needed on a CPU."""
    return 0.0 if device.type == "cpu" else measure_time(twin.step, device).seconds


def _sample_params(params: Iterable[nn.Parameter], device: torch.device, elements: int) -> list[nn.Parameter]:
    """Create parameters that represent all: every n-th by size, with large ones shortened."""
    ordered = sorted(params, key=lambda param: -param.numel())
    largest = max(1, int(_LARGEST_FRACTION * elements))
    shapes = [(_shorten(param.shape, largest), param.dtype) for param in ordered]
    stride = max(1, -(-sum(shape.numel() for shape, _ in shapes) // elements))
    sampled = []
    for shape, dtype in shapes[::stride]:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        param.grad = torch.full_like(param, 1e-3)
        sampled.append(param)
    return sampled


def _shorten(shape: torch.Size, largest: int) -> torch.Size:
    """Reduce the first dimension so that a shape has about `largest` elements."""
    if shape.numel() <= largest:
        return shape
    return torch.Size((max(1, largest // max(1, shape[1:].numel())), *shape[1:]))


def _state_bytes(twin: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> int:
    return sum(
        value.nbytes
        for param in params
        for value in twin.state.get(param, {}).values()
        if isinstance(value, torch.Tensor) and value.numel() == param.numel() and value.dim() == param.dim()
    )


def _trainable(group: Mapping[str, Any]) -> list[nn.Parameter]:
    return [param for param in group["params"] if param.requires_grad]


def _count_elements(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)
