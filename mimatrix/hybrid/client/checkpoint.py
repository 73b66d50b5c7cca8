"""The state of all shards as it is stored in checkpoints: merged from any number of shards, split for any other.

`outer.values` holds all trainable parameters in one flat tensor; `outer.<number>.<key>` is what the optimizer of the
shards keeps for each element of a parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.json_codec import dtype_name, pack, parse_dtype, unpack
from mimatrix.engine.checkpoint.state import Metadata
from mimatrix.engine.checkpoint.tensor_files import TensorReader, TensorSlice
from mimatrix.hybrid.client.flat_layout import split_spans
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.shard import MOMENTUM_KEYS, ParamSpan
from mimatrix.hybrid.server.state import ShardState

FORMAT = 1
ParamState = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GlobalState:
    """The state of all shards at one version."""

    values: torch.Tensor
    optimizer_state: dict[int, ParamState]
    """By parameter number: a flat tensor has one element per parameter element, anything else is for all of them."""
    factors: tuple[tuple[int, float | None], ...]
    """For each shard that was merged, its number of elements and the factor of its last push."""
    version: int
    samples: int

    @classmethod
    def merge(cls, shards: Sequence[ShardState], spans: Sequence[ParamSpan]) -> "GlobalState":
        """Merge the states of all shards, in order."""
        sizes = [len(shard.values) for shard in shards]
        states: dict[int, ParamState] = {}
        for number, span, _, start in _locate_spans(spans, sizes):
            state = shards[number].optimizer_state.get(span.parameter)
            if state:
                _fill(states.setdefault(span.parameter, {}), state, start, spans[span.parameter].numel)
        return cls(
            values=torch.cat([shard.values for shard in shards]),
            optimizer_state=states,
            factors=tuple((size, shard.factor) for size, shard in zip(sizes, shards, strict=True)),
            version=max(shard.log.version for shard in shards),
            samples=max(shard.log.samples for shard in shards),
        )

    def split(
        self, spans: Sequence[ParamSpan], sizes: Sequence[int], scaling: PushScaling, origin: str
    ) -> list[ShardState]:
        """Split the state into shards of these sizes; `origin` identifies the checkpoint."""
        parts = torch.split(self.values, list(sizes))
        factors = [self._factor_at(stop - size) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        states: list[dict[int, ParamState]] = [{} for _ in sizes]
        for number, span, offset, start in _locate_spans(spans, sizes):
            state = self.optimizer_state.get(span.parameter)
            if state:
                own = {key: _slice(value, start, span.numel) for key, value in state.items()}
                self._correct_momentum(own, offset, factors[number], scaling)
                states[number][span.parameter] = own
        log = PushLog(self.version, self.samples)
        return [
            ShardState(values=part.clone(), optimizer_state=state, factor=factor, log=log, origin=origin)
            for part, state, factor in zip(parts, states, factors, strict=True)
        ]

    def to_checkpoint(self) -> tuple[dict[str, TensorSlice], Metadata]:
        """Return the tensors and the metadata of a checkpoint."""
        tensors = {"outer.values": self.values}
        entries: dict[str, Metadata] = {}
        for number, state in self.optimizer_state.items():
            entries[str(number)] = {key: _describe(value) for key, value in state.items()}
            tensors |= {f"outer.{number}.{key}": value for key, value in state.items() if _is_elementwise(value)}
        metadata = {
            "format": FORMAT,
            "state": entries,
            "factors": self.factors,
            "version": self.version,
            "samples": self.samples,
            "count": len(self.values),
            "dtype": dtype_name(self.values.dtype),
        }
        return {key: TensorSlice(tensor, 0, len(tensor)) for key, tensor in tensors.items()}, metadata

    @classmethod
    def from_checkpoint(
        cls, metadata: Mapping[str, Any], tensors: TensorReader, spans: Sequence[ParamSpan]
    ) -> "GlobalState":
        """Read the state from a checkpoint."""
        values = torch.empty(metadata["count"], dtype=parse_dtype(metadata["dtype"]))
        parts = {"outer.values": TensorSlice(values, 0, len(values))}
        states: dict[int, ParamState] = {}
        for number, entries in metadata["state"].items():
            state = states.setdefault(int(number), {})
            for key, entry in entries.items():
                if "value" in entry:
                    state[key] = unpack(entry["value"])
                else:
                    state[key] = torch.empty(spans[int(number)].numel, dtype=parse_dtype(entry["dtype"]))
                    parts[f"outer.{number}.{key}"] = TensorSlice(state[key], 0, len(state[key]))
        tensors.read(parts)
        return cls(
            values=values,
            optimizer_state=states,
            factors=tuple((size, factor) for size, factor in metadata["factors"]),
            version=metadata["version"],
            samples=metadata["samples"],
        )

    def _factor_at(self, offset: int) -> float | None:
        return next((factor for _, stop, factor in self._factor_ranges() if offset < stop), None)

    def _factor_ranges(self) -> Iterator[tuple[int, int, float | None]]:
        stops = accumulate(size for size, _ in self.factors)
        for (size, factor), stop in zip(self.factors, stops, strict=True):
            yield stop - size, stop, factor

    def _correct_momentum(self, state: ParamState, offset: int, factor: float | None, scaling: PushScaling) -> None:
        """Keep the magnitude of momentum where elements move to a shard with another factor."""
        for buffer in (state[key] for key in MOMENTUM_KEYS if _is_elementwise(state.get(key))):
            for start, stop, previous in self._factor_ranges():
                first, last = max(start, offset), min(stop, offset + len(buffer))
                if first < last and previous != factor and factor is not None:
                    buffer[first - offset : last - offset].mul_(scaling.correction(previous, factor))


def check_format(metadata: Mapping[str, Any]) -> None:
    """Refuse the metadata of a checkpoint that another version of MiMatrix has saved in another format."""
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"the checkpoint has format {metadata.get('format')} for groups, and this version reads format {FORMAT}; "
            "load it with the version that saved it"
        )


def _locate_spans(spans: Sequence[ParamSpan], sizes: Sequence[int]) -> Iterator[tuple[int, ParamSpan, int, int]]:
    """Yield the spans of each shard: the shard, the span, and its offset in the flat tensor and in its parameter."""
    ends = accumulate(span.numel for span in spans)
    starts = [end - span.numel for span, end in zip(spans, ends, strict=True)]
    offset = 0
    for number, shard_spans in enumerate(split_spans(spans, sizes)):
        for span in shard_spans:
            yield number, span, offset, offset - starts[span.parameter]
            offset += span.numel


def _fill(merged: ParamState, part: ParamState, start: int, numel: int) -> None:
    for key, value in part.items():
        if _is_elementwise(value):
            tensor = merged.setdefault(key, torch.zeros(numel, dtype=value.dtype))
            tensor[start : start + len(value)].copy_(value)
        else:
            merged[key] = value


def _slice(value: Any, start: int, numel: int) -> Any:
    if _is_elementwise(value):
        return value[start : start + numel].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _describe(value: Any) -> Metadata:
    return {"dtype": dtype_name(value.dtype)} if _is_elementwise(value) else {"value": pack(value)}


def _is_elementwise(value: Any) -> bool:
    """Return whether a value has one element per parameter element: parameters of shards are flat, so it is, too."""
    return isinstance(value, torch.Tensor) and value.dim() == 1
