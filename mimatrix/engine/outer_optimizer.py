"""The outer optimizer: what steps in place of a run's optimizer where the run is one group of several."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from mimatrix.comm.group import Group
from mimatrix.engine.checkpoint.outer_state import OuterCheckpoint
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    """The pushes of a group since it began."""

    pushes: int = 0
    samples: int = 0
    """Samples in them."""
    staleness: float = 0.0
    """Pushes of other groups between the last pull and the last push."""
    moved_s: float = 0.0
    """How long the group stood still for its own pushes."""
    waited_s: float = 0.0
    """How long it waited for other groups: those at a shard before it, or too far behind."""


class OuterOptimizer(OuterCheckpoint, Protocol):
    """Shares parameters with other groups. All ranks of the run call every method together."""

    is_first: bool
    """Whether this rank of the group pushes, and so knows the statistics."""

    @property
    def samples(self) -> int:
        """Samples that all groups together have pushed."""

    @property
    def stats(self) -> PushStats:
        """Statistics of this group's pushes, on its first rank."""

    def begin(self, model: nn.Module, optimizer: ShardedOptimizer, group: Group | None, *, sharded: bool) -> None:
        """Meet the other groups: all start with the same parameters. `sharded`: each rank has a part of them."""

    def step(self, samples: int, global_batch: int, step_optimizer: Callable[[], object]) -> None:
        """Step in place of the optimizer: gradients are in its tensors, new parameters are there when this returns."""

    def close(self) -> None:
        """Let the last push arrive, and disconnect."""
