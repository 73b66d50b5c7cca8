"""The arena: one window of a rank, cut into slots. A slot may be written again once its readers have released it."""

import threading
from bisect import bisect_right
from collections.abc import Callable

import torch

from mimatrix.comm.memory import Window, WindowKind
from mimatrix.core.errors import UserError

ALIGNMENT = 4096
Wait = Callable[[], None]


def slot_bytes(size: int) -> int:
    """What a slot for `size` bytes takes of the arena."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


class Slot:
    """A range of the arena. `reuse` is to be called before its bytes are overwritten."""

    def __init__(self, arena: "Arena", offset: int, size: int) -> None:
        self.arena, self.offset, self.size = arena, offset, size
        self.bytes = arena.window.bytes[offset : offset + size]
        self._unreleased: list[Wait] = []

    def tensor(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """The slot as a flat tensor; all of it, or its first `count` elements."""
        whole = self.size // dtype.itemsize if count is None else count
        if whole * dtype.itemsize > self.size:
            raise UserError(
                f"{whole} elements of {dtype} do not fit a slot of {self.size} bytes; allocate a larger one"
            )
        return self.bytes[: whole * dtype.itemsize].view(dtype)

    def read_until(self, wait: Wait) -> None:
        """Peers may read it until `wait` comes back."""
        self._unreleased.append(wait)

    def reuse(self) -> None:
        """Back when nobody reads what is in it any more."""
        while self._unreleased:
            self._unreleased.pop()()

    def free(self) -> None:
        """Give it back to the arena, after its readers have released it."""
        self.reuse()
        self.arena.take_back(self)


class Arena:
    """A window and what is free of it. Pages exist once touched, so its size is only a limit."""

    def __init__(self, kind: WindowKind, size: int) -> None:
        self.window: Window = kind.allocate(size)
        self.handle = self.window.handle()
        self._start = self.window.bytes.data_ptr()
        self._size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Slot:
        """A slot of at least `size` bytes."""
        wanted = slot_bytes(size)
        with self._lock:
            for index, (offset, room) in enumerate(self._free):
                if room >= wanted:
                    self._free[index : index + 1] = [(offset + wanted, room - wanted)] if room > wanted else []
                    self._slots[offset] = Slot(self, offset, wanted)
                    return self._slots[offset]
        raise UserError(f"the arena of {self._size} bytes has no room for {size}; set MIMATRIX_ARENA to a larger size")

    @property
    def largest_free(self) -> int:
        """The most bytes that one slot could have now."""
        with self._lock:
            return max((room for _, room in self._free), default=0)

    def take_back(self, slot: Slot) -> None:
        """Join the slot's room with what is free beside it."""
        with self._lock:
            self._slots.pop(slot.offset, None)
            joined: list[tuple[int, int]] = []
            for offset, room in sorted([*self._free, (slot.offset, slot.size)]):
                if joined and sum(joined[-1]) == offset:
                    joined[-1] = (joined[-1][0], joined[-1][1] + room)
                else:
                    joined.append((offset, room))
            self._free = joined

    def slot_of(self, tensor: torch.Tensor) -> tuple[Slot, int] | None:
        """The slot in which a contiguous tensor lies and its place in the arena, if it lies in one."""
        at = tensor.data_ptr() - self._start
        if not 0 <= at < self._size or not tensor.is_contiguous() or not self._slots:
            return None
        starts = sorted(self._slots)
        slot = self._slots[starts[max(0, bisect_right(starts, at) - 1)]]
        inside = slot.offset <= at and at + tensor.numel() * tensor.element_size() <= slot.offset + slot.size
        return (slot, at) if inside else None

    def close(self) -> None:
        """Give the window back."""
        self._slots.clear()
        self.window.close()
