"""Units: a model's parameters in groups that move together, each one flat buffer that is sharded.

A unit is a part of the module tree of a limited size. A tensor that several modules use (tied weights) is in the unit
of the first of them. Parameters of another dtype get a unit of their own, and so do frozen ones.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mimatrix.core.errors import UserError

_LEAF_MODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Torch's modules that use their children's parameters without running the children."""
_ALIGNMENT_BYTES = 64
"""Every parameter of a unit starts at a multiple, so that kernels find it aligned."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnitParam:
    """One parameter of a unit: elements [start, stop) of the flat buffer."""

    names: tuple[str, ...]
    """All names that the model has for it; more than one where it is tied."""
    parameter: nn.Parameter
    index: int
    """Its position among all parameters of the model."""
    modules: tuple[nn.Module, ...]
    """The modules that use it."""
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The element after its last one."""
        return self.start + self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its part of a flat tensor, in its shape and contiguous."""
        return flat[self.start : self.stop].view(self.shape)

    def strided_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its part of a flat tensor with the parameter's strides, as fused optimizers want gradients."""
        return flat[self.start : self.stop].as_strided(self.shape, self.strides)

    @property
    def strides(self) -> tuple[int, ...]:
        """The parameter's strides (channels last, for example) if it is dense in memory, else those of rows."""
        strides, expected = self.parameter.stride(), 1
        for size, stride in sorted(zip(self.shape, strides, strict=True), key=lambda dimension: dimension[1]):
            if size > 1 and stride != expected:
                return torch.empty(self.shape, device="meta").stride()
            expected *= size
        return strides


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unit:
    """Parameters that move together, and the modules that use them."""

    index: int
    params: tuple[UnitParam, ...]
    modules: tuple[nn.Module, ...]
    count: int
    """Elements of the flat buffer, gaps included."""
    shared: bool
    """Whether modules of other units use it too, so that it stays gathered for the whole micro-step."""
    trainable: bool
    """Whether its parameters have gradients; one that is frozen later gets none, and stays in its unit."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all its parameters."""
        return self.params[0].parameter.dtype

    @property
    def device(self) -> torch.device:
        """The device of all its parameters."""
        return self.params[0].parameter.device

    @property
    def name(self) -> str:
        """The name of its first parameter, for messages."""
        return self.params[0].names[0]

    @property
    def bytes(self) -> int:
        """The size of the flat buffer."""
        return self.count * self.dtype.itemsize

    def flatten(self) -> torch.Tensor:
        """Return a copy of the parameters in a new flat buffer."""
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
        """Zero a flat buffer between the parameters, and behind the last one."""
        for param, end in zip(self.params, [*(param.start for param in self.params[1:]), self.count], strict=True):
            if param.stop < end:
                flat[param.stop : end].zero_()


@dataclass
class _ParamUse:
    """One parameter: its names and the modules that have it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)


def split_into_units(
    model: nn.Module, unit_bytes: int, leaf_modules: tuple[type[nn.Module], ...] = ()
) -> tuple[Unit, ...]:
    """Put all parameters of a model into units of about `unit_bytes`, in the order of the module tree.

    Modules of the classes in `leaf_modules` use their children's parameters without running the children, so they are
    not divided.
    """
    leaves = _find_leaves(model, (*_LEAF_MODULES, *leaf_modules))
    uses = _find_uses(model, leaves)
    if not any(use.parameter.requires_grad for use in uses.values()):
        raise UserError("the model has no trainable parameter; set requires_grad on some before run.prepare")
    owners = {module: number for number, block in enumerate(_blocks(leaves, unit_bytes)) for module in block}
    groups: dict[tuple[int, torch.dtype, torch.device, bool], list[_ParamUse]] = {}
    for use in uses.values():
        parameter = use.parameter
        key = (owners[use.modules[0]], parameter.dtype, parameter.device, parameter.requires_grad)
        groups.setdefault(key, []).append(use)
    indices = {id(use.parameter): index for index, use in enumerate(uses.values())}
    return tuple(
        _build_unit(number, group, key[0], owners, indices) for number, (key, group) in enumerate(groups.items())
    )


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is compiled by torch.compile."""
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and loaded already if anything is compiled
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
    """Raise `UserError` if a parameter became trainable after it was put into a unit."""
    for unit in units:
        for param in () if unit.trainable else unit.params:
            if param.parameter.requires_grad:
                raise UserError(
                    f"{param.names[0]} became trainable after run.prepare; set requires_grad before it, and keep the "
                    "parameter frozen with an lr of 0"
                )


def _build_unit(
    number: int, uses: Sequence[_ParamUse], block: int, owners: dict[nn.Module, int], indices: dict[int, int]
) -> Unit:
    params, start = [], 0
    alignment = max(1, _ALIGNMENT_BYTES // uses[0].parameter.dtype.itemsize)
    for use in uses:
        params.append(
            UnitParam(
                names=tuple(use.names),
                parameter=use.parameter,
                index=indices[id(use.parameter)],
                modules=tuple(use.modules),
                start=start,
                shape=use.parameter.shape,
            )
        )
        start += -(-use.parameter.numel() // alignment) * alignment
    modules = tuple(dict.fromkeys(module for use in uses for module in use.modules))
    return Unit(
        index=number,
        params=tuple(params),
        modules=modules,
        count=start,
        shared=any(owners[module] != block for module in modules),
        trainable=uses[0].parameter.requires_grad,
    )


def _find_leaves(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[nn.Module, nn.Module]:
    """Map every module to the leaf module that contains it, otherwise to itself; in the order of the tree."""
    leaves: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        members = module.modules() if isinstance(module, classes) and module not in leaves else [module]
        for member in members:
            leaves.setdefault(member, module)
    return leaves


def _find_uses(model: nn.Module, leaves: dict[nn.Module, nn.Module]) -> dict[int, _ParamUse]:
    """Return every parameter once, in the order of the tree, with all its names and modules."""
    uses: dict[int, _ParamUse] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if isinstance(parameter, UninitializedParameter):
                raise UserError(f"{full_name} has no shape yet; run the model once on a batch before run.prepare")
            use = uses.setdefault(id(parameter), _ParamUse(parameter))
            use.names.append(full_name)
            use.modules.append(leaves[module])
    return uses


def _blocks(leaves: dict[nn.Module, nn.Module], unit_bytes: int) -> Iterator[list[nn.Module]]:
    """Yield neighbours in the module tree, as many as fit into a unit."""
    sizes = dict.fromkeys(leaves.values(), 0)
    seen: set[int] = set()
    for module, leaf in leaves.items():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                sizes[leaf] += parameter.nbytes
    block: list[nn.Module] = []
    total = 0
    for module, size in sizes.items():
        if total and total + size > unit_bytes:
            yield block
            block, total = [], 0
        block.append(module)
        total += size
    yield block
