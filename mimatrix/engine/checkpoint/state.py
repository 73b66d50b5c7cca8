"""What of a run is in a checkpoint: this rank's part of every tensor, flat and copied, and the facts beside them.

Tensors have no shape on disk and no owner: each is `count` elements, of which any rank writes and reads any run. So
what was saved in one stage, by so many ranks with such shares, is read in any other.

    model.<name>              a parameter or a buffer
    optimizer.<name>.<key>    what the optimizer keeps for each element of a parameter
    random.<rank>             the random states of a rank
    outer...                  what groups share that do not wait for each other
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
from mimatrix.engine.checkpoint import rng_state
from mimatrix.engine.checkpoint.json_codec import name_of, pack
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


class HasLRScheduler(Protocol):
    """A scheduler, and how often it was called."""

    scheduler: LRScheduler
    calls: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands and how it is cut."""

    step: int
    position: DataPosition
    split: Split
    shares: Shares
    seed: int
    idle: tuple[int, ...] = ()
    """Ranks that had no data in the last global batch."""

    @property
    def leader(self) -> int:
        """The rank that gives what all have alike: one that had data, since others are behind in the loop."""
        return next(rank for rank in range(self.split.ranks) if rank not in self.idle)

    def to_json(self) -> Metadata:
        """For people and for `run.load`."""
        return {
            "step": self.step,
            "position": self.position.to_json(),
            "seed": self.seed,
            "global_batch": self.split.total,
            "split": self.split.to_json(),
            "shares": list(self.shares.fractions),
        }


@dataclass(frozen=True, slots=True)
class TrainState:
    """What a checkpoint is of, as one rank has it."""

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
        """All parameters, each with what this rank has to write of it; tied ones once."""
        for unit in self.sharding.units:
            part = self._part(unit)
            for piece in unit.pieces:
                start, stop = (min(max(end, piece.start), piece.stop) - piece.start for end in (part.start, part.stop))
                yield OwnedElements(unit, piece, start, stop)

    def _part(self, unit: Unit) -> range:
        if isinstance(self.sharding, Zero1):
            return self.sharding.held[unit].part
        # Everybody has all of it: each writes as much as the others.
        sizes = Shares.equal(self.ranks).cut(unit.count)
        return range(sum(sizes[: self.rank]), sum(sizes[: self.rank + 1]))

    @property
    def cuts(self) -> bool:
        """Whether a rank has only its slices of the optimizer's state."""
        return isinstance(self.sharding, Zero1)

    def values(self, owned: "OwnedElements") -> torch.Tensor:
        """The elements of a parameter that this rank writes."""
        if isinstance(self.sharding, Zero1):
            held = self.sharding.held[owned.unit]
            offset = owned.piece.start - held.part.start
            return (
                held.owned[offset + owned.start : offset + owned.stop] if owned.start < owned.stop else held.owned[:0]
            )
        return owned.piece.parameter.detach().reshape(-1)[owned.start : owned.stop]


@dataclass(frozen=True, slots=True)
class OwnedElements:
    """Elements [start, stop) of a parameter, perhaps none."""

    unit: Unit
    piece: UnitParam
    start: int
    stop: int

    @property
    def names(self) -> list[str]:
        """All that the model has for it; torch.compile's wrapper is none of the model's."""
        return [name.replace("_orig_mod.", "") for name in self.piece.names]

    @property
    def count(self) -> int:
        """Elements of all of it."""
        return self.piece.shape.numel()


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """One rank's part of a checkpoint, copied: training may go on."""

    step: int
    parts: dict[str, TensorSlice]
    facts: Metadata
    outside: Callable[[], OuterState]
    """Fetches what groups share; or raises what went wrong when it was marked, where all ranks can hear of it."""


def staged(subject: TrainState, standing: Progress, *, late: bool) -> StagedCheckpoint:
    """Copy this rank's part. The leader also gives what all have alike.

    `late`: the others were here before, so that only what nothing but a step changes may come from this rank.
    """
    leads = subject.rank == standing.leader and not late
    parts: dict[str, TensorSlice] = {}
    facts: Metadata = {"late": late, "state": {}, "groups": group_names(subject)}
    counted = _per_element(subject)
    for owned in subject.pieces():
        name = owned.names[0]
        if owned.start < owned.stop:
            parts[f"model.{name}"] = TensorSlice(_copied(subject.values(owned)), owned.start, owned.count)
        described = dict(_state(subject, owned, counted, parts, leads))
        if described:
            facts["state"][name] = described
    parts[f"random.{subject.rank}"] = _whole(rng_state.save_rng_state(subject.device))
    if leads:
        facts["common"] = _common(subject, standing)
        for name, buffer in persistent_buffers(subject.model).items():
            if buffer.numel():
                parts[f"model.{name}"] = _whole(_copied(buffer))
    return StagedCheckpoint(standing.step, parts, facts, _marked(subject.outer))


