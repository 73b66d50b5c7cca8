"""Peak memory of one pass, and how to continue after running out of memory."""

import ctypes
import gc
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_bytes

T = TypeVar("T")
_OOM_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|DefaultCPUAllocator|bad_alloc|cannot allocate memory"
    r"|could not create a (?:memory|primitive)|_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)
_RESET_PEAK = "5"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE = -1, -3, 1 << 20
"""Constants of malloc.h."""


class OutOfMemory:
    """The result of an action that ran out of memory.

    `lacking_bytes` is the size of the allocation that failed, or 0 if the error message does not say.
    """

    def __init__(self, message: str) -> None:
        requested = _REQUESTED.search(message)
        self.lacking_bytes = 0
        if requested:
            with suppress(UserError):
                self.lacking_bytes = parse_bytes(requested[1])


def catch_oom(action: Callable[[], T], device: torch.device) -> T | OutOfMemory:
    """Return what `action` returns, or an `OutOfMemory` after releasing everything that it had allocated."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not _OOM_MESSAGES.search(str(error)):
            raise
        message = str(error)
    # Not before here: as long as the error exists, its traceback keeps the activations alive.
    release_memory(device)
    return OutOfMemory(message)


def retry_smaller(action: Callable[[int], T], size: int, device: torch.device) -> T:
    """Return `action(size)`; on running out of memory, retry with a sixteenth of the size, twice.

    Raises:
        UserError: Even the smallest size ran out of memory.
    """
    for smaller in (size, size // 16, size // 256):
        outcome = catch_oom(partial(action, max(1, smaller)), device)
        if not isinstance(outcome, OutOfMemory):
            return outcome
    raise UserError(f"{device} has no memory left in addition to the model; give it more, or leave it out")


def release_memory(device: torch.device) -> None:
    """Free unused memory: reference cycles, and blocks that allocators keep for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_blocks() -> None:
    """Make the C library return large blocks to the kernel when they are freed, so that they do not fragment.

    This costs a little time per block. It is worth it if memory is limited: a pass then needs only what it holds.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(setting, _LARGE)


def resident_bytes(field: str = "VmRSS") -> int:
    """Return what the kernel counts for this process under a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Run `run`, and return the most that it holds at any moment in addition to what was held before.

    The caller has run something similar before, so that one-time allocations exist.
    """
    release_memory(device)
    if device.type == "cuda":
        return _gpu_peak_bytes(run, device)
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return _saved_tensors_peak_bytes(run)
    return _process_peak_bytes(run)


def _gpu_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return what the allocator takes starting with an empty cache, fragmentation included.

    If memory is tight there is less fragmentation, since the allocator returns unused blocks before it fails, so this
    is on the safe side. Free space in blocks that hold parameters may be used first, hence the second reading.
    """
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved
    return max(0, *peaks)


def _process_peak_bytes(run: Callable[[], object]) -> int:
    """Return what the kernel sees, fragmentation in the C library included: a memory limit counts that as well."""
    resident, files = resident_bytes(), resident_bytes("RssFile")
    run()
    # Code that runs for the first time is mapped from files; that does not belong to the batch.
    mapped = max(0, resident_bytes("RssFile") - files)
    return max(0, resident_bytes("VmHWM") - resident - mapped)


def _saved_tensors_peak_bytes(run: Callable[[], object]) -> int:
    """Estimate the peak if the kernel does not report it: tensors saved for backward, and the largest one twice."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values()) + 2 * max(sizes.values(), default=0)
