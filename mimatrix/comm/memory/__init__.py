"""Windows: memory of one rank that peers may read without its help.

A kind of windows allocates, publishes and opens them; every kind passes tests/comm/memory/test_contract.py. Where a
peer's memory is mapped, `PeerWindow.view` gives the tensor itself, so that a sum reads it in place; where it is not,
`view` gives None and `read` fetches.
"""

from typing import Protocol

import torch


class Window(Protocol):
    """Memory of this rank. `bytes` is all of it as a tensor of uint8."""

    @property
    def bytes(self) -> torch.Tensor:
        """The whole window."""
        ...

    def handle(self) -> str:
        """What a peer needs to open it: printable, to be published in a store."""
        ...

    def close(self) -> None:
        """Give the memory back; peers that still have it open keep what they see until they close."""
        ...


class PeerWindow(Protocol):
    """A peer's window, opened."""

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """Bytes [start, stop) of the peer in place, where they are mapped."""
        ...

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy bytes [start, stop) into a contiguous tensor of uint8; back when they are there."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class WindowKind(Protocol):
    """How windows are made and opened in this process."""

    def allocate(self, size: int) -> Window:
        """A new window of `size` bytes."""
        ...

    def open(self, handle: str) -> PeerWindow:
        """A peer's window, by what its `handle` gave."""
        ...
