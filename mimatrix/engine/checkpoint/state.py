"""What a checkpoint contains: this rank's part of every tensor, flat and copied, and metadata.

Tensors have neither shape nor owner on disk: each is `count` elements, and any rank may write and read any run of them.
So a checkpoint saved in one stage, by some number of ranks with some shares, can be loaded in any other.

    model.<name>              a parameter or a buffer
    optimizer.<name>.<key>    per-element optimizer state of a parameter
    average.<number>.<name>   an average of a parameter (EMA, SWA)
    random.<rank>             the RNG states of a rank
    user.<number>             a tensor of the state that the user gave `run.save`
    outer...                  the state that groups share in hybrid mode
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mimatrix import __version__
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import rng_state
from mimatrix.engine.checkpoint.json_codec import dtype_name, pack
from mimatrix.engine.checkpoint.outer_state import OuterCheckpoint, OuterState
from mimatrix.engine.checkpoint.tensor_files import TensorSlice
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.stream import StreamMode, stream_to_json
from mimatrix.engine.modules.averaged_weights import AverageRegistry, check_same_updates
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.engine.zero.units import Unit, UnitParam, persistent_buffers
from mimatrix.planner.model.split import Split

Metadata = dict[str, Any]
"""Everything in a checkpoint but its tensors, as JSON."""


class HasLRScheduler(Protocol):
    """An LR scheduler, and how often it was stepped."""

    scheduler: LRScheduler
    calls: int

    def restore(self, state_dict: dict[str, Any], calls: int) -> None:
        """Load a saved state, and how often the scheduler had been stepped."""


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
    strategy: ShardingStrategy
    optimizer: ShardedOptimizer
    scale: LossScale
    lr_schedulers: Sequence[HasLRScheduler]
    rank: int
    world_size: int
    device: torch.device
    outer: OuterCheckpoint | None = None
    averages: AverageRegistry = field(default_factory=AverageRegistry)
    stream_mode: StreamMode | None = None
    """How an iterable dataset is read; None for others."""

    def owned_elements(self) -> Iterator["OwnedElements"]:
        """Yield all parameters with the elements that this rank writes; tied ones once."""
        for unit in self.strategy.units:
            owned = self.strategy.owned_range(unit)
            for param in unit.params:
                start, stop = (
                    min(max(end, param.start), param.stop) - param.start for end in (owned.start, owned.stop)
                )
                yield OwnedElements(unit, param, start, stop)

    def values(self, owned: "OwnedElements") -> torch.Tensor:
        """Return the elements of a parameter that this rank writes."""
        shard = self.strategy.owned_values(owned.unit)
        if shard is None:
            return owned.param.parameter.detach().reshape(-1)[owned.start : owned.stop]
        offset = owned.param.start - self.strategy.owned_range(owned.unit).start
        return shard[offset + owned.start : offset + owned.stop] if owned.start < owned.stop else shard[:0]


@dataclass(frozen=True, slots=True)
class OwnedElements:
    """Elements [start, stop) of a parameter; may be empty."""

    unit: Unit
    param: UnitParam
    start: int
    stop: int

    @property
    def names(self) -> list[str]:
        """All names of the parameter in the model, without the prefix that torch.compile adds."""
        return [name.replace("_orig_mod.", "") for name in self.param.names]

    @property
    def count(self) -> int:
        """The number of elements of the whole parameter."""
        return self.param.shape.numel()


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """One rank's part of a checkpoint, copied, so that training can continue."""

    step: int
    parts: dict[str, TensorSlice]
    metadata: Metadata
    outer: Callable[[], OuterState]
    """Fetches the state that groups share; or raises what failed when it was marked, in the thread that writes, where
    the failure reaches all ranks."""


def take_snapshot(train_state: TrainState, progress: Progress, *, late: bool) -> StagedCheckpoint:
    """Copy this rank's part; the leader also copies what all ranks share.

    Args:
        train_state: What to copy.
        progress: Where the run is.
        late: Whether other ranks took theirs before, so that this one may only give what changes in a step alone.
    """
    leads = train_state.rank == progress.leader and not late
    parts: dict[str, TensorSlice] = {}
    metadata: Metadata = {"late": late, "state": {}, "groups": param_group_names(train_state)}
    metadata["stream"] = stream_to_json(progress.position.stream, train_state.stream_mode)
    element_keys = _per_element_keys(train_state)
    for owned in train_state.owned_elements():
        name = owned.names[0]
        if owned.start < owned.stop:
            parts[f"model.{name}"] = TensorSlice(_copy_flat(train_state.values(owned)), owned.start, owned.count)
        optimizer_state = dict(_snapshot_optimizer_state(train_state, owned, element_keys, parts, leads))
        if optimizer_state:
            metadata["state"][name] = optimizer_state
        parts |= _snapshot_averages(train_state, owned)
    metadata["averages"] = [[average.kind, average.updates] for average in train_state.averages.all]
    parts[f"random.{train_state.rank}"] = _whole_tensor(rng_state.save_rng_state(train_state.device))
    if leads:
        metadata["common"] = _shared_metadata(train_state, progress)
        for name, buffer in persistent_buffers(train_state.model).items():
            if buffer.numel():
                parts[f"model.{name}"] = _whole_tensor(_copy_flat(buffer))
    return StagedCheckpoint(progress.step, parts, metadata, _mark_outer(train_state.outer))


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
    streams = [metadata["stream"] for metadata in by_rank]
    averages = _merge_averages([metadata["averages"] for metadata in by_rank])
    user_state = next(metadata["user_state"] for metadata in by_rank if "user_state" in metadata)
    return (
        merged
        | {"state": states, "averages": averages, "user_state": user_state, "streams": streams}
        | ({"outer": outer[0]} if outer else {})
    )


