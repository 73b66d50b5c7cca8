"""From a checkpoint back into a run: onto any number of ranks, with any shares, in any stage, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import rng_state
from mimatrix.engine.checkpoint.json_codec import dtype_of, unpack
from mimatrix.engine.checkpoint.state import (
    Metadata,
    OwnedElements,
    Progress,
    TrainState,
    described,
    group_names,
    persistent_buffers,
)
from mimatrix.engine.checkpoint.storage import TensorReader, TensorSlice
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.zero.sharding import Zero1
from mimatrix.engine.zero.zero3 import Zero3


def check(subject: TrainState, facts: Metadata) -> None:
    """Refuse a checkpoint of something else, before anything is changed."""
    if (subject.outer is None) == ("outer" in facts):
        saved, now = ("hybrid", "sync") if subject.outer is None else ("sync", "hybrid")
        raise UserError(
            f'the checkpoint was saved in mode="{saved}" and the run is in mode="{now}"; use the same mode, or load '
            "weights from run.full_state_dict before run.prepare"
        )
    here = {owned.names[0]: described(owned.piece.parameter, owned.piece.shape) for owned in subject.pieces()}
    _check_tensors(facts["parameters"], here, "parameter")
    buffers = persistent_buffers(subject.model)
    _check_tensors(facts["buffers"], {name: described(buffer) for name, buffer in buffers.items()}, "buffer")
    optimizer = subject.binding.optimizer
    if facts["optimizer"] != type(optimizer).__name__:
        raise UserError(f"the checkpoint is of {facts['optimizer']}, not {type(optimizer).__name__}; use the same")
    if len(facts["groups"]) != len(optimizer.param_groups):
        raise UserError(
            f"the checkpoint has {len(facts['groups'])} param groups and the optimizer {len(optimizer.param_groups)}; "
            "make them in the same way"
        )
    mine = [type(each.scheduler).__name__ for each in subject.schedulers]
    theirs = [each["class"] for each in facts["schedulers"]]
    if mine != theirs:
        shown = [" and ".join(names) or "no scheduler" for names in (theirs, mine)]
        raise UserError(f"the checkpoint has {shown[0]} and the run {shown[1]}; give run.prepare the same")
    _check_groups(subject, facts)


def position_in(facts: Metadata, standing: Progress) -> DataPosition:
    """Where a run goes on: after the same samples, whatever its global batch is now."""
    saved = DataPosition.from_json(facts["position"])
    if saved.batch == 0:
        return saved
    if "outer" in facts and facts["seed"] != standing.seed:
        # Of another group: each goes through the samples in an order of its own, which begins anew.
        return DataPosition(saved.epoch + 1, 0)
    if facts["seed"] != standing.seed:
        raise UserError(
            f"the checkpoint is from the middle of an epoch with seed = {facts['seed']}, and with {standing.seed} the "
            "rest of it would be other samples; use the same seed"
        )
    batches, left = divmod(saved.batch * facts["global_batch"], standing.split.total)
    if left:
        raise UserError(
            f"the checkpoint is from the middle of an epoch with global_batch = {facts['global_batch']}, after "
            f"{saved.batch * facts['global_batch']} samples, which are no whole batches of {standing.split.total}; "
            "use the same global_batch"
        )
    return DataPosition(saved.epoch, batches)


@torch.no_grad()
def read_into(subject: TrainState, facts: Metadata, tensors: TensorReader) -> Callable[[], None]:
    """Read this rank's part of everything; what is then to be called, on all ranks together, puts it in force."""
    reading = _TensorLoader(subject, facts)
    for owned in subject.pieces():
        reading.parameter(owned)
        reading.state(owned)
    for name, buffer in persistent_buffers(subject.model).items():
        reading.fill(f"model.{name}", buffer)
    states = _random_states(subject, facts, tensors)
    if states is not None:
        reading.fill(f"random.{subject.rank}", states)
    tensors.read(reading.parts)

    @torch.no_grad()
    def finish() -> None:
        for each in reading.after:
            each()
        _restore_groups(subject, facts)
        _restore_schedulers(subject, facts)
        if subject.scale.on and facts["loss_scale"]["on"]:
            subject.scale.value, subject.scale.good = facts["loss_scale"]["value"], facts["loss_scale"]["good"]
        if states is None:
            rng_state.reseed(facts["seed"] + _apart(subject, facts), facts["step"], subject.rank)
        else:
            rng_state.load_rng_state(states, subject.device)
        _show_others(subject)

    return finish


