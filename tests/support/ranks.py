"""Ranks that are threads of this process."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store

from mimatrix.comm import C10dBackend, Endpoint, Group
from mimatrix.comm.memory.base import WindowKind
from mimatrix.comm.memory.in_process import InProcessWindows

T = TypeVar("T")
ARENA_BYTES = 32 << 20


def together(size: int, on_rank: Callable[[int], T], timeout_s: float = 60.0) -> list[T]:
    """Run `on_rank(rank)` on `size` threads; return their results, or raise the first error."""
    results: list[T | None] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = on_rank(rank)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"rank {rank} hangs"
    if errors:
        raise errors[0][1]
    return results  # type: ignore[return-value]


def in_groups(
    size: int,
    on_rank: Callable[[Group], T],
    *,
    hosts: Sequence[str] | None = None,
    kinds: Callable[[], dict[str, WindowKind]] | None = None,
    timeout_s: float = 20.0,
    with_gloo: bool = False,
    nccl: Callable[[int], Any] | None = None,
    tune: bool = False,
) -> list[T]:
    """Run `on_rank(group)` on threads that are the ranks of one group, over windows in this process.

    `nccl` makes what plays NCCL for tensors on the meta device, which are in no memory; it needs `with_gloo`.
    """
    store, shared = HashStore(), InProcessWindows()

    def rank_alone(rank: int) -> T:
        chosen = kinds() if kinds else {"host": shared}
        host = hosts[rank] if hosts else "here"
        endpoint = Endpoint.join(store, rank, size, chosen, host=host, arena_bytes=ARENA_BYTES)
        try:
            backends = {"cpu": create_gloo(PrefixStore("gloo", store), rank, size)} if with_gloo else {}
            backends |= {"meta": nccl(rank)} if nccl else {}
            wrapped = {device: C10dBackend(each, rank, size, timeout_s) for device, each in backends.items()}
            return on_rank(Group.create(endpoint, "all", range(size), backends=wrapped, timeout_s=timeout_s, tune=tune))
        finally:
            endpoint.close()

    return together(size, rank_alone)


def create_gloo(store: Store, rank: int, size: int) -> ProcessGroupGloo:
    """Return Gloo's process group for ranks that are threads."""
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
