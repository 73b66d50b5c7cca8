"""What carries the data of a new process group, by device: c10d backends, and the kinds of windows."""

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.comm.addresses import create_gloo, find_route, set_nccl_interface
from mimatrix.comm.availability import NcclFacts, explain_nccl
from mimatrix.comm.endpoint import own_host, own_nccl_host
from mimatrix.comm.memory.base import WindowKind
from mimatrix.comm.memory.cuda_ipc import CudaIpcWindows
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.comm.memory.nixl import NixlWindows, nixl_available
from mimatrix.comm.memory.peer_access import describe_gpu
from mimatrix.comm.nccl import create_nccl


def create_backends(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[dict[str, Any], str]:
    """Return Gloo, and for GPUs NCCL if every rank has a GPU of its own; and why there is no NCCL, if there is none."""
    route = find_route(store, rank, size, own_host())
    gloo = create_gloo(PrefixStore("gloo", store), rank, size, timeout, route.address)
    nccl_reason = _find_nccl_reason(store, rank, size)
    if not torch.cuda.is_available():
        return {"cpu": gloo}, nccl_reason
    if nccl_reason:
        return {"cpu": gloo, "cuda": gloo}, nccl_reason
    set_nccl_interface(route)
    return {"cpu": gloo, "cuda": create_nccl(store, rank, size, timeout)}, ""


def _find_nccl_reason(store: Store, rank: int, size: int) -> str:
    """Return why NCCL cannot connect the ranks; empty if it can, and the same on all ranks."""
    gpu = describe_gpu()
    own = NcclFacts(
        gpu=f"{own_nccl_host()} {gpu.uuid}" if gpu else "",
        platform=gpu.platform if gpu else "",
        is_built=dist.is_nccl_available(),
    )
    store.set(f"mimatrix/gpu/{rank}", json.dumps(asdict(own)))
    return explain_nccl([NcclFacts(**json.loads(store.get(f"mimatrix/gpu/{peer}"))) for peer in range(size)])


def create_window_kinds(store: Store, rank: int, size: int) -> dict[str, WindowKind]:
    """Return the kinds of windows that this process can have."""
    kinds: dict[str, WindowKind] = {"host": MemfdWindows()}
    if _spans_hosts(store, rank, size) and nixl_available():
        kinds["remote"] = NixlWindows()
    gpu = describe_gpu()
    if gpu and not gpu.refusal:
        kinds["cuda"] = CudaIpcWindows(torch.device("cuda", torch.cuda.current_device()))
    return kinds


def _spans_hosts(store: Store, rank: int, size: int) -> bool:
    """Whether the ranks are on several hosts."""
    store.set(f"mimatrix/host/{rank}", own_host())
    return len({store.get(f"mimatrix/host/{peer}") for peer in range(size)}) > 1
