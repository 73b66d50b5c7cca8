"""Windows that are read over a network, among ranks that are threads of this process."""

import torch

from mimatrix.comm.memory.base import MappedView
from mimatrix.comm.memory.in_process import InProcessWindow, InProcessWindows


class CompletedRead:
    """A read that completes at once."""

    def wait(self, deadline: float | None = None) -> None:
        """Nothing to wait for."""


class FakeRemotePeer(MappedView):
    """A window that has to be copied, in this process: stands in for NIXL, which needs a process for each rank."""

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> CompletedRead:
        self.read(start, stop, into)
        return CompletedRead()


class FakeRemoteWindows:
    """Windows of several hosts, as threads."""

    def __init__(self) -> None:
        self._inner = InProcessWindows()

    def allocate(self, size: int) -> InProcessWindow:
        return self._inner.allocate(size)

    def open(self, handle: str) -> FakeRemotePeer:
        return FakeRemotePeer(self._inner._windows[handle])
