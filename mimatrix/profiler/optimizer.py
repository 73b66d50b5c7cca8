"""What an optimizer costs, found on a small twin of it: the user's own has not stepped and does not."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mimatrix.profiler.memory_budget import in_segments
from mimatrix.profiler.timing import Timing, timed

TWIN_ELEMENTS = 4 << 20
_LARGEST_PIECE = 0.25
"""Of all elements of a twin."""
_FEW_ELEMENTS = 1 << 16
"""Enough to see what is kept for each."""
_PASSES = 3
"""Over the parameters, in a step of an optimizer that has no twin: read, read the gradient, write."""
_STATES = 2
"""Tensors like the parameters that such an optimizer keeps: as Adam does, and few keep more."""


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """One step over all elements, and what is kept from step to step."""

    seconds: float
    state_bytes: int
    passing_bytes: int = 0
    """What a step holds while it lasts, beside the state: some make tensors like all parameters, and drop them."""


def learning(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What an optimizer steps."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """What it will keep for all that it steps."""
    return _Twin(optimizer, device, _FEW_ELEMENTS).state_bytes()


def optimizer_cost(
    optimizer: torch.optim.Optimizer, device: torch.device, elements: int = TWIN_ELEMENTS
) -> OptimizerCost:
    """What one step takes on this device, and what it keeps, by a twin of about so many elements."""
    if not learning(optimizer):
        return OptimizerCost(0.0, 0)
    twin = _Twin(optimizer, device, elements)
    took = timed(twin.made.step, device, _expected(twin.made, device)) if twin.made else twin.three_passes(device)
    return OptimizerCost(took.seconds * twin.scale, twin.state_bytes(), _passing(twin.made, device, twin.scale))


class _Twin:
    """One of the same kind and settings over few elements, which has stepped once."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, elements: int) -> None:
        self._groups = [group for group in optimizer.param_groups if _learns(group)]
        every = max(1, sum(_elements(_learns(group)) for group in self._groups))
        self._pieces = [
            _pieces(_learns(group), device, max(1, elements * _elements(_learns(group)) // every))
            for group in self._groups
        ]
        self.scale = every / max(1, sum(map(_elements, self._pieces)))
        """How many times as many elements there are."""
        self.made = self._made(optimizer)
        """None where it cannot be made that way."""

    def state_bytes(self) -> int:
        """For all parameters what the twin keeps for its own; numbers such as a count of steps do not grow."""
        if self.made is None:
            known = [each for group in self._groups for each in _learns(group)]
            return _STATES * sum(each.numel() * each.element_size() for each in known)
        return sum(
            round(_kept(self.made, pieces) * _elements(_learns(group)) / max(1, _elements(pieces)))
            for group, pieces in zip(self._groups, self._pieces, strict=True)
        )

    def three_passes(self, device: torch.device) -> Timing:
        """About what a step takes, where there is none."""
        flat = torch.zeros(max(1, sum(map(_elements, self._pieces))), device=device)
        other = torch.zeros_like(flat)
        took = timed(lambda: other.copy_(flat), device)
        return Timing(took.seconds * _PASSES, took.noise)

    def _made(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        kind = type(optimizer)
        try:
            known = inspect.signature(kind).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in known}
            groups = [
                {**{name: value for name, value in group.items() if name != "param_names"}, "params": pieces}
                for group, pieces in zip(self._groups, self._pieces, strict=True)
            ]
            twin = kind(groups, **settings)
            twin.step()
        except Exception:  # noqa: BLE001 (it is anybody's code, and there is another way)
            return None
        return twin


def _passing(twin: torch.optim.Optimizer | None, device: torch.device, scale: float) -> int:
    """On a GPU parameters are stepped all at once; on a CPU one after the other, which holds next to nothing."""
    if twin is None or device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    twin.step()
    held = round(max(0, torch.cuda.max_memory_allocated(device) - before) * scale)
    return in_segments(held)


def _expected(twin: torch.optim.Optimizer, device: torch.device) -> float:
    """One step, to know how many fill a window; on a CPU nobody asks."""
    return 0.0 if device.type == "cpu" else timed(twin.step, device).seconds


def _pieces(parameters: Iterable[nn.Parameter], device: torch.device, elements: int) -> list[nn.Parameter]:
    """Fresh parameters that stand for all: every n-th by size, large ones cut, so that they stay few and small."""
    ordered = sorted(parameters, key=lambda each: -each.numel())
    largest = max(1, int(_LARGEST_PIECE * elements))
    shapes = [(_cut(each.shape, largest), each.dtype) for each in ordered]
    every = max(1, -(-sum(shape.numel() for shape, _ in shapes) // elements))
    found = []
    for shape, dtype in shapes[::every]:
        piece = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        piece.grad = torch.full_like(piece, 1e-3)
        found.append(piece)
    return found


def _cut(shape: torch.Size, largest: int) -> torch.Size:
    """The same in all but the first dimension, which is shortened where that is needed."""
    if shape.numel() <= largest:
        return shape
    return torch.Size((max(1, largest // max(1, shape[1:].numel())), *shape[1:]))


def _kept(twin: torch.optim.Optimizer, pieces: Iterable[nn.Parameter]) -> int:
    return sum(
        value.numel() * value.element_size()
        for piece in pieces
        for value in twin.state.get(piece, {}).values()
        if isinstance(value, torch.Tensor) and value.numel() == piece.numel() and value.dim() == piece.dim()
    )


def _learns(group: Mapping[str, Any]) -> list[nn.Parameter]:
    return [each for each in group["params"] if each.requires_grad]


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)
