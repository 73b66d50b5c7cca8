"""How much memory a rank may take from now on, on its device."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_bytes
from mimatrix.profiler.cgroups import memory_left
from mimatrix.profiler.memory import attempted, resident_bytes, tidy

# What allocators lose between blocks, and what nobody foresees.
_GPU_HEADROOM, _CPU_HEADROOM = 0.92, 0.9
_SEGMENT, _SMALL = 20 << 20, 1 << 20
"""So much of a GPU torch takes at once for tensors that are not small: the last such segment may be nearly empty, and
one more where what comes and goes finds no hole that fits."""
_MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def room(device: torch.device, neighbours: int = 1, sharers: int = 1) -> int:
    """Bytes that this rank may take beside what it has.

    `neighbours` ranks share the memory and `sharers` the limit of a control group, itself included.
    """
    if device.type == "cuda":
        attempted(lambda: _set_up_libraries(device), device)
    tidy(device)
    if device.type != "cuda":
        return max(0, int(_cpu_room(neighbours, sharers) * _CPU_HEADROOM))
    left = _gpu_room(device, neighbours)
    return max(0, int(min(left * _GPU_HEADROOM, left - 2 * _SEGMENT)))


def in_segments(size: int) -> int:
    """What tensors of `size` bytes together may take of a GPU at most."""
    return size + _SEGMENT if size > _SMALL else size


def is_limited(device: torch.device) -> bool:
    """Whether somebody set a limit to what this process may take beside the device's own."""
    return device.type == "cpu" and (bool(environment.MEMORY.get()) or memory_left() is not None)


def mps_limit(index: int, variables: Mapping[str, str]) -> int | None:
    """What `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` (`0=16G,1=8000M`) lets one process have of a GPU; None without one."""
    for part in variables.get(_MPS_LIMIT, "").split(","):
        found = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+[KMG]?)B?\s*", part, re.IGNORECASE)
        if found and int(found[1]) == index:
            # To MPS a G is a GiB.
            return parse_bytes(f"{found[2]}iB" if found[2][-1].isalpha() else found[2])
    return None


@lru_cache
def _set_up_libraries(device: torch.device) -> None:
    """Multiply a little, forward and back: cuBLAS takes 32 MiB for each thread at its first use, and keeps them."""
    with torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(square, square, square[0]).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def _gpu_room(device: torch.device, neighbours: int) -> float:
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - used
    limit = mps_limit(device.index or 0, os.environ)
    # A limit of its own is a rank's part already; without one, whoever shares the GPU takes from the same memory.
    bounds = [(free + cached) / (neighbours if limit is None else 1)]
    bounds.append(torch.cuda.get_per_process_memory_fraction(device) * total - used)
    if limit is not None:
        bounds.append(limit - used)
    return min(bounds)


def _cpu_room(neighbours: int, sharers: int) -> float:
    bounds = [_available() / neighbours]
    if setting := environment.MEMORY.get():
        bounds.append(_parsed(setting) - resident_bytes())
    limited = memory_left()
    if limited is not None:
        bounds.append(limited / sharers)
    return min(bounds)


def _parsed(setting: str) -> int:
    try:
        return parse_bytes(setting)
    except UserError:
        raise UserError(f'MIMATRIX_MEMORY is "{setting}"; write bytes or for example 512MB, or leave it out') from None


def _available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
