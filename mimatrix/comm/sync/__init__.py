"""How ranks wait for each other within a collective: by flags in mapped memory, or through the coordinator."""

from collections.abc import Collection, Sequence
from typing import Protocol

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.user_calls import UserCall

Release = tuple[tuple[int, int, int], ...]
"""What must have happened before a slot is written again: (peer, the count that it must have reached, the call)."""


class Sync(Protocol):
    """Synchronisation of one group; see `FlagSync` and `CoordinatorSync`."""

    waited_s: float
    """How long this rank has waited for others, over all calls."""
    user_call: UserCall | None
    """The user's call for which the next collectives run; peers compare it with theirs."""

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """Announce a call whose data lie at `offset` of the arena."""
        ...

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Wait until each of `peers` has finished the rounds before `number`."""
        ...

    def offset_of(self, peer: int) -> int:
        """Return where a peer that was waited for has its data of this call."""
        ...

    def finish(self, number: int) -> None:
        """Announce that this rank has finished round `number`."""
        ...

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """End the call; return what to wait for before its data are overwritten."""
        ...

    def wait_released(self, release: Release) -> None:
        """Wait until all readers have released the data."""
        ...

    def fail(self, error: BaseException) -> None:
        """Announce that this rank cannot finish its call; it makes no further call in this group."""
        ...
