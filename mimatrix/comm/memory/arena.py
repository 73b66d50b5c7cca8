"""The arena: one window of a rank, cut into slots. A slot may be written again once its readers have released it."""

import threading
from bisect import bisect_right
from collections.abc import Callable

import torch

from mimatrix.comm.memory.base import Window, WindowKind
from mimatrix.core import environment
from mimatrix.core.errors import UserError

ALIGNMENT = 4096
Wait = Callable[[], None]


def slot_bytes(size: int) -> int:
    """Return how much of the arena a slot for `size` bytes takes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Slot:
    """A range of the arena. Call `wait_readers` before overwriting its bytes."""

    def __init__(self, arena: "Arena", offset: int, size: int) -> None:
        self.arena, self.offset, self.size = arena, offset, size
        self.bytes = arena.window.bytes[offset : offset + size]
        self._readers: list[Wait] = []

    def tensor(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """Return the whole slot, or its first `count` elements, as a flat tensor."""
        elements = self.size // dtype.itemsize if count is None else count
        if elements * dtype.itemsize > self.size:
            raise UserError(
                f"{elements} elements of {dtype} do not fit a slot of {self.size} bytes; allocate a larger one"
            )
        return self.bytes[: elements * dtype.itemsize].view(dtype)

    def add_readers(self, wait: Wait) -> None:
        """Record that peers may read the slot until `wait` returns."""
        self._readers.append(wait)

    def wait_readers(self) -> None:
        """Wait until no peer reads the slot any more."""
        while self._readers:
            self._readers.pop()()

    def free(self) -> None:
        """Return the slot to the arena once its readers have released it."""
        self.wait_readers()
        self.arena.release(self)


class Arena:
    """A window and the free ranges in it. Pages exist once touched, so its size is only a limit."""

    def __init__(self, kind: WindowKind, size: int) -> None:
        self.window: Window = kind.allocate(size)
        self.handle = self.window.handle()
        self._start = self.window.bytes.data_ptr()
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Slot:
        """Return a slot of at least `size` bytes."""
        needed = slot_bytes(size)
        with self._lock:
            for index, (offset, length) in enumerate(self._free):
                if length >= needed:
                    self._free[index : index + 1] = [(offset + needed, length - needed)] if length > needed else []
                    self._slots[offset] = Slot(self, offset, needed)
                    return self._slots[offset]
        raise UserError(
            f"the arena of {self.size} bytes has no room for {size}; set {environment.ARENA.name} to a larger size"
        )

    @property
    def largest_free_bytes(self) -> int:
        """The size of the largest slot that could be allocated now."""
        with self._lock:
            return max((length for _, length in self._free), default=0)

    def release(self, slot: Slot) -> None:
        """Make a slot's range free again, joined with its free neighbours."""
        with self._lock:
            self._slots.pop(slot.offset, None)
            joined: list[tuple[int, int]] = []
            for offset, length in sorted([*self._free, (slot.offset, slot.size)]):
                if joined and sum(joined[-1]) == offset:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((offset, length))
            self._free = joined

    def slot_of(self, tensor: torch.Tensor) -> tuple[Slot, int] | None:
        """Return the slot that holds a contiguous tensor and the tensor's offset in the arena, or None."""
        at = tensor.data_ptr() - self._start
        if not 0 <= at < self.size or not tensor.is_contiguous() or not self._slots:
            return None
        starts = sorted(self._slots)
        slot = self._slots[starts[max(0, bisect_right(starts, at) - 1)]]
        is_inside = slot.offset <= at and at + tensor.nbytes <= slot.offset + slot.size
        return (slot, at) if is_inside else None

    def close(self) -> None:
        """Close the window."""
        self._slots.clear()
        self.window.close()
