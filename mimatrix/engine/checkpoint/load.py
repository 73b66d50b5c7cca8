"""Load a checkpoint into a run: on any number of ranks, with any shares, in any stage, bit for bit."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import rng_state
from mimatrix.engine.checkpoint.json_codec import parse_dtype, unpack
from mimatrix.engine.checkpoint.state import (
    Metadata,
    OwnedElements,
    Progress,
    TrainState,
    describe_tensor,
    param_group_names,
)
from mimatrix.engine.checkpoint.tensor_files import TensorReader, TensorSlice
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.stream import resume_stream
from mimatrix.engine.modules.averaged_weights import AveragedWeights
from mimatrix.engine.zero.units import persistent_buffers


def check_compatible(train_state: TrainState, metadata: Metadata) -> None:
    """Raise a `UserError` if the checkpoint is of something else, before anything is changed."""
    if (train_state.outer is None) == ("outer" in metadata):
        saved_mode, mode = ("hybrid", "sync") if train_state.outer is None else ("sync", "hybrid")
        raise UserError(
            f'the checkpoint was saved in mode="{saved_mode}" and the run is in mode="{mode}"; use the same mode, '
            "or load weights from run.full_state_dict before run.prepare"
        )
    here = {
        owned.names[0]: describe_tensor(owned.param.parameter, owned.param.shape)
        for owned in train_state.owned_elements()
    }
    _check_tensors(metadata["parameters"], here, "parameter")
    buffers = persistent_buffers(train_state.model)
    _check_tensors(metadata["buffers"], {name: describe_tensor(buffer) for name, buffer in buffers.items()}, "buffer")
    optimizer = train_state.optimizer.optimizer
    if metadata["optimizer"] != type(optimizer).__name__:
        raise UserError(f"the checkpoint is of {metadata['optimizer']}, not {type(optimizer).__name__}; use the same")
    if len(metadata["groups"]) != len(optimizer.param_groups):
        raise UserError(
            f"the checkpoint has {len(metadata['groups'])} param groups and the optimizer "
            f"{len(optimizer.param_groups)}; make them in the same way"
        )
    own = [type(synced.scheduler).__name__ for synced in train_state.lr_schedulers]
    saved = [scheduler["class"] for scheduler in metadata["schedulers"]]
    if own != saved:
        saved_names, own_names = (" and ".join(names) or "no scheduler" for names in (saved, own))
        raise UserError(f"the checkpoint has {saved_names} and the run {own_names}; give run.prepare the same")
    _check_groups(train_state, metadata)


def resume_position(metadata: Metadata, progress: Progress, train_state: TrainState) -> DataPosition:
    """Return where a rank resumes: after the same samples, even if its global batch has changed."""
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
    is_same_batch = metadata["global_batch"] == progress.split.total
    stream = resume_stream(
        metadata["streams"],
        train_state.stream_mode,
        train_state.rank,
        world_size=train_state.world_size,
        is_same_batch=is_same_batch,
    )
    if stream is not None:
        return DataPosition(saved.epoch, saved.batch, stream=stream)
    batches, left = divmod(saved.batch * metadata["global_batch"], progress.split.total)
    if left:
        raise UserError(
            f"the checkpoint is from the middle of an epoch with global_batch = {metadata['global_batch']}, after "
            f"{saved.batch * metadata['global_batch']} samples, which is not a multiple of {progress.split.total}; "
            "use the same global_batch"
        )
    return DataPosition(saved.epoch, batches, order=saved.order)


@torch.no_grad()
def read_state(train_state: TrainState, metadata: Metadata, tensors: TensorReader) -> Callable[[], None]:
    """Read this rank's part of a checkpoint, and return a function that applies it; all ranks must call that."""
    group_settings = [unpack(group["settings"]) for group in metadata["groups"]]
    scheduler_states = [unpack(scheduler["state"]) for scheduler in metadata["schedulers"]]
    loader = _TensorLoader(train_state, metadata)
    for owned in train_state.owned_elements():
        loader.add_parameter(owned)
        loader.add_optimizer_state(owned)
    for name, buffer in persistent_buffers(train_state.model).items():
        loader.add(f"model.{name}", buffer)
    finish_averages = loader.add_averages(tensors)
    states = _allocate_rng_states(train_state, metadata, tensors)
    if states is not None:
        loader.add(f"random.{train_state.rank}", states)
    tensors.read(loader.parts)

    @torch.no_grad()
    def finish() -> None:
        for apply in loader.after:
            apply()
        finish_averages()
        _restore_groups(train_state, group_settings)
        _restore_schedulers(train_state, metadata, scheduler_states)
        if train_state.scale.on and metadata["loss_scale"]["on"]:
            train_state.scale.value, train_state.scale.good = (
                metadata["loss_scale"]["value"],
                metadata["loss_scale"]["good"],
            )
        if states is None:
            rng_state.reseed(
                metadata["seed"] + _group_offset(train_state, metadata), metadata["step"], train_state.rank
            )
        else:
            rng_state.load_rng_state(states, train_state.device)
        train_state.strategy.reload_params()

    return finish


