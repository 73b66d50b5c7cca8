"""How much memory a rank may still allocate on its device."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_bytes
from mimatrix.profiler.cgroups import memory_left_bytes
from mimatrix.profiler.memory import catch_oom, release_memory, resident_bytes

# Headroom for fragmentation and for what is not foreseen.
_GPU_USABLE, _CPU_USABLE = 0.92, 0.9
_SEGMENT, _SMALL = 20 << 20, 1 << 20
"""Torch takes this much of a GPU at once for tensors that are not small. The last segment may be nearly empty, and one
more may be needed if temporary tensors fit into no free block."""
_MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def available_bytes(device: torch.device, device_sharers: int = 1, cgroup_sharers: int = 1) -> int:
    """Return the bytes that this rank may allocate in addition to what it has.

    Args:
        device: The device of this rank.
        device_sharers: Ranks that share the memory of the device, this one included.
        cgroup_sharers: Ranks that share the limit of a control group, this one included.
    """
    if device.type == "cuda":
        catch_oom(lambda: _set_up_libraries(device), device)
    release_memory(device)
    if device.type != "cuda":
        return max(0, int(_cpu_bytes(device_sharers, cgroup_sharers) * _CPU_USABLE))
    free_bytes = _gpu_bytes(device, device_sharers)
    return max(0, int(min(free_bytes * _GPU_USABLE, free_bytes - 2 * _SEGMENT)))


def segmented_bytes(size: int) -> int:
    """Return an upper bound of what tensors of `size` bytes in total take of a GPU."""
    return size + _SEGMENT if size > _SMALL else size


def has_memory_limit(device: torch.device) -> bool:
    """Tell whether this process has a memory limit below that of its device."""
    return device.type == "cpu" and (bool(environment.MEMORY.get()) or memory_left_bytes() is not None)


def mps_limit_bytes(index: int, environ: Mapping[str, str]) -> int | None:
    """Return the part of a GPU that MPS lets one process have, or None if there is no limit.

    It is read from `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`, e.g. `0=16G,1=8000M`.
    """
    for part in environ.get(_MPS_LIMIT, "").split(","):
        match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+[KMG]?)B?\s*", part, re.IGNORECASE)
        if match and int(match[1]) == index:
            # MPS writes GiB as G.
            return parse_bytes(f"{match[2]}iB" if match[2][-1].isalpha() else match[2])
    return None


@lru_cache
def _set_up_libraries(device: torch.device) -> None:
    """Run a small matrix product forward and backward: cuBLAS keeps 32 MiB per thread from its first use on."""
    with torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(square, square, square[0]).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def _gpu_bytes(device: torch.device, device_sharers: int) -> float:
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - used
    limit = mps_limit_bytes(device.index or 0, os.environ)
    # A limit by MPS is already this rank's part; without one, all ranks on the GPU allocate from the same memory.
    bounds = [(free + cached) / (device_sharers if limit is None else 1)]
    bounds.append(torch.cuda.get_per_process_memory_fraction(device) * total - used)
    if limit is not None:
        bounds.append(limit - used)
    return min(bounds)


def _cpu_bytes(device_sharers: int, cgroup_sharers: int) -> float:
    bounds = [_free_host_bytes() / device_sharers]
    if setting := environment.MEMORY.get():
        bounds.append(_parse_setting(setting) - resident_bytes())
    cgroup_bytes = memory_left_bytes()
    if cgroup_bytes is not None:
        bounds.append(cgroup_bytes / cgroup_sharers)
    return min(bounds)


def _parse_setting(setting: str) -> int:
    try:
        return parse_bytes(setting)
    except UserError:
        raise UserError(
            f'{environment.MEMORY.name} is "{setting}"; write a number of bytes, e.g. 512MB, or leave it out'
        ) from None


def _free_host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
