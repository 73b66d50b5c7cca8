"""Windows: memory of one rank that peers may read without its help.

A kind of window allocates, publishes and opens them; every kind passes the same contract tests. If a peer's memory is
mapped, `PeerWindow.view` returns a tensor over it, so that a sum reads it in place; if not, `view` returns None and
`read` copies.
"""

from typing import Protocol

import torch

from mimatrix.core.errors import UserError


class Window(Protocol):
    """Memory of this rank."""

    @property
    def bytes(self) -> torch.Tensor:
        """The whole window as a tensor of uint8."""
        ...

    def handle(self) -> str:
        """Return what a peer needs to open it: printable, to be published in a store."""
        ...

    def close(self) -> None:
        """Withdraw the window; peers that have it open keep what they see until they close it."""
        ...


class PeerWindow(Protocol):
    """A peer's window that was opened here."""

    def view(self, start: int, stop: int) -> torch.Tensor | None:
        """Return bytes [start, stop) in place, or None if they are not mapped."""
        ...

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy bytes [start, stop) into a contiguous tensor of uint8, and wait until they are there."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class WindowKind(Protocol):
    """How windows are allocated and opened in this process."""

    def allocate(self, size: int) -> Window:
        """Return a new window of `size` bytes, all zero."""
        ...

    def open(self, handle: str) -> PeerWindow:
        """Open a peer's window by its handle."""
        ...


class MappedView:
    """A peer's window whose memory is mapped here."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes [start, stop) in place."""
        if not 0 <= start <= stop <= len(self._bytes):
            raise UserError(f"bytes {start} to {stop} are outside the window; use 0 to {len(self._bytes)}")
        return self._bytes[start:stop]

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy bytes [start, stop) into a tensor of that size."""
        source = self.view(start, stop)
        if into.numel() != stop - start:
            raise UserError(f"{stop - start} bytes do not fit a tensor of {into.numel()}; give one of that size")
        into.copy_(source)

    def close(self) -> None:
        """Close it; the mapping ends with the last view."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def check_size(size: int) -> None:
    """Refuse an empty window."""
    if size < 1:
        raise UserError(f"a window of {size} bytes is empty; use 1 or more")
