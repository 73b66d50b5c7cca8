"""Storages that were made elsewhere, as DDP's buckets are, shared so that peers read them in place.

Torch moves a storage into shared memory without anyone noticing: every tensor over it follows. Peers find it beside the
rank's window, at a place past `BEYOND`, and map it when they first read there.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

BEYOND = 1 << 48
"""Places are offsets in the window; the bits above these name a storage beside it."""
NUMBERS = 256
"""Storages at a time; what comes above this in a name counts how often the number was used."""


@dataclass(frozen=True, slots=True)
class _SharedStorage:
    storage: StorageWeakRef
    pointer: int
    name: int
    fd: int

    def is_over(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is still where the storage lies."""
        return not _is_gone(self.storage) and self.pointer == storage.data_ptr()


class SharedStorages:
    """The storages beside one window. `offer` lets peers have a file by its name here, `withdraw` no longer."""

    def __init__(self, offer: Callable[[int, int, int], object], withdraw: Callable[[int], object]) -> None:
        self._offer, self._withdraw = offer, withdraw
        self._lent: dict[int, _SharedStorage] = {}
        self._seen: dict[int, StorageWeakRef] = {}
        self._names = list(range(NUMBERS - 1, 0, -1))
        self._lock = threading.Lock()
        self.refused = ""
        """Why the last one could not be shared; nothing is tried after that."""

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Share it when it comes for the second time, if there is room: what comes once is not worth the move."""
        with self._lock:
            self._sweep()
            if storage._cdata in self._lent or self.refused or not self._names or storage.is_shared():
                return
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = _watched(storage)
                return
            del self._seen[storage._cdata]
            try:
                shared, size = storage._share_fd_cpu_()
            except RuntimeError as error:  # /dev/shm is too small, say
                self.refused = str(error).splitlines()[0]
                return
            name, fd = self._names.pop(), os.dup(shared)
            self._lent[storage._cdata] = _SharedStorage(_watched(storage), storage.data_ptr(), name, fd)
            self._offer(name, fd, size)

    def place_of(self, storage: torch.UntypedStorage) -> int | None:
        """Where peers find its first byte, if it was adopted."""
        with self._lock:
            found = self._lent.get(storage._cdata)
            return found.name * BEYOND if found and found.is_over(storage) else None

    def __len__(self) -> int:
        """How many there are now."""
        return sum(not _is_gone(lent.storage) for lent in self._lent.values())

    def close(self) -> None:
        """Lend nothing any more."""
        with self._lock:
            for key in list(self._lent):
                self._take_back(key)

    def _sweep(self) -> None:
        """Take back what nobody here has any more."""
        for key in [key for key, lent in self._lent.items() if _is_gone(lent.storage)]:
            name = self._take_back(key) + NUMBERS
            if name * BEYOND < 1 << 64:
                self._names.append(name)
        self._seen = {key: storage for key, storage in self._seen.items() if not _is_gone(storage)}

    def _take_back(self, key: int) -> int:
        lent = self._lent.pop(key)
        self._withdraw(lent.name)
        os.close(lent.fd)
        return lent.name


def _watched(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A storage, without keeping it; while this is kept, no other has its `_cdata`."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
