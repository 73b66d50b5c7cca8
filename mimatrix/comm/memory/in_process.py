"""Windows among threads of one process: ranks as threads, for tests."""

import secrets

import torch

from mimatrix.comm.memory.mapped_view import MappedView, check_size
from mimatrix.core.errors import WorldError


class InProcessWindows:
    """All ranks share this object; a handle is a key in it."""

    def __init__(self) -> None:
        self._windows: dict[str, torch.Tensor] = {}

    def allocate(self, size: int) -> "InProcessWindow":
        """A new window of `size` bytes, all zero."""
        check_size(size)
        return InProcessWindow(self._windows, torch.zeros(size, dtype=torch.uint8))

    def open(self, handle: str) -> MappedView:
        """A peer's window."""
        if handle not in self._windows:
            raise WorldError(f"the window {handle} cannot be opened; is its rank still there?")
        return MappedView(self._windows[handle])


class InProcessWindow:
    """Memory of one thread's rank."""

    def __init__(self, windows: dict[str, torch.Tensor], memory: torch.Tensor) -> None:
        self._windows, self._key = windows, secrets.token_hex(8)
        self.bytes = windows[self._key] = memory

    def handle(self) -> str:
        """The key."""
        return self._key

    def close(self) -> None:
        """Withdraw it."""
        self._windows.pop(self._key, None)
        self.bytes = torch.empty(0, dtype=torch.uint8)
