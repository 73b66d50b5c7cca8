"""One rank: nothing is cut and nothing moves, whatever the stage. What a plain loop does, with the same methods."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from mimatrix.engine.zero.sharding import ParamShard
from mimatrix.engine.zero.units import Unit


class SingleProcess:
    """Takes the place of a `Sharding` where there is nobody to share with; gradients stay with the parameters."""

    stage = 0
    parts = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._pieces = [piece for unit in units if unit.learns for piece in unit.pieces]
        self.memory = Counter({"parameters": sum(unit.bytes for unit in units)})

    def check_places(self) -> None:
        """Parameters may be anywhere."""

    def touched(self) -> list[int]:
        """The numbers of parameters that have a gradient."""
        return [piece.index for piece in self._pieces if piece.parameter.grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        """All of them."""
        return [piece.parameter.grad for piece in self._pieces if piece.parameter.grad is not None]

    def clear(self) -> None:
        """Gradients are gone, also those of parameters that the optimizer does not have."""
        for piece in self._pieces:
            piece.parameter.grad = None

    def slices(self) -> Iterator[ParamShard]:
        """Every parameter whole; gradients are where autograd leaves them."""
        for piece in self._pieces:
            yield ParamShard(piece, 0, piece.shape.numel(), piece.parameter, piece.parameter)
