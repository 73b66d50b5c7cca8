"""What a checkpoint contains: this rank's part of every tensor, flat and copied, and metadata.

Tensors have neither shape nor owner on disk: each is `count` elements, and any rank may write and read any run of them.
So a checkpoint saved in one stage, by some number of ranks with some shares, can be loaded in any other.

    model.<name>              a parameter or a buffer
    optimizer.<name>.<key>    per-element optimizer state of a parameter
    random.<rank>             the RNG states of a rank
    outer...                  the state that groups share in hybrid mode
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mimatrix import __version__
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import rng_state as chance
from mimatrix.engine.checkpoint.json_codec import dtype_name, pack
from mimatrix.engine.checkpoint.storage import TensorSlice
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.outer_optimizer import OuterOptimizer, OuterState
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.engine.zero.sharding import Zero0, Zero1
from mimatrix.engine.zero.single import SingleProcess
from mimatrix.engine.zero.units import Unit, UnitParam
from mimatrix.planner.split import Split

Metadata = dict[str, Any]
"""Everything in a checkpoint but its tensors, as JSON."""


class HasLRScheduler(Protocol):
    """An LR scheduler, and how often it was stepped."""

    scheduler: LRScheduler
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is in its training, and how batches and states are split over ranks."""

    step: int
    position: DataPosition
    split: Split
    shares: Shares
    seed: int
    idle: tuple[int, ...] = ()
    """The ranks without data in the last global batch."""

    @property
    def leader(self) -> int:
        """The rank that writes what all ranks share: one that had data, since others lag behind in the loop."""
        return next(rank for rank in range(self.split.ranks) if rank not in self.idle)

    def to_json(self) -> Metadata:
        """Return the progress as JSON, for people and for `run.load`."""
        return {
            "step": self.step,
            "position": self.position.to_json(),
            "seed": self.seed,
            "global_batch": self.split.total,
            "split": self.split.to_json(),
            "shares": list(self.shares.fractions),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything that a checkpoint covers, as one rank holds it."""

    model: nn.Module
    sharding: Zero0 | SingleProcess
    binding: ShardedOptimizer
    scale: LossScale
    schedulers: Sequence[HasLRScheduler]
    rank: int
    ranks: int
    device: torch.device
    outer: OuterOptimizer | None = None

    def pieces(self) -> Iterator["OwnedElements"]:
        """Yield all parameters with the elements that this rank writes; tied ones once."""
        for unit in self.sharding.units:
            part = self._part(unit)
            for piece in unit.pieces:
                start, stop = (min(max(end, piece.start), piece.stop) - piece.start for end in (part.start, part.stop))
                yield OwnedElements(unit, piece, start, stop)

    def _part(self, unit: Unit) -> range:
        if isinstance(self.sharding, Zero1):
            return self.sharding.held[unit].part
        # Every rank has all elements: each writes an equal part.
        sizes = Shares.equal(self.ranks).cut(unit.count)
        return range(sum(sizes[: self.rank]), sum(sizes[: self.rank + 1]))

    @property
    def cuts(self) -> bool:
        """Whether each rank has only its shard of the optimizer state."""
        return isinstance(self.sharding, Zero1)

    def values(self, owned: "OwnedElements") -> torch.Tensor:
        """Return the elements of a parameter that this rank writes."""
        if isinstance(self.sharding, Zero1):
            held = self.sharding.held[owned.unit]
            offset = owned.piece.start - held.part.start
            return (
                held.owned[offset + owned.start : offset + owned.stop] if owned.start < owned.stop else held.owned[:0]
            )
        return owned.piece.parameter.detach().reshape(-1)[owned.start : owned.stop]


@dataclass(frozen=True, slots=True)
class OwnedElements:
    """Elements [start, stop) of a parameter; may be empty."""

    unit: Unit
    piece: UnitParam
    start: int
    stop: int

    @property
    def names(self) -> list[str]:
        """All names of the parameter in the model, without the prefix that torch.compile adds."""
        return [name.replace("_orig_mod.", "") for name in self.piece.names]

    @property
    def count(self) -> int:
        """The number of elements of the whole parameter."""
        return self.piece.shape.numel()


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """One rank's part of a checkpoint, copied, so that training can continue."""

    step: int
    parts: dict[str, TensorSlice]
    metadata: Metadata
    outer: Callable[[], OuterState]
    """Fetches the state that groups share; or raises what failed when it was marked, in the thread that writes, where
    the failure reaches all ranks."""


def take_snapshot(subject: TrainState, progress: Progress, *, late: bool) -> StagedCheckpoint:
    """Copy this rank's part; the leader also copies what all ranks share.

    Args:
        subject: What to copy.
        progress: Where the run is.
        late: Whether other ranks took theirs before, so that this one may only give what changes in a step alone.
    """
    leads = subject.rank == progress.leader and not late
    parts: dict[str, TensorSlice] = {}
    metadata: Metadata = {"late": late, "state": {}, "groups": param_group_names(subject)}
    element_keys = _per_element_keys(subject)
    for owned in subject.pieces():
        name = owned.names[0]
        if owned.start < owned.stop:
            parts[f"model.{name}"] = TensorSlice(_copy_flat(subject.values(owned)), owned.start, owned.count)
        optimizer_state = dict(_snapshot_optimizer_state(subject, owned, element_keys, parts, leads))
        if optimizer_state:
            metadata["state"][name] = optimizer_state
    parts[f"random.{subject.rank}"] = _whole_tensor(chance.now(subject.device))
    if leads:
        metadata["common"] = _shared_metadata(subject, progress)
        for name, buffer in persistent_buffers(subject.model).items():
            if buffer.numel():
                parts[f"model.{name}"] = _whole_tensor(_copy_flat(buffer))
    return StagedCheckpoint(progress.step, parts, metadata, _mark_outer(subject.outer))


def merge_metadata(by_rank: Sequence[Metadata], step: int) -> Metadata:
    """Merge the metadata of all ranks, given in their order."""
    merged: Metadata | None = next((metadata["common"] for metadata in by_rank if "common" in metadata), None)
    if merged is None:
        missing = next((rank for rank, metadata in enumerate(by_rank) if metadata["late"]), 0)
        raise UserError(f"rank {missing} did not call run.save at step {step}, and others did; call it on all ranks")
    for number, group in enumerate(merged["groups"]):
        members = {name for metadata in by_rank for name in metadata["groups"][number]}
        group["names"] = [name for name in merged["parameters"] if name in members]
    outer = [metadata["outer"] for metadata in by_rank if metadata.get("outer")]
    states = {name: state for metadata in by_rank for name, state in metadata["state"].items()}
    return merged | {"state": states} | ({"outer": outer[0]} if outer else {})


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the state of a model, by all their names."""
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[(f"{prefix}.{name}" if prefix else name).replace("_orig_mod.", "")] = buffer
    return buffers


def describe_tensor(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Metadata:
    """Describe a tensor, for comparing it with a saved one."""
    return {"shape": list(tensor.shape if shape is None else shape), "dtype": dtype_name(tensor.dtype)}


def _mark_outer(outer: OuterOptimizer | None) -> Callable[[], OuterState]:
    if outer is None:
        return OuterState
    try:
        return outer.mark()
    except Exception as error:  # noqa: BLE001 (raised by the returned function)
        return partial(_raise, error)


def _raise(error: Exception) -> OuterState:
    raise error


def _shared_metadata(subject: TrainState, progress: Progress) -> Metadata:
    """Describe what is the same on every rank."""
    parameters = {
        owned.names[0]: {**describe_tensor(owned.piece.parameter, owned.piece.shape), "names": owned.names}
        for owned in subject.pieces()
    }
    optimizer = subject.binding.optimizer
    return {
        **progress.to_json(),
        "ranks": subject.ranks,
        "stage": subject.sharding.stage,
        "versions": {"mimatrix": __version__, "torch": str(torch.__version__)},
        "optimizer": type(optimizer).__name__,
        "groups": [{"settings": pack(_group_settings(group))} for group in optimizer.param_groups],
        "schedulers": [_describe_scheduler(synced) for synced in subject.schedulers],
        "loss_scale": {"value": subject.scale.value, "good": subject.scale.good, "on": subject.scale.on},
        "parameters": parameters,
        "buffers": {name: describe_tensor(buffer) for name, buffer in persistent_buffers(subject.model).items()},
    }


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _describe_scheduler(synced: HasLRScheduler) -> Metadata:
    # `step` is the run's own method, which replaces that of the class.
    state = {name: value for name, value in synced.scheduler.state_dict().items() if name != "step"}
    return {"class": type(synced.scheduler).__name__, "calls": synced.calls, "state": pack(state)}


def param_group_names(subject: TrainState) -> list[list[str]]:
    """Return, for each param group, the names of the parameters of which this rank owns elements."""
    leaves = subject.binding.leaves
    names = {
        leaves[owned.piece.parameter]: owned.names[0] for owned in subject.pieces() if owned.piece.parameter in leaves
    }
    return [[names[leaf] for leaf in group["params"]] for group in subject.binding.optimizer.param_groups]


def _per_element_keys(subject: TrainState) -> set[str]:
    """Return the keys of optimizer state that has one value per element.

    For a parameter that is a scalar, shapes do not tell; the other parameters do.
    """
    states = [(leaf, subject.binding.optimizer.state.get(leaf, {})) for leaf in subject.binding.leaves.values()]
    kinds: dict[str, list[bool]] = {}
    for leaf, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                has_shape = kinds.setdefault(key, [])
                if leaf.dim():
                    has_shape.append(value.shape == leaf.shape)
    return {key for key, has_shape in kinds.items() if all(has_shape) and (has_shape or key != "step")}


def _snapshot_optimizer_state(
    subject: TrainState, owned: OwnedElements, element_keys: set[str], parts: dict[str, TensorSlice], leads: bool
) -> Iterator[tuple[str, Metadata]]:
    """Copy the optimizer state of a parameter into `parts`, and yield its metadata by key."""
    leaf = subject.binding.leaves.get(owned.piece.parameter)
    state = subject.binding.optimizer.state.get(leaf, {}) if leaf is not None else {}
    for key, value in state.items():
        path = f"optimizer.{owned.names[0]}.{key}"
        if not isinstance(value, torch.Tensor) or (key not in element_keys and value.dim() == 0):
            yield key, {"is": "value", "value": pack(value)}
        elif key in element_keys:
            flat = value.detach().reshape(-1)
            cut = flat if subject.cuts else flat[owned.start : owned.stop]
            if owned.start < owned.stop:
                parts[path] = TensorSlice(_copy_flat(cut), owned.start, owned.count)
            yield key, {"is": "elements", "dtype": dtype_name(value.dtype)}
        else:
            if leads and value.numel():
                parts[path] = _whole_tensor(_copy_flat(value))
            yield key, {"is": "whole", **describe_tensor(value)}


def _copy_flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).reshape(-1)


def _whole_tensor(flat: torch.Tensor) -> TensorSlice:
    return TensorSlice(flat, 0, flat.numel())
