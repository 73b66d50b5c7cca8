"""What all shards have together, as it lies in checkpoints: joined from so many shards, and cut for any other number.

`outer.values` has all parameters that learn, in one row; `outer.<number>.<key>` what the optimizer of the shards keeps
for each element of a parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mimatrix.engine.checkpoint.json_codec import dtype_of, name_of, pack, unpack
from mimatrix.engine.checkpoint.state import Metadata
from mimatrix.engine.checkpoint.storage import TensorReader, TensorSlice
from mimatrix.hybrid.client.flat_layout import split_spans
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.shard import MOMENTUM_KEYS, ParamSpan
from mimatrix.hybrid.server.state import ShardState

State = dict[str, Any]


@dataclass(frozen=True)
class GlobalState:
    """At one version."""

    values: torch.Tensor
    states: dict[int, State]
    """By parameters: a flat tensor for its elements, anything else is for all of them."""
    factors: tuple[tuple[int, float | None], ...]
    """So many elements of the row, and by how much the last push counted there."""
    version: int
    samples: int

    @classmethod
    def joined(cls, kept: Sequence[ShardState], pieces: Sequence[ParamSpan]) -> "GlobalState":
        """Of all shards, in their order."""
        sizes = [len(each.values) for each in kept]
        states: dict[int, State] = {}
        for number, piece, _, start in _placed(pieces, sizes):
            state = kept[number].states.get(piece.parameter)
            if state:
                _fill(states.setdefault(piece.parameter, {}), state, start, pieces[piece.parameter].count)
        return cls(
            torch.cat([each.values for each in kept]),
            states,
            tuple((size, each.factor) for size, each in zip(sizes, kept, strict=True)),
            max(each.ledger.version for each in kept),
            max(each.ledger.samples for each in kept),
        )

    def split(
        self, pieces: Sequence[ParamSpan], sizes: Sequence[int], rules: PushScaling, origin: str
    ) -> list[ShardState]:
        """For shards of these sizes."""
        parts = torch.split(self.values, list(sizes))
        factors = [self._factor_at(stop - size) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        states: list[dict[int, State]] = [{} for _ in sizes]
        for number, piece, at, start in _placed(pieces, sizes):
            state = self.states.get(piece.parameter)
            if state:
                own = {key: _slice(value, start, piece.count) for key, value in state.items()}
                self._correct(own, at, factors[number], rules)
                states[number][piece.parameter] = own
        ledger = PushLog(self.version, self.samples)
        return [
            ShardState(part.clone(), state, factor, ledger, origin)
            for part, state, factor in zip(parts, states, factors, strict=True)
        ]

    def to_parts(self) -> tuple[dict[str, TensorSlice], Metadata]:
        """For a checkpoint."""
        rows = {"outer.values": self.values}
        said: dict[str, Metadata] = {}
        for number, state in self.states.items():
            said[str(number)] = {key: _described(value) for key, value in state.items()}
            rows |= {f"outer.{number}.{key}": value for key, value in state.items() if _is_row(value)}
        facts = {"state": said, "factors": self.factors, "version": self.version, "samples": self.samples}
        facts |= {"count": len(self.values), "dtype": name_of(self.values.dtype)}
        return {key: TensorSlice(row, 0, len(row)) for key, row in rows.items()}, facts

    @classmethod
    def read(cls, facts: Mapping[str, Any], tensors: TensorReader, pieces: Sequence[ParamSpan]) -> "GlobalState":
        """From one."""
        values = torch.empty(facts["count"], dtype=dtype_of(facts["dtype"]))
        parts = {"outer.values": TensorSlice(values, 0, len(values))}
        states: dict[int, State] = {}
        for number, described in facts["state"].items():
            state = states.setdefault(int(number), {})
            for key, entry in described.items():
                if "value" in entry:
                    state[key] = unpack(entry["value"])
                else:
                    state[key] = torch.empty(pieces[int(number)].count, dtype=dtype_of(entry["dtype"]))
                    parts[f"outer.{number}.{key}"] = TensorSlice(state[key], 0, len(state[key]))
        tensors.read(parts)
        factors = tuple((size, factor) for size, factor in facts["factors"])
        return cls(values, states, factors, facts["version"], facts["samples"])

    def _factor_at(self, at: int) -> float | None:
        return next((factor for _, stop, factor in self._ranges() if at < stop), None)

    def _ranges(self) -> Iterator[tuple[int, int, float | None]]:
        stops = accumulate(size for size, _ in self.factors)
        for (size, factor), stop in zip(self.factors, stops, strict=True):
            yield stop - size, stop, factor

    def _correct(self, state: State, at: int, factor: float | None, rules: PushScaling) -> None:
        """What momentum has gathered keeps its size where elements come to a shard with another factor."""
        for gathered in (state[name] for name in MOMENTUM_KEYS if _is_row(state.get(name))):
            for start, stop, before in self._ranges():
                first, last = max(start, at), min(stop, at + len(gathered))
                if first < last and before != factor and factor is not None:
                    gathered[first - at : last - at].mul_(rules.correction(before, factor))


def _placed(pieces: Sequence[ParamSpan], sizes: Sequence[int]) -> Iterator[tuple[int, ParamSpan, int, int]]:
    """Each piece with the shard that it lies in, and where it begins in the row and in its parameter."""
    begins = [stop - piece.count for piece, stop in zip(pieces, accumulate(each.count for each in pieces), strict=True)]
    at = 0
    for number, here in enumerate(split_spans(pieces, sizes)):
        for piece in here:
            yield number, piece, at, at - begins[piece.parameter]
            at += piece.count


def _fill(whole: State, part: State, start: int, count: int) -> None:
    for key, value in part.items():
        if _is_row(value):
            row = whole.setdefault(key, torch.zeros(count, dtype=value.dtype))
            row[start : start + len(value)].copy_(value)
        else:
            whole[key] = value


def _slice(value: Any, start: int, count: int) -> Any:
    if _is_row(value):
        return value[start : start + count].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> Metadata:
    return {"dtype": name_of(value.dtype)} if _is_row(value) else {"value": pack(value)}


def _is_row(value: Any) -> bool:
    """Parameters lie flat in a shard, so what is kept for elements is flat, too."""
    return isinstance(value, torch.Tensor) and value.dim() == 1
