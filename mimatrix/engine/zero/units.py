"""Units: a model's parameters in groups that move together, each one flat buffer cut by shares.

A unit is a part of the module tree of a handy size. A tensor that several modules use (tied weights) is in the unit of
the first of them. Parameters of another type, or frozen ones beside those that learn, make a unit of their own.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mimatrix.core.errors import UserError

_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Torch's modules that use their children's parameters without running the children."""
_ALIGNED = 64
"""Bytes: where every parameter of a unit starts, so that kernels find it aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitParam:
    """One parameter in its unit: elements [start, stop) of the flat buffer. `names`: all that the model has for it."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    index: int
    """Its number in the model."""
    modules: tuple[nn.Module, ...]
    """Those that use it."""
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat tensor, in its shape."""
        return flat[self.start : self.stop].view(self.shape)

    def strided_view(self, flat: torch.Tensor) -> torch.Tensor:
        """The same laid out as the parameter is (channels last, say), which fused optimizers want of gradients."""
        return flat[self.start : self.stop].as_strided(self.shape, self.strides)

    @property
    def strides(self) -> tuple[int, ...]:
        """How the parameter lies in memory, where it fills a piece of it; otherwise row by row."""
        found, expected = self.parameter.stride(), 1
        for size, stride in sorted(zip(self.shape, found, strict=True), key=lambda dimension: dimension[1]):
            if size > 1 and stride != expected:
                return torch.empty(self.shape, device="meta").stride()
            expected *= size
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that move together, and the modules that use them."""

    index: int
    params: tuple[UnitParam, ...]
    modules: tuple[nn.Module, ...]
    count: int
    """Elements of the flat buffer, gaps included."""
    shared: bool
    """Used by modules of other units too: gathered for the whole micro-step."""
    trainable: bool
    """Whether its parameters have gradients; one that is frozen later has none in its steps, and stays."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all of it."""
        return self.params[0].parameter.dtype

    @property
    def device(self) -> torch.device:
        """Of all of it."""
        return self.params[0].parameter.device

    @property
    def name(self) -> str:
        """The first parameter's, for people."""
        return self.params[0].names[0]

    @property
    def bytes(self) -> int:
        """Of the flat buffer."""
        return self.count * self.dtype.itemsize

    def flattened(self) -> torch.Tensor:
        """A copy of the parameters in a new flat buffer."""
        flat = torch.zeros(self.count, dtype=self.dtype, device=self.device)
        for param in self.params:
            param.view(flat).copy_(param.parameter.detach())
        return flat

    def move_into(self, flat: torch.Tensor) -> None:
        """Move the parameters into a flat buffer; they stay the same objects."""
        flat.zero_()
        for param in self.params:
            view = param.view(flat)
            view.copy_(param.parameter.detach())
            param.parameter.data = view

    def zero_gaps(self, flat: torch.Tensor) -> None:
        """Between parameters, and behind the last, is nothing."""
        for piece, end in zip(self.params, [*(piece.start for piece in self.params[1:]), self.count], strict=True):
            if piece.stop < end:
                flat[piece.stop : end].zero_()


@dataclass
class _ParamUse:
    """One parameter: its names and the modules that have it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)


def units_of(model: nn.Module, unit_bytes: int, whole: tuple[type[nn.Module], ...] = ()) -> tuple[Unit, ...]:
    """All parameters of a model in units, in the order of the module tree.

    Modules of the classes in `whole` use their children's parameters without running the children: they stay whole.
    """
    covers = _covers(model, (*_WHOLE, *whole))
    uses = _uses(model, covers)
    if not any(use.parameter.requires_grad for use in uses.values()):
        raise UserError("the model has no parameter that learns; set requires_grad on some before prepare")
    owners = {module: number for number, block in enumerate(_blocks(covers, unit_bytes)) for module in block}
    boxes: dict[tuple[int, torch.dtype, torch.device, bool], list[_ParamUse]] = {}
    for use in uses.values():
        parameter = use.parameter
        key = (owners[use.modules[0]], parameter.dtype, parameter.device, parameter.requires_grad)
        boxes.setdefault(key, []).append(use)
    numbers = {id(use.parameter): number for number, use in enumerate(uses.values())}
    return tuple(_unit(index, box, key[0], owners, numbers) for index, (key, box) in enumerate(boxes.items()))


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked for a model, or for a part of it."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes long, and who compiles has it
    return any(
        module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))
        for module in model.modules()
    )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state dict, by all their names."""
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[(f"{prefix}.{name}" if prefix else name).replace("_orig_mod.", "")] = buffer
    return buffers


def check_frozen(units: Sequence[Unit]) -> None:
    """Refuse parameters that began to learn after they were put into units."""
    for unit in units:
        for piece in () if unit.trainable else unit.params:
            if piece.parameter.requires_grad:
                raise UserError(
                    f"{piece.names[0]} began to learn after run.prepare; set requires_grad before it and give the "
                    "parameter an lr of 0 for as long as it shall stay"
                )


def _unit(
    index: int, box: Sequence[_ParamUse], block: int, owners: dict[nn.Module, int], numbers: dict[int, int]
) -> Unit:
    pieces, at = [], 0
    gap = max(1, _ALIGNED // box[0].parameter.dtype.itemsize)
    for use in box:
        number = numbers[id(use.parameter)]
        pieces.append(UnitParam(tuple(use.names), use.parameter, number, tuple(use.modules), at, use.parameter.shape))
        at += -(-use.parameter.numel() // gap) * gap
    modules = tuple(dict.fromkeys(module for use in box for module in use.modules))
    shared, trainable = any(owners[module] != block for module in modules), box[0].parameter.requires_grad
    return Unit(index, tuple(pieces), modules, at, shared=shared, trainable=trainable)


def _covers(model: nn.Module, whole: tuple[type[nn.Module], ...]) -> dict[nn.Module, nn.Module]:
    """For every module the one that is whole and has it inside, otherwise itself; in the order of the tree."""
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        inside = module.modules() if isinstance(module, whole) and module not in found else [module]
        for each in inside:
            found.setdefault(each, module)
    return found


def _uses(model: nn.Module, covers: dict[nn.Module, nn.Module]) -> dict[int, _ParamUse]:
    """Every parameter once, in the order of the tree, with all its names and modules."""
    found: dict[int, _ParamUse] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(parameter, UninitializedParameter):
                raise UserError(f"{full} has no shape yet; run the model once on a batch before run.prepare")
            use = found.setdefault(id(parameter), _ParamUse(parameter))
            use.names.append(full)
            use.modules.append(covers[module])
    return found


def _blocks(covers: dict[nn.Module, nn.Module], unit_bytes: int) -> Iterator[list[nn.Module]]:
    """Modules that go together: neighbours in the tree, until they are as large as a unit should be."""
    sizes = dict.fromkeys(covers.values(), 0)
    seen: set[int] = set()
    for module, cover in covers.items():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                sizes[cover] += parameter.numel() * parameter.element_size()
    block: list[nn.Module] = []
    total = 0
    for module, size in sizes.items():
        if total and total + size > unit_bytes:
            yield block
            block, total = [], 0
        block.append(module)
        total += size
    yield block
