"""Load a checkpoint into a run: on any number of ranks, with any shares, in any stage, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import rng_state as chance
from mimatrix.engine.checkpoint.json_codec import parse_dtype, unpack
from mimatrix.engine.checkpoint.state import (
    Metadata,
    OwnedElements,
    Progress,
    TrainState,
    describe_tensor,
    param_group_names,
    persistent_buffers,
)
from mimatrix.engine.checkpoint.storage import TensorReader, TensorSlice
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.zero.sharding import Zero1
from mimatrix.engine.zero.zero3 import Zero3


def check_compatible(subject: TrainState, metadata: Metadata) -> None:
    """Raise a `UserError` if the checkpoint is of something else, before anything is changed."""
    if (subject.outer is None) == ("outer" in metadata):
        saved_mode, mode = ("hybrid", "sync") if subject.outer is None else ("sync", "hybrid")
        raise UserError(
            f'the checkpoint was saved in mode="{saved_mode}" and the run is in mode="{mode}"; use the same mode, '
            "or load weights from run.full_state_dict before run.prepare"
        )
    here = {owned.names[0]: describe_tensor(owned.piece.parameter, owned.piece.shape) for owned in subject.pieces()}
    _check_tensors(metadata["parameters"], here, "parameter")
    buffers = persistent_buffers(subject.model)
    _check_tensors(metadata["buffers"], {name: describe_tensor(buffer) for name, buffer in buffers.items()}, "buffer")
    optimizer = subject.binding.optimizer
    if metadata["optimizer"] != type(optimizer).__name__:
        raise UserError(f"the checkpoint is of {metadata['optimizer']}, not {type(optimizer).__name__}; use the same")
    if len(metadata["groups"]) != len(optimizer.param_groups):
        raise UserError(
            f"the checkpoint has {len(metadata['groups'])} param groups and the optimizer "
            f"{len(optimizer.param_groups)}; make them in the same way"
        )
    own = [type(synced.scheduler).__name__ for synced in subject.schedulers]
    saved = [scheduler["class"] for scheduler in metadata["schedulers"]]
    if own != saved:
        saved_names, own_names = (" and ".join(names) or "no scheduler" for names in (saved, own))
        raise UserError(f"the checkpoint has {saved_names} and the run {own_names}; give run.prepare the same")
    _check_groups(subject, metadata)


def resume_position(metadata: Metadata, progress: Progress) -> DataPosition:
    """Return where a run resumes: after the same samples, even if its global batch has changed."""
    saved = DataPosition.from_json(metadata["position"])
    if saved.batch == 0:
        return saved
    if "outer" in metadata and metadata["seed"] != progress.seed:
        # Saved by another group: each has its own order of the samples, and starts a new epoch.
        return DataPosition(saved.epoch + 1, 0)
    if metadata["seed"] != progress.seed:
        raise UserError(
            f"the checkpoint is from the middle of an epoch with seed = {metadata['seed']}, and with {progress.seed} "
            "the rest of it would be other samples; use the same seed"
        )
    batches, left = divmod(saved.batch * metadata["global_batch"], progress.split.total)
    if left:
        raise UserError(
            f"the checkpoint is from the middle of an epoch with global_batch = {metadata['global_batch']}, after "
            f"{saved.batch * metadata['global_batch']} samples, which is not a multiple of {progress.split.total}; "
            "use the same global_batch"
        )
    return DataPosition(saved.epoch, batches)


@torch.no_grad()
def read_state(subject: TrainState, metadata: Metadata, tensors: TensorReader) -> Callable[[], None]:
    """Read this rank's part of a checkpoint, and return a function that applies it; all ranks must call that."""
    loader = _TensorLoader(subject, metadata)
    for owned in subject.pieces():
        loader.add_parameter(owned)
        loader.add_optimizer_state(owned)
    for name, buffer in persistent_buffers(subject.model).items():
        loader.add(f"model.{name}", buffer)
    states = _allocate_rng_states(subject, metadata, tensors)
    if states is not None:
        loader.add(f"random.{subject.rank}", states)
    tensors.read(loader.parts)

    @torch.no_grad()
    def finish() -> None:
        for apply in loader.after:
            apply()
        _restore_groups(subject, metadata)
        _restore_schedulers(subject, metadata)
        if subject.scale.on and metadata["loss_scale"]["on"]:
            subject.scale.value, subject.scale.good = metadata["loss_scale"]["value"], metadata["loss_scale"]["good"]
        if states is None:
            chance.start_anew(metadata["seed"] + _group_offset(subject, metadata), metadata["step"], subject.rank)
        else:
            chance.restore(states, subject.device)
        _gather_params(subject)

    return finish


