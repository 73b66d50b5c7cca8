"""Flat buffers of the engine: in the arena, where peers can read them in place, otherwise in plain memory."""

import threading
from collections import Counter
from collections.abc import Iterable

import torch

from mimatrix.comm.group import Group

IN_FLIGHT = "units in flight"
"""The kind of buffers that exist only while a unit is gathered or reduced."""
_MAX_MODELS_IN_FLIGHT = 3
_SPARE_BYTES = 64 << 10
"""Left in an arena for the pages of further groups."""


class Buffers:
    """Allocates flat buffers for one group on one device, and counts bytes by what they are for.

    A buffer must lie in the arena on all ranks or on none, since a collective is split differently where it is staged.
    So ranks agree whether all have an arena on their device (not with CPUs among GPUs), and whether it has room for
    what is allocated while units are in flight. Buffers that stay are allocated in one order by all ranks, so that
    they need no agreement.
    """

    def __init__(self, group: Group, window_kind: str, *, in_arena: bool, in_flight_in_arena: bool) -> None:
        self._group, self._window_kind = group, window_kind
        self._in_arena, self._in_flight_in_arena = in_arena, in_flight_in_arena
        self.bytes = Counter[str]()
        """What is allocated now, by kind: parameters, gradients, units in flight."""
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, group: Group, device: torch.device, model_bytes: int = 0, others: Iterable[Group] = ()
    ) -> "Buffers":
        """Agree with the other ranks on where buffers lie. A collective.

        `model_bytes` is the size of the model: three times as much may be in flight. `others` are further groups that
        use the buffers.
        """
        window_kind = group.window_kind(torch.empty(0, device=device))
        has_arena = group.has_windows and window_kind == device.type.replace("cpu", "host")
        has_room = (
            has_arena and group.largest_free_bytes(window_kind) >= _MAX_MODELS_IN_FLIGHT * model_bytes + _SPARE_BYTES
        )
        agreed = torch.tensor([has_arena, has_room], dtype=torch.int32)
        group.all_reduce(agreed, "min")
        in_arena, in_flight_in_arena = (bool(flag) for flag in agreed)
        for user in (group, *others) if in_arena else ():
            user.allocate_staging(window_kind)
        return cls(group, window_kind, in_arena=in_arena, in_flight_in_arena=in_flight_in_arena)

    def count(self, kind: str, size: int) -> None:
        """Add to the bytes of a kind; from any thread."""
        with self._lock:
            self.bytes[kind] += size

    def collective(self, count: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
        """Allocate a buffer for collectives: in the arena if that has room, since then nothing is staged."""
        self.count(kind, count * dtype.itemsize)
        in_arena = self._in_flight_in_arena if kind == IN_FLIGHT else self._in_arena
        # A GPU's arena is small; what does not fit is staged.
        if in_arena and self._group.largest_free_bytes(self._window_kind) >= count * dtype.itemsize + _SPARE_BYTES:
            return self._group.empty(count, dtype, self._window_kind)
        return torch.empty(count, dtype=dtype, device=device)

    def private(self, count: int, dtype: torch.dtype, device: torch.device, kind: str) -> torch.Tensor:
        """Allocate a buffer that only this rank uses."""
        self.count(kind, count * dtype.itemsize)
        return torch.empty(count, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor, kind: str) -> None:
        """Free a buffer from `collective`."""
        self.count(kind, -tensor.nbytes)
        self._group.free(tensor)
