"""What a checkpoint needs of groups that share their parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mimatrix.engine.checkpoint.tensor_files import TensorReader, TensorSlice


@dataclass(frozen=True, slots=True)
class OuterState:
    """What groups share, for a checkpoint: tensors and metadata; on one rank of a group."""

    tensors: Mapping[str, TensorSlice] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


class OuterCheckpoint(Protocol):
    """Saves and restores what groups share."""

    group: int
    """The number of this group."""

    def mark(self) -> Callable[[], OuterState]:
        """Mark what all groups have at this moment; the returned function fetches it, while training continues."""

    def restore(self, metadata: Mapping[str, Any], tensors: TensorReader) -> Callable[[], None]:
        """Let all groups continue from a checkpoint, unless they are further already.

        Every rank calls the returned function if none has failed: it gives the model what all groups have then.
        """