@dataclass
class _TensorLoader:
    """What this rank reads, and what is to be done once it is there."""

    subject: TrainState
    facts: Metadata
    parts: dict[str, TensorSlice] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keys = {name: key for key, entry in self.facts["parameters"].items() for name in entry["names"]}

    def fill(self, key: str, tensor: torch.Tensor, start: int = 0, count: int | None = None) -> None:
        """Read into a tensor: elements from `start` on of `count`; by default all."""
        if not tensor.numel():
            return
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
        self.parts[key] = TensorSlice(flat, start, flat.numel() if count is None else count)
        if not tensor.is_contiguous():
            self.after.append(lambda: _fill(tensor, flat))

    def parameter(self, owned: OwnedElements) -> None:
        """A parameter: all of it, or what this rank owns."""
        key = f"model.{self._keys[owned.names[0]]}"
        if self.subject.cuts:
            self.fill(key, self.subject.values(owned), owned.start, owned.count)
        else:
            self.fill(key, owned.piece.parameter.detach())

    def state(self, owned: OwnedElements) -> None:
        """What the optimizer keeps for a parameter, in the place of whatever it keeps now."""
        leaf = self.subject.binding.leaves.get(owned.piece.parameter)
        if leaf is None:
            return
        name = self._keys[owned.names[0]]
        kept: dict[str, Any] = {}
        for key, entry in self.facts["state"].get(name, {}).items():
            kept[key] = self._value(f"optimizer.{name}.{key}", entry, owned, leaf)

        def put() -> None:
            self.subject.binding.optimizer.state.pop(leaf, None)
            if kept:
                self.subject.binding.optimizer.state[leaf] = kept

        self.after.append(put)

    def _value(self, key: str, entry: Metadata, owned: OwnedElements, leaf: torch.Tensor) -> Any:
        if entry["is"] == "value":
            value = unpack(entry["value"])
            return value.to(_counts_on(self.subject, leaf)) if isinstance(value, torch.Tensor) else value
        dtype = dtype_of(entry["dtype"])
        if entry["is"] == "whole":
            made = torch.empty(entry["shape"], dtype=dtype, device=leaf.device)
            self.fill(key, made)
        else:
            made = torch.empty_like(leaf.detach(), dtype=dtype)
            self.fill(key, made, owned.start if self.subject.cuts else 0, owned.count)
        return made


def _fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _counts_on(subject: TrainState, leaf: torch.Tensor) -> torch.device:
    """Where an optimizer wants its counters: with the tensor if it never looks at them, otherwise on the CPU."""
    group = next(each for each in subject.binding.optimizer.param_groups if any(leaf is one for one in each["params"]))
    return leaf.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _random_states(subject: TrainState, facts: Metadata, tensors: TensorReader) -> torch.Tensor | None:
    if facts["ranks"] != subject.ranks or _apart(subject, facts):
        return None
    return torch.empty(tensors.count(f"random.{subject.rank}"), dtype=torch.uint8)


def _apart(subject: TrainState, facts: Metadata) -> int:
    """By how much this group's number is another one than that of the group that saved."""
    return subject.outer.group - int(facts["outer"]["group"]) if subject.outer else 0


def _restore_groups(subject: TrainState, facts: Metadata) -> None:
    for group, saved in zip(subject.binding.optimizer.param_groups, facts["groups"], strict=True):
        for name, value in unpack(saved["settings"]).items():
            here = group.get(name)
            if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
                here.copy_(value)
            else:
                group[name] = value


def _restore_schedulers(subject: TrainState, facts: Metadata) -> None:
    for each, saved in zip(subject.schedulers, facts["schedulers"], strict=True):
        each.scheduler.load_state_dict(unpack(saved["state"]))
        each.calls = saved["calls"]


def _show_others(subject: TrainState) -> None:
    """In stages 1 and 2 all ranks have whole parameters: gather them, frozen ones too."""
    sharding = subject.sharding
    if isinstance(sharding, Zero1) and not isinstance(sharding, Zero3):
        for held in sharding.held.values():
            sharding.group.all_gather(held.values, shares=sharding.shares)


def _check_tensors(saved: Mapping[str, Metadata], here: Mapping[str, Metadata], what: str) -> None:
    same = "load a checkpoint of the same model"
    known = {name: entry for first, entry in saved.items() for name in entry.get("names", [first])}
    for name, mine in here.items():
        if name not in known:
            raise UserError(f"the checkpoint has no {what} {name}, and the model has; {same}")
        for aspect in ("shape", "dtype"):
            if known[name][aspect] != mine[aspect]:
                raise UserError(
                    f"the {what} {name} has the {aspect} {mine[aspect]} here and {known[name][aspect]} in the "
                    f"checkpoint; {same}"
                )
    for name, entry in saved.items():
        if here.keys().isdisjoint(entry.get("names", [name])):
            raise UserError(f"the checkpoint has a {what} {name}, and the model has none; {same}")


def _check_groups(subject: TrainState, facts: Metadata) -> None:
    groups = {name: number for number, group in enumerate(facts["groups"]) for name in group["names"]}
    for number, names in enumerate(group_names(subject)):
        for name in names:
            if groups.get(name, number) != number:
                raise UserError(
                    f"{name} is in param group {number} here and in {groups[name]} in the checkpoint; "
                    "make the groups in the same way"
                )