@dataclass
class _TensorLoader:
    """What this rank reads, and what is applied once it is read."""

    train_state: TrainState
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
        if self.train_state.strategy.is_sharded:
            self.add(key, self.train_state.values(owned), owned.start, owned.count)
        else:
            self.add(key, owned.param.parameter.detach())

    def add_optimizer_state(self, owned: OwnedElements) -> None:
        """Read the optimizer state of a parameter, which replaces its current state."""
        leaf = self.train_state.optimizer.shard_params.get(owned.param.parameter)
        if leaf is None:
            return
        name = self._keys[owned.names[0]]
        state: dict[str, Any] = {}
        for key, entry in self.metadata["state"].get(name, {}).items():
            state[key] = self._read_value(f"optimizer.{name}.{key}", entry, owned, leaf)

        def apply() -> None:
            self.train_state.optimizer.optimizer.state.pop(leaf, None)
            if state:
                self.train_state.optimizer.optimizer.state[leaf] = state

        self.after.append(apply)

    def add_averages(self, tensors: TensorReader) -> Callable[[], None]:
        """Read all averages, also of those that the script has not made yet; return what to do once they are read."""
        registry, strategy = self.train_state.averages, self.train_state.strategy
        seen = Counter[str]()
        loaded: list[AveragedWeights] = []
        missing: list[tuple[AveragedWeights, OwnedElements]] = []
        for number, entry in enumerate(self.metadata["averages"]):
            average = registry.find(entry["kind"], seen[entry["kind"]])
            loaded.append(average or AveragedWeights.start(entry["kind"], strategy))
            seen[entry["kind"]] += 1
            for owned in self.train_state.owned_elements():
                key = f"average.{number}.{self._keys[owned.names[0]]}"
                if not owned.unit.trainable:
                    continue
                if not tensors.has(key):
                    missing.append((loaded[-1], owned))
                elif strategy.is_sharded:
                    values = loaded[-1].values(owned.unit, owned.param, range(owned.start, owned.stop))
                    self.add(key, values, owned.start, owned.count)
                else:
                    self.add(key, loaded[-1].whole(owned.param))

        def finish() -> None:
            for average, owned in missing:
                average.copy_weights_of(owned.unit, owned.param)
            for average, entry in zip(loaded, self.metadata["averages"], strict=True):
                average.updates = entry["updates"]
            for average in registry.averages:
                if average not in loaded:
                    average.restart()
            registry.is_first_rank = self.train_state.rank == 0
            registry.unclaimed = [average for average in loaded if average not in registry.averages]

        return finish

    def _read_value(self, key: str, entry: Metadata, owned: OwnedElements, leaf: torch.Tensor) -> Any:
        if entry["is"] == "value":
            value = unpack(entry["value"])
            return value.to(_counter_device(self.train_state, leaf)) if isinstance(value, torch.Tensor) else value
        dtype = parse_dtype(entry["dtype"])
        if entry["is"] == "whole":
            tensor = torch.empty(entry["shape"], dtype=dtype, device=leaf.device)
            self.add(key, tensor)
        else:
            tensor = torch.empty_like(leaf.detach(), dtype=dtype)
            self.add(key, tensor, owned.start if self.train_state.strategy.is_sharded else 0, owned.count)
        return tensor


def _copy_into(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _counter_device(train_state: TrainState, leaf: torch.Tensor) -> torch.device:
    """Return where an optimizer keeps its counters: on the device if capturable or fused, otherwise on the CPU."""
    groups = train_state.optimizer.optimizer.param_groups
    group = next(group for group in groups if any(leaf is param for param in group["params"]))
    return leaf.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _allocate_rng_states(train_state: TrainState, metadata: Metadata, tensors: TensorReader) -> torch.Tensor | None:
    if metadata["ranks"] != train_state.world_size or _group_offset(train_state, metadata):
        return None
    return torch.empty(tensors.count(f"random.{train_state.rank}"), dtype=torch.uint8)


def _group_offset(train_state: TrainState, metadata: Metadata) -> int:
    """Return by how much this group's number differs from that of the group that saved."""
    return train_state.outer.group - int(metadata["outer"]["group"]) if train_state.outer else 0


def _restore_groups(train_state: TrainState, saved: Sequence[Mapping[str, Any]]) -> None:
    for group, settings in zip(train_state.optimizer.optimizer.param_groups, saved, strict=True):
        for name, value in settings.items():
            current = group.get(name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                group[name] = value


def _restore_schedulers(train_state: TrainState, metadata: Metadata, states: Sequence[dict[str, Any]]) -> None:
    for synced, saved, state in zip(train_state.lr_schedulers, metadata["schedulers"], states, strict=True):
        synced.restore(state, saved["calls"])


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


def _check_groups(train_state: TrainState, metadata: Metadata) -> None:
    groups = {name: number for number, group in enumerate(metadata["groups"]) for name in group["names"]}
    for number, names in enumerate(param_group_names(train_state)):
        for name in names:
            if groups.get(name, number) != number:
                raise UserError(
                    f"{name} is in param group {number} here and in {groups[name]} in the checkpoint; "
                    "make the groups in the same way"
                )
