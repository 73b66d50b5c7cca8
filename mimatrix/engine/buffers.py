"""Flat buffers of the engine: in the arena where peers can read them in place, otherwise anywhere."""

import threading
from collections import Counter

import torch

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError


class Buffers:
    """Allocates for one group, and counts bytes by what they are for."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.bytes = Counter[str]()
        """What is allocated now, by kind: parameters, gradients, units in flight."""
        self._lock = threading.Lock()

    def count(self, what: str, size: int) -> None:
        """So many bytes more, or less; from any thread."""
        with self._lock:
            self.bytes[what] += size

    def shared(self, count: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
        """For collectives: in the arena if that has room, since then nothing is staged."""
        self.count(what, count * dtype.itemsize)
        where = self._group.where(torch.empty(0, device=device))
        if where == device.type.replace("cpu", "host"):
            try:
                placed = self._group.empty(count, dtype, where)
            except UserError:
                pass  # a GPU's arena is small; what does not fit is staged
            else:
                if self._group.stages_fit(count * dtype.itemsize, where):
                    return placed
                self._group.free(placed)  # or nothing could be staged
        return torch.empty(count, dtype=dtype, device=device)

    def own(self, count: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
        """For this rank alone."""
        self.count(what, count * dtype.itemsize)
        return torch.empty(count, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor, what: str) -> None:
        """Give one from `shared` back."""
        self.count(what, -tensor.numel() * tensor.element_size())
        self._group.free(tensor)
