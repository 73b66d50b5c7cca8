"""Flat buffers of the engine: in the arena where peers can read them in place, otherwise anywhere."""

import threading
from collections import Counter
from collections.abc import Iterable

import torch

from mimatrix.comm.group import Group

IN_FLIGHT = "units in flight"
_FLIGHTS = 3
_SPARE = 64 << 10
"""Bytes of an arena that are left for the pages of further groups."""


class Buffers:
    """Allocates for one group on one device, and counts bytes by what they are for. A collective: all ranks make one.

    A buffer must lie in the arena on all ranks or on none, since a collective is cut otherwise where it is staged. So
    ranks agree whether they have an arena on their device at all (CPUs beside GPUs have not), and whether it has room
    for whatever comes and goes while units are in flight: it may hold as much as the model, `model_bytes`, thrice.
    What stays is allocated in one order by all, so that it needs no agreement.
    """

    def __init__(self, group: Group, device: torch.device, model_bytes: int = 0, others: Iterable[Group] = ()) -> None:
        self._group = group
        self._where = group.window_kind(torch.empty(0, device=device))
        own = group.has_windows and self._where == device.type.replace("cpu", "host")
        room = own and group.largest_free_bytes(self._where) >= _FLIGHTS * model_bytes + _SPARE
        agreed = torch.tensor([own, room], dtype=torch.int32)
        group.all_reduce(agreed, "min")
        self._places, self._places_flights = (bool(each) for each in agreed)
        for each in (group, *others) if self._places else ():
            each.allocate_staging(self._where)
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
        placed = self._places_flights if what == IN_FLIGHT else self._places
        # A GPU's arena is small; what does not fit is staged.
        if placed and self._group.largest_free_bytes(self._where) >= count * dtype.itemsize + _SPARE:
            return self._group.empty(count, dtype, self._where)
        return torch.empty(count, dtype=dtype, device=device)

    def own(self, count: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
        """For this rank alone."""
        self.count(what, count * dtype.itemsize)
        return torch.empty(count, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor, what: str) -> None:
        """Give one from `shared` back."""
        self.count(what, -tensor.numel() * tensor.element_size())
        self._group.free(tensor)