def _merge_averages(by_rank: Sequence[Sequence[tuple[str, int]]]) -> list[Metadata]:
    """Describe the averages, which all ranks must have made and updated alike."""
    kinds = [[kind for kind, _ in averages] for averages in by_rank]
    for rank, own in enumerate(kinds):
        if own != kinds[0]:
            raise UserError(
                f"rank {rank} has not made the same averages as rank 0; call run.ema and run.swa on all ranks"
            )
    for number, kind in enumerate(kinds[0]):
        check_same_updates(kind, [averages[number][1] for averages in by_rank])
    return [{"kind": kind, "updates": updates} for kind, updates in by_rank[0]]


def describe_tensor(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Metadata:
    """Describe a tensor, for comparing it with a saved one."""
    return {"shape": list(tensor.shape if shape is None else shape), "dtype": dtype_name(tensor.dtype)}


def _mark_outer(outer: OuterCheckpoint | None) -> Callable[[], OuterState]:
    if outer is None:
        return OuterState
    try:
        return outer.mark()
    except Exception as error:  # noqa: BLE001 (raised by the returned function)
        return partial(_raise, error)


def _raise(error: Exception) -> OuterState:
    raise error


def _shared_metadata(train_state: TrainState, progress: Progress) -> Metadata:
    """Describe what is the same on every rank."""
    parameters = {
        owned.names[0]: {**describe_tensor(owned.param.parameter, owned.param.shape), "names": owned.names}
        for owned in train_state.owned_elements()
    }
    optimizer = train_state.optimizer.optimizer
    return {
        **progress.to_json(),
        "ranks": train_state.world_size,
        "stage": train_state.strategy.stage,
        "versions": {"mimatrix": __version__, "torch": str(torch.__version__)},
        "optimizer": type(optimizer).__name__,
        "groups": [{"settings": pack(_group_settings(group))} for group in optimizer.param_groups],
        "schedulers": [_describe_scheduler(synced) for synced in train_state.lr_schedulers],
        "loss_scale": {"value": train_state.scale.value, "good": train_state.scale.good, "on": train_state.scale.on},
        "parameters": parameters,
        "buffers": {name: describe_tensor(buffer) for name, buffer in persistent_buffers(train_state.model).items()},
    }


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _describe_scheduler(synced: HasLRScheduler) -> Metadata:
    state = pack(synced.scheduler.state_dict())
    return {"class": type(synced.scheduler).__name__, "calls": synced.calls, "state": state}


def param_group_names(train_state: TrainState) -> list[list[str]]:
    """Return, for each param group, the names of the parameters of which this rank owns elements."""
    leaves = train_state.optimizer.shard_params
    names = {
        leaves[owned.param.parameter]: owned.names[0]
        for owned in train_state.owned_elements()
        if owned.param.parameter in leaves
    }
    return [[names[leaf] for leaf in group["params"]] for group in train_state.optimizer.optimizer.param_groups]


def _per_element_keys(train_state: TrainState) -> set[str]:
    """Return the keys of optimizer state that has one value per element.

    For a parameter that is a scalar, shapes do not tell; the other parameters do.
    """
    states = [
        (leaf, train_state.optimizer.optimizer.state.get(leaf, {}))
        for leaf in train_state.optimizer.shard_params.values()
    ]
    kinds: dict[str, list[bool]] = {}
    for leaf, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                has_shape = kinds.setdefault(key, [])
                if leaf.dim():
                    has_shape.append(value.shape == leaf.shape)
    return {key for key, has_shape in kinds.items() if all(has_shape) and (has_shape or key != "step")}


def _snapshot_optimizer_state(
    train_state: TrainState, owned: OwnedElements, element_keys: set[str], parts: dict[str, TensorSlice], leads: bool
) -> Iterator[tuple[str, Metadata]]:
    """Copy the optimizer state of a parameter into `parts`, and yield its metadata by key."""
    leaf = train_state.optimizer.shard_params.get(owned.param.parameter)
    state = train_state.optimizer.optimizer.state.get(leaf, {}) if leaf is not None else {}
    for key, value in state.items():
        path = f"optimizer.{owned.names[0]}.{key}"
        if not isinstance(value, torch.Tensor) or (key not in element_keys and value.dim() == 0):
            yield key, {"is": "value", "value": pack(value)}
        elif key in element_keys:
            flat = value.detach().reshape(-1)
            cut = flat if train_state.strategy.is_sharded else flat[owned.start : owned.stop]
            if owned.start < owned.stop:
                parts[path] = TensorSlice(_copy_flat(cut), owned.start, owned.count)
            yield key, {"is": "elements", "dtype": dtype_name(value.dtype)}
        else:
            if leads and value.numel():
                parts[path] = _whole_tensor(_copy_flat(value))
            yield key, {"is": "whole", **describe_tensor(value)}


def _snapshot_averages(train_state: TrainState, owned: OwnedElements) -> dict[str, TensorSlice]:
    """Copy what this rank owns of a parameter's averages."""
    if not owned.unit.trainable or owned.start >= owned.stop:
        return {}
    elements = range(owned.start, owned.stop)
    return {
        f"average.{number}.{owned.names[0]}": TensorSlice(
            _copy_flat(average.values(owned.unit, owned.param, elements)), owned.start, owned.count
        )
        for number, average in enumerate(train_state.averages.all)
    }


def _copy_flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).reshape(-1)


def _whole_tensor(flat: torch.Tensor) -> TensorSlice:
    return TensorSlice(flat, 0, flat.numel())
