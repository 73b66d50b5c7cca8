"""Windows among threads of one process, whose ranks are threads."""

import secrets

import torch

from mimatrix.comm.memory.base import MappedView, check_size
from mimatrix.core.errors import WorldError


class InProcessWindows:
    """The windows of all ranks, which share this object; a handle is a key in it."""

    def __init__(self) -> None:
        self._windows: dict[str, torch.Tensor] = {}

    def allocate(self, size: int) -> "InProcessWindow":
        """Return a new window of `size` bytes, all zero."""
        check_size(size)
        return InProcessWindow(self._windows, torch.zeros(size, dtype=torch.uint8))

    def open(self, handle: str) -> MappedView:
        """Open a peer's window by its handle."""
        if handle not in self._windows:
            raise WorldError(f"the window {handle} cannot be opened; is its rank still there?")
        return MappedView(self._windows[handle])


class InProcessWindow:
    """Memory of one thread's rank."""

    def __init__(self, windows: dict[str, torch.Tensor], memory: torch.Tensor) -> None:
        self._windows, self._key = windows, secrets.token_hex(8)
        self.bytes = windows[self._key] = memory

    def handle(self) -> str:
        """Return the key of the window."""
        return self._key

    def close(self) -> None:
        """Withdraw the window."""
        self._windows.pop(self._key, None)
        self.bytes = torch.empty(0, dtype=torch.uint8)
