"""Whether all ranks have prepared the same: found before they wait for one another with different things."""

import hashlib
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.hyperparams import Hyperparams
from mimatrix.engine.rank_exchange import Message
from mimatrix.engine.zero.units import Unit


def described(dataset: Any, units: Sequence[Unit], optimizer: Optimizer, settings: Hyperparams) -> Message:
    """What this rank has prepared, in words and digests."""
    return {
        "dataset": f"a dataset of {len(dataset)} samples" if hasattr(dataset, "__len__") else "a stream",
        "model": _of_model(units),
        "optimizer": type(optimizer).__name__,
        "settings": settings,
    }


def compare(messages: Sequence[Message], rank: int) -> None:
    """Raise if ranks have prepared different things."""
    mine = messages[rank]
    for other, theirs in enumerate(messages):
        for what in ("dataset", "model", "optimizer"):
            if theirs[what] != mine[what]:
                raise UserError(
                    f"rank {other} prepared {theirs[what]} and rank {rank} {mine[what]}; prepare the same on all ranks"
                )
        for name in {**theirs["settings"], **mine["settings"]}:
            one, another = theirs["settings"].get(name), mine["settings"].get(name)
            if one != another:
                number, _, key = name.partition("/")
                raise UserError(
                    f"the optimizer's {key} (param group {number}) is {one} on rank {other} and {another} on rank "
                    f"{rank}; give all ranks the same"
                )


def _of_model(units: Sequence[Unit]) -> str:
    pieces = [piece for unit in units for piece in unit.params]
    said = [
        (piece.names, list(piece.shape), piece.strides, str(piece.parameter.dtype), piece.index) for piece in pieces
    ]
    cut = [(unit.trainable, len(unit.params), unit.count) for unit in units]
    digest = hashlib.sha256(repr((said, cut)).encode()).hexdigest()[:8]
    return f"a model of {len(pieces)} parameters with {sum(p.shape.numel() for p in pieces)} numbers ({digest})"
