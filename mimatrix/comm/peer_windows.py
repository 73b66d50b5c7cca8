"""What the members of a group open of each other: their windows, and the flags by which they wait for each other."""

from collections.abc import Sequence
from typing import cast

from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution.mixed import MixedExecutor
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.remote_read import RemoteReadExecutor, RemoteWindow
from mimatrix.comm.execution.send_recv import PointToPoint
from mimatrix.comm.memory.arena import ALIGNMENT, Arena, Slot
from mimatrix.comm.sync import Sync
from mimatrix.comm.sync.coordinator_sync import CoordinatorSync
from mimatrix.comm.sync.flag_sync import PAGE_BYTES, FlagSync
from mimatrix.core.errors import UserError

_MAX_CHUNK_BYTES = 64 << 20
"""Of a tensor whose parts also go to other hosts: segments keep what is worked on at a time small."""
_CHUNKS_IN_ARENA = 64
"""How many chunks a small arena has room for; every group has two."""
_SHARD_BYTES = 64
"""By how much the shards of one rank may be larger in one chunk than in another."""


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


def hosts_of(endpoint: Endpoint, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the members of each host, by their numbers in the group."""
    hosts: dict[str, list[int]] = {}
    for member, rank in enumerate(members):
        hosts.setdefault(endpoint.locations[rank].host, []).append(member)
    return tuple(map(tuple, hosts.values()))


def can_mix(endpoint: Endpoint, members: Sequence[int]) -> bool:
    """Return whether members are on several hosts, of which one has several, and can map their hosts' memory."""
    sizes = [len(host) for host in hosts_of(endpoint, members)]
    return len(sizes) > 1 and max(sizes) > 1 and all("host" in endpoint.locations[rank].windows for rank in members)


def open_mixed(
    endpoint: Endpoint, name: str, members: Sequence[int], backend: PointToPoint, timeout_s: float
) -> MixedExecutor | None:
    """Open the windows of the members on this host; the others are reached by messages.

    Returns None on all members if the arena of one of them has no room.
    """
    own = members.index(endpoint.rank)
    number, local = next((i, host) for i, host in enumerate(hosts_of(endpoint, members)) if own in host)
    ranks = [members[member] for member in local]
    sync = _open_flags(endpoint, f"{name}/host/{number}", ranks, timeout_s, watched=members)
    windows = open_executor(endpoint, "host", ranks, sync, timeout_s)
    arena_bytes = min(endpoint.locations[rank].arena_bytes for rank in members)
    chunk_bytes = min(_MAX_CHUNK_BYTES, max(ALIGNMENT, arena_bytes // _CHUNKS_IN_ARENA // ALIGNMENT * ALIGNMENT))
    slots = _allocate_slots(endpoint.arenas["host"], chunk_bytes + _SHARD_BYTES * len(members))
    if not _have_all(endpoint, f"mimatrix/mixed/{name}", members, has=bool(slots)):
        for slot in slots:
            slot.free()
        return None
    return MixedExecutor(
        backend,
        members,
        endpoint.control,
        timeout_s,
        windows=windows,
        places={member: place for place, member in enumerate(local)},
        slots=slots,
        chunk_bytes=chunk_bytes,
    )


def _allocate_slots(arena: Arena, size: int) -> list[Slot]:
    """Return two slots, or none if the arena has no room for two."""
    slots: list[Slot] = []
    try:
        slots += [arena.allocate(size)]
        slots += [arena.allocate(size)]
    except UserError:
        for slot in slots:
            slot.free()
        return []
    return slots


def _have_all(endpoint: Endpoint, key: str, members: Sequence[int], *, has: bool) -> bool:
    """Return whether all members have something; the same on all of them."""
    endpoint.store.set(f"{key}/{members.index(endpoint.rank)}", str(int(has)))
    return all(int(endpoint.store.get(f"{key}/{member}")) for member in range(len(members)))


def _open_flags(
    endpoint: Endpoint, name: str, members: Sequence[int], timeout_s: float, *, watched: Sequence[int] | None = None
) -> FlagSync:
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
    return FlagSync(own, pages, members, endpoint.control, timeout_s, group=name, watched=watched)
