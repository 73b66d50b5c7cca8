"""Everything that one shard holds at one version, to be sent and restored."""

import io
from dataclasses import dataclass
from typing import Any

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.server.push_log import PushLog

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """The parameters, optimizer state and push log of one shard."""

    values: torch.Tensor
    optimizer_state: dict[int, dict[str, Any]]
    """By parameter number: a flat tensor has one element per parameter element, anything else is for all of them."""
    factor: float | None
    """The factor of the last push (`PushScaling.factor`)."""
    log: PushLog
    origin: str = ""
    """The checkpoint that the shard was loaded from."""

    def to_tensor(self) -> torch.Tensor:
        """Serialise the state into a tensor of bytes, as it is sent."""
        buffer = io.BytesIO()
        encoded = {
            "format": _FORMAT,
            "values": self.values,
            "optimizer_state": self.optimizer_state,
            "factor": self.factor,
            "log": self.log.to_json(),
            "origin": self.origin,
        }
        torch.save(encoded, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, sent: torch.Tensor) -> "ShardState":
        """Restore a state from `to_tensor`."""
        encoded = torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True)
        if not isinstance(encoded, dict) or encoded.get("format") != _FORMAT:
            raise WorldError("the state of a shard has another format; run the same version of MiMatrix in all groups")
        return cls(
            values=encoded["values"],
            optimizer_state=encoded["optimizer_state"],
            factor=encoded["factor"],
            log=PushLog.from_json(encoded["log"]),
            origin=encoded["origin"],
        )
