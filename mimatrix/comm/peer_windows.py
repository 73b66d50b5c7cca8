"""What the members of a group open of each other: their windows, and the flags by which they wait for each other."""

from collections.abc import Sequence
from typing import cast

from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.remote_read import RemoteReadExecutor, RemoteWindow
from mimatrix.comm.sync import Sync
from mimatrix.comm.sync.coordinator_sync import CoordinatorSync
from mimatrix.comm.sync.flag_sync import PAGE_BYTES, FlagSync


def common_window_kinds(endpoint: Endpoint, members: Sequence[int]) -> list[str]:
    """Return the kinds of windows over which all members reach each other."""
    locations = [endpoint.locations[rank] for rank in members]
    common = set(endpoint.window_kinds).intersection(*(location.windows for location in locations))
    reachable = {"host", "cuda"} if len({location.host for location in locations}) == 1 else {"remote"}
    if "cuda" in common & reachable and not endpoint.peer_access.is_mutual(members):
        reachable.remove("cuda")
    return sorted(common & reachable, reverse=True)


def open_executor(
    endpoint: Endpoint, kind: str, members: Sequence[int], sync: Sync, timeout_s: float
) -> OneSidedExecutor:
    """Open the windows of all members of one kind, and return what runs collectives over them."""
    windows = [None if rank == endpoint.rank else endpoint.window(kind, rank) for rank in members]
    arena = endpoint.arenas[kind]
    if kind == "remote":
        remote = cast("list[RemoteWindow | None]", windows)
        return RemoteReadExecutor(arena, remote, sync, members, endpoint.control, timeout_s)
    return OneSidedExecutor(arena, windows, sync)


def open_sync(endpoint: Endpoint, name: str, members: Sequence[int], timeout_s: float) -> Sync:
    """Return how the members wait for each other: by flags in mapped memory, or between hosts by the coordinator."""
    if "host" in common_window_kinds(endpoint, members):
        return _open_flags(endpoint, name, members, timeout_s)
    return CoordinatorSync(name, members, endpoint.control, timeout_s)


def _open_flags(endpoint: Endpoint, name: str, members: Sequence[int], timeout_s: float) -> FlagSync:
    """Publish this rank's flag page and map those of all members."""
    own, store = members.index(endpoint.rank), endpoint.store
    page = endpoint.arenas["host"].allocate(PAGE_BYTES)
    page.bytes.zero_()
    store.set(f"mimatrix/group/{name}/{own}", str(page.offset))
    pages = []
    for member, rank in enumerate(members):
        offset = int(store.get(f"mimatrix/group/{name}/{member}"))
        mapped = page.bytes if member == own else endpoint.window("host", rank).view(offset, offset + PAGE_BYTES)
        assert mapped is not None
        pages.append(mapped.numpy().data.cast("B"))
    return FlagSync(own, pages, members, endpoint.control, timeout_s, group=name)
