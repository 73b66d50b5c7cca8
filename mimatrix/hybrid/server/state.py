"""All that one shard has at one version, to be sent and to go on from."""

import io
from dataclasses import dataclass
from typing import Any

import torch

from mimatrix.hybrid.server.push_log import PushLog


@dataclass(frozen=True)
class ShardState:
    """Of one shard."""

    values: torch.Tensor
    states: dict[int, dict[str, Any]]
    """What the optimizer keeps, by the numbers of parameters: a flat tensor for elements, anything else is for all."""
    factor: float | None
    """By which the last push counted."""
    ledger: PushLog
    origin: str = ""
    """The checkpoint that it began from."""

    def to_bytes(self) -> bytes:
        """As it is sent."""
        buffer = io.BytesIO()
        told = (self.values, self.states, self.factor, self.ledger.to_json(), self.origin)
        torch.save(told, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, sent: bytes) -> "ShardState":
        """The same again."""
        values, states, factor, ledger, origin = torch.load(io.BytesIO(sent), weights_only=True)
        return cls(values, states, factor, PushLog.from_json(ledger), origin)
