"""Who steps in place of a run's optimizer, where the run is one group of several that share their parameters."""

from typing import Protocol

from torch import nn

from mimatrix.comm.group import Group
from mimatrix.engine.binding import Binding


class Outer(Protocol):
    """As a run sees it. All ranks of the run call everything together."""

    samples: int
    """That all groups together have had."""

    def begin(self, model: nn.Module, binding: Binding, group: Group | None, *, cut: bool) -> None:
        """The model is prepared; its parameters become what all groups have. `cut`: each rank has a part of them."""

    def step(self, samples: int, usual: int) -> None:
        """In place of the optimizer's: gradients are in its tensors, and new parameters are when this is back."""

    def close(self) -> None:
        """The run ends."""
