"""The peak of memory in one pass, and what to do when there was not enough."""

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
_OVERFLOWS = re.compile(
    r"out of memory|can't allocate memory|DefaultCPUAllocator|bad_alloc|cannot allocate memory"
    r"|could not create a (?:memory|primitive)|_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_TRIED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)
_RESETS_PEAK = "5"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE = -1, -3, 1 << 20
"""Of malloc.h."""


class OutOfMemory:
    """Memory ran out. `lacking_bytes`: what the last allocation asked for in vain, 0 where nobody said."""

    def __init__(self, said: str) -> None:
        found = _TRIED.search(said)
        self.lacking_bytes = 0
        if found:
            with suppress(UserError):
                self.lacking_bytes = parse_bytes(found[1])


def attempted(action: Callable[[], T], device: torch.device) -> T | OutOfMemory:
    """What `action` returns; an `OutOfMemory` where memory ran out, with everything given back that it had taken."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not _OVERFLOWS.search(str(error)):
            raise
        said = str(error)
    # Only here: as long as the error is known, its traceback holds the activations.
    tidy(device)
    return OutOfMemory(said)


def with_less(action: Callable[[int], T], size: int, device: torch.device) -> T:
    """What `action` returns for `size`, or for a part of it where there is no memory for all."""
    for smaller in (size, size // 16, size // 256):
        found = attempted(partial(action, max(1, smaller)), device)
        if not isinstance(found, OutOfMemory):
            return found
    raise UserError(f"{device} has no memory left beside the model; give it more, or leave it out")


def tidy(device: torch.device) -> None:
    """Give back what nobody uses: Python's cycles, and what allocators keep for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once() -> None:
    """From here on the C library gives large blocks back when they are freed, and does not lose room between them.

    It costs a little time for each, and is worth it where memory is short: then what a pass needs is what it holds.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            library.mallopt(setting, _LARGE)


def resident_bytes(word: str = "VmRSS") -> int:
    """What the kernel counts of this process, by a word of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{word}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that `run` holds at any moment, beside what is held before it. Something like it has run before."""
    tidy(device)
    if device.type == "cuda":
        return _peak_of_gpu(run, device)
    try:
        Path("/proc/self/clear_refs").write_text(_RESETS_PEAK, encoding="ascii")
    except OSError:
        return _peak_of_saved(run)
    return _peak_of_process(run)


def _peak_of_gpu(run: Callable[[], object], device: torch.device) -> int:
    """What the allocator takes from an empty cache: also what it loses between blocks, since the GPU has to give it.

    Where memory is tight it would lose less, as it gives unused blocks back before it fails; so this is on the safe
    side. Free places in blocks that hold parameters may be used first, hence the other reading.
    """
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved
    return max(0, *peaks)


def _peak_of_process(run: Callable[[], object]) -> int:
    """What the kernel sees, so with what the C library loses between blocks: a limit on memory counts that, too."""
    resident, files = resident_bytes(), resident_bytes("RssFile")
    run()
    # Code that runs for the first time is read from files; that is no part of the batch.
    read = max(0, resident_bytes("RssFile") - files)
    return max(0, resident_bytes("VmHWM") - resident - read)


def _peak_of_saved(run: Callable[[], object]) -> int:
    """Where the kernel does not tell: what is kept for the way back, and what the largest step of it holds beside."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values()) + 2 * max(sizes.values(), default=0)
