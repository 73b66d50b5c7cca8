"""Storages that torch allocated, such as DDP's buckets, shared so that peers read them in place.

torch moves a storage into shared memory transparently: every tensor over it follows. Peers address it next to the
rank's window, at offsets from `STORAGE_SPACE` on, and map it when they first read there.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

STORAGE_SPACE = 1 << 48
"""Smaller offsets are in the window itself; the bits above number a shared storage."""
MAX_STORAGES = 256
"""Storages at a time. The part of a number above this counts how often its slot was used."""
_MIN_BYTES = 1 << 18
"""Smaller storages are not worth sharing."""


def fills_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of a large storage on the host, as buckets are."""
    is_flat = tensor.dim() == 1 and tensor.is_contiguous()
    return is_flat and _MIN_BYTES <= tensor.nbytes == tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class _SharedStorage:
    storage: StorageWeakRef
    pointer: int
    number: int
    fd: int

    def is_over(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is still at this memory."""
        return not _is_gone(self.storage) and self.pointer == storage.data_ptr()


class SharedStorages:
    """The shared storages next to one window. `offer` publishes a file under a number, `withdraw` ends that."""

    def __init__(self, offer: Callable[[int, int, int], object], withdraw: Callable[[int], object]) -> None:
        self._offer, self._withdraw = offer, withdraw
        self._shared: dict[int, _SharedStorage] = {}
        self._seen: dict[int, StorageWeakRef] = {}
        self._numbers = list(range(MAX_STORAGES - 1, 0, -1))
        self._lock = threading.Lock()
        self.refused = ""
        """Why sharing failed; nothing is tried after that."""

    def share(self, storage: torch.UntypedStorage) -> None:
        """Share a storage at its second use, if there is room: one that is used once is not worth the move."""
        with self._lock:
            self._sweep()
            if storage._cdata in self._shared or self.refused or not self._numbers or storage.is_shared():
                return
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = _weak_ref(storage)
                return
            del self._seen[storage._cdata]
            try:
                shared, size = storage._share_fd_cpu_()
            except RuntimeError as error:  # for example because /dev/shm is too small
                self.refused = str(error).splitlines()[0]
                return
            number, fd = self._numbers.pop(), os.dup(shared)
            self._shared[storage._cdata] = _SharedStorage(_weak_ref(storage), storage.data_ptr(), number, fd)
            self._offer(number, fd, size)

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset at which peers find a storage's first byte, or None if it is not shared."""
        with self._lock:
            shared = self._shared.get(storage._cdata)
            return shared.number * STORAGE_SPACE if shared and shared.is_over(storage) else None

    def __len__(self) -> int:
        """Return how many storages are shared now."""
        return sum(not _is_gone(shared.storage) for shared in self._shared.values())

    def close(self) -> None:
        """Withdraw all storages."""
        with self._lock:
            for key in list(self._shared):
                self._remove(key)

    def _sweep(self) -> None:
        """Withdraw storages that do not exist any more, and reuse their numbers."""
        for key in [key for key, shared in self._shared.items() if _is_gone(shared.storage)]:
            number = self._remove(key) + MAX_STORAGES
            if number * STORAGE_SPACE < 1 << 64:
                self._numbers.append(number)
        self._seen = {key: storage for key, storage in self._seen.items() if not _is_gone(storage)}

    def _remove(self, key: int) -> int:
        shared = self._shared.pop(key)
        self._withdraw(shared.number)
        os.close(shared.fd)
        return shared.number


def _weak_ref(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a weak reference; while it exists, no other storage has the same `_cdata`."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