@dataclass
class _TensorLoader:
    """What this rank reads, and what is applied once it is read."""

    subject: TrainState
    metadata: Metadata
    parts: dict[str, TensorSlice] = field(default_factory=dict)
    after: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keys = {name: key for key, entry in self.metadata["parameters"].items() for name in entry["names"]}

    def add(self, key: str, tensor: torch.Tensor, start: int = 0, count: int | None = None) -> None:
        """Fill `tensor` with elements from `start` on of `count`; by default with all."""
        if not tensor.numel():
            return
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
        self.parts[key] = TensorSlice(flat, start, flat.numel() if count is None else count)
        if not tensor.is_contiguous():
            self.after.append(lambda: _copy_into(tensor, flat))

    def add_parameter(self, owned: OwnedElements) -> None:
        """Read a parameter, or the elements of it that this rank owns."""
        key = f"model.{self._keys[owned.names[0]]}"
        if self.subject.cuts:
            self.add(key, self.subject.values(owned), owned.start, owned.count)
        else:
            self.add(key, owned.piece.parameter.detach())

    def add_optimizer_state(self, owned: OwnedElements) -> None:
        """Read the optimizer state of a parameter, which replaces its current state."""
        leaf = self.subject.binding.leaves.get(owned.piece.parameter)
        if leaf is None:
            return
        name = self._keys[owned.names[0]]
        state: dict[str, Any] = {}
        for key, entry in self.metadata["state"].get(name, {}).items():
            state[key] = self._read_value(f"optimizer.{name}.{key}", entry, owned, leaf)

        def apply() -> None:
            self.subject.binding.optimizer.state.pop(leaf, None)
            if state:
                self.subject.binding.optimizer.state[leaf] = state

        self.after.append(apply)

    def _read_value(self, key: str, entry: Metadata, owned: OwnedElements, leaf: torch.Tensor) -> Any:
        if entry["is"] == "value":
            value = unpack(entry["value"])
            return value.to(_counter_device(self.subject, leaf)) if isinstance(value, torch.Tensor) else value
        dtype = parse_dtype(entry["dtype"])
        if entry["is"] == "whole":
            tensor = torch.empty(entry["shape"], dtype=dtype, device=leaf.device)
            self.add(key, tensor)
        else:
            tensor = torch.empty_like(leaf.detach(), dtype=dtype)
            self.add(key, tensor, owned.start if self.subject.cuts else 0, owned.count)
        return tensor


def _copy_into(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _counter_device(subject: TrainState, leaf: torch.Tensor) -> torch.device:
    """Return where an optimizer keeps its counters: on the device if capturable or fused, otherwise on the CPU."""
    group = next(each for each in subject.binding.optimizer.param_groups if any(leaf is one for one in each["params"]))
    return leaf.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _allocate_rng_states(subject: TrainState, metadata: Metadata, tensors: TensorReader) -> torch.Tensor | None:
    if metadata["ranks"] != subject.ranks or _group_offset(subject, metadata):
        return None
    return torch.empty(tensors.count(f"random.{subject.rank}"), dtype=torch.uint8)


def _group_offset(subject: TrainState, metadata: Metadata) -> int:
    """Return by how much this group's number differs from that of the group that saved."""
    return subject.outer.group - int(metadata["outer"]["group"]) if subject.outer else 0


def _restore_groups(subject: TrainState, metadata: Metadata) -> None:
    for group, saved in zip(subject.binding.optimizer.param_groups, metadata["groups"], strict=True):
        for name, value in unpack(saved["settings"]).items():
            current = group.get(name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                group[name] = value


def _restore_schedulers(subject: TrainState, metadata: Metadata) -> None:
    for synced, saved in zip(subject.schedulers, metadata["schedulers"], strict=True):
        synced.scheduler.load_state_dict(unpack(saved["state"]))
        synced.calls = saved["calls"]


def _gather_params(subject: TrainState) -> None:
    """Gather full parameters in stages 1 and 2, where every rank has them; frozen ones too."""
    sharding = subject.sharding
    if isinstance(sharding, Zero1) and not isinstance(sharding, Zero3):
        for held in sharding.held.values():
            sharding.group.all_gather(held.values, shares=sharding.shares)


def _check_tensors(saved: Mapping[str, Metadata], here: Mapping[str, Metadata], what: str) -> None:
    same = "load a checkpoint of the same model"
    saved_as = {name: entry for first, entry in saved.items() for name in entry.get("names", [first])}
    for name, own in here.items():
        if name not in saved_as:
            raise UserError(f"the model has a {what} {name}, and the checkpoint has none; {same}")
        for aspect in ("shape", "dtype"):
            if saved_as[name][aspect] != own[aspect]:
                raise UserError(
                    f"the {what} {name} has the {aspect} {own[aspect]} here and {saved_as[name][aspect]} in the "
                    f"checkpoint; {same}"
                )
    for name, entry in saved.items():
        if here.keys().isdisjoint(entry.get("names", [name])):
            raise UserError(f"the checkpoint has a {what} {name}, and the model has none; {same}")


def _check_groups(subject: TrainState, metadata: Metadata) -> None:
    groups = {name: number for number, group in enumerate(metadata["groups"]) for name in group["names"]}
    for number, names in enumerate(param_group_names(subject)):
        for name in names:
            if groups.get(name, number) != number:
                raise UserError(
                    f"{name} is in param group {number} here and in {groups[name]} in the checkpoint; "
                    "make the groups in the same way"
                )