def merged(said: Sequence[Metadata], step: int) -> Metadata:
    """The facts of all ranks, in their order, as one."""
    found: Metadata | None = next((facts["common"] for facts in said if "common" in facts), None)
    if found is None:
        who = next((rank for rank, facts in enumerate(said) if facts["late"]), 0)
        raise UserError(f"rank {who} did not call run.save at step {step}, and others did; call it on all ranks")
    for number, group in enumerate(found["groups"]):
        known = {name for facts in said for name in facts["groups"][number]}
        group["names"] = [name for name in found["parameters"] if name in known]
    outside = [facts["outer"] for facts in said if facts.get("outer")]
    states = {name: state for facts in said for name, state in facts["state"].items()}
    return found | {"state": states} | ({"outer": outside[0]} if outside else {})


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a model's state, by all their names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[(f"{prefix}.{name}" if prefix else name).replace("_orig_mod.", "")] = buffer
    return found


def described(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Metadata:
    """What a tensor has to be to be the same one."""
    return {"shape": list(tensor.shape if shape is None else shape), "dtype": name_of(tensor.dtype)}


def _marked(outer: OuterOptimizer | None) -> Callable[[], OuterState]:
    if outer is None:
        return OuterState
    try:
        return outer.mark()
    except Exception as error:  # noqa: BLE001 (raised by what is returned)
        return partial(_raise, error)


def _raise(error: Exception) -> OuterState:
    raise error


def _common(subject: TrainState, standing: Progress) -> Metadata:
    """What is the same on every rank."""
    parameters = {
        owned.names[0]: {**described(owned.piece.parameter, owned.piece.shape), "names": owned.names}
        for owned in subject.pieces()
    }
    optimizer = subject.binding.optimizer
    return {
        **standing.to_json(),
        "ranks": subject.ranks,
        "stage": subject.sharding.stage,
        "versions": {"mimatrix": __version__, "torch": str(torch.__version__)},
        "optimizer": type(optimizer).__name__,
        "groups": [{"settings": pack(_settings(group))} for group in optimizer.param_groups],
        "schedulers": [_scheduler(each) for each in subject.schedulers],
        "loss_scale": {"value": subject.scale.value, "good": subject.scale.good, "on": subject.scale.on},
        "parameters": parameters,
        "buffers": {name: described(buffer) for name, buffer in persistent_buffers(subject.model).items()},
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _scheduler(each: HasLRScheduler) -> Metadata:
    # `step` is the run's own, put in the place of the class's.
    state = {name: value for name, value in each.scheduler.state_dict().items() if name != "step"}
    return {"class": type(each.scheduler).__name__, "calls": each.calls, "state": pack(state)}


def group_names(subject: TrainState) -> list[list[str]]:
    """Of each param group the parameters of which this rank owns anything."""
    leaves = subject.binding.leaves
    names = {
        leaves[owned.piece.parameter]: owned.names[0] for owned in subject.pieces() if owned.piece.parameter in leaves
    }
    return [[names[leaf] for leaf in group["params"]] for group in subject.binding.optimizer.param_groups]


def _per_element(subject: TrainState) -> set[str]:
    """The keys under which the optimizer keeps something for each element.

    Where a parameter is a single number, the shape of what is kept for it does not tell; other parameters do.
    """
    states = [(leaf, subject.binding.optimizer.state.get(leaf, {})) for leaf in subject.binding.leaves.values()]
    kinds: dict[str, list[bool]] = {}
    for leaf, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                told = kinds.setdefault(key, [])
                if leaf.dim():
                    told.append(value.shape == leaf.shape)
    return {key for key, told in kinds.items() if all(told) and (told or key != "step")}


def _state(
    subject: TrainState, owned: OwnedElements, counted: set[str], parts: dict[str, TensorSlice], leads: bool
) -> Iterator[tuple[str, Metadata]]:
    """What the optimizer keeps for a parameter: copies into `parts`, the rest described."""
    leaf = subject.binding.leaves.get(owned.piece.parameter)
    state = subject.binding.optimizer.state.get(leaf, {}) if leaf is not None else {}
    for key, value in state.items():
        place = f"optimizer.{owned.names[0]}.{key}"
        if not isinstance(value, torch.Tensor) or (key not in counted and value.dim() == 0):
            yield key, {"is": "value", "value": pack(value)}
        elif key in counted:
            flat = value.detach().reshape(-1)
            cut = flat if subject.cuts else flat[owned.start : owned.stop]
            if owned.start < owned.stop:
                parts[place] = TensorSlice(_copied(cut), owned.start, owned.count)
            yield key, {"is": "elements", "dtype": name_of(value.dtype)}
        else:
            if leads and value.numel():
                parts[place] = _whole(_copied(value))
            yield key, {"is": "whole", **described(value)}


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).reshape(-1)


def _whole(flat: torch.Tensor) -> TensorSlice:
    return TensorSlice(flat, 0, flat.numel())
