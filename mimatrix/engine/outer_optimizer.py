"""Who steps in place of a run's optimizer, where the run is one group of several that share their parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from mimatrix.comm.group import Group
from mimatrix.engine.checkpoint.storage import TensorReader, TensorSlice
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:
    import torch

    from mimatrix.engine.run import Run
    from mimatrix.engine.settings import Settings


class Mode(Protocol):
    """Another way to run than all ranks together."""

    def run(self, settings: "Settings", device: "torch.device", timeout_s: float) -> "Run":
        """The part that this process has."""


MODES: dict[str, Callable[[], Mode]] = {}
"""By the names that `mimatrix.init` knows, beside `sync`."""


@dataclass(frozen=True, slots=True)
class OuterState:
    """What a checkpoint has of that which groups share: tensors, and the facts beside them; on one rank of a group."""

    parts: Mapping[str, TensorSlice] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PushStats:
    """How it goes with a group's pushes, since it began."""

    pushes: int = 0
    samples: int = 0
    """In them."""
    staleness: float = 0.0
    """Pushes of others between the last pull and the last push."""
    moved_s: float = 0.0
    """What the group stood still for its pushes, but for the next."""
    waited_s: float = 0.0
    """For other groups: that were at a shard before, or too far behind."""


class OuterOptimizer(Protocol):
    """As a run sees it. All ranks of the run call everything together."""

    group: int
    """The number of this one."""
    is_first: bool
    """Whether this rank of the group pushes, and so knows how it goes."""

    @property
    def samples(self) -> int:
        """Samples that all groups together have pushed."""

    @property
    def now(self) -> PushStats:
        """Statistics of this group's pushes, on its first rank."""

    def begin(self, model: nn.Module, binding: ShardedOptimizer, group: Group | None, *, cut: bool) -> None:
        """The model is prepared; its parameters become what all groups have. `cut`: each rank has a part of them."""

    def step(self, samples: int, usual: int, own: Callable[[], object]) -> None:
        """In place of the optimizer's, which is `own`: gradients are in its tensors, new parameters are at the end."""

    def mark(self) -> Callable[[], OuterState]:
        """What all groups have at this moment; it is fetched later, beside further steps, by what comes back."""

    def restore(self, facts: Mapping[str, Any], tensors: TensorReader) -> Callable[[], None]:
        """Let all groups go on from a checkpoint, unless they are further already.

        What comes back gives the model what all groups have then; every rank calls it, where none has failed.
        """

    def close(self) -> None:
        """The run ends."""
