"""A rank's end of the job: its arenas, its connection to the coordinator, where the other ranks are, its thread."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.memory.arena import Arena
from mimatrix.comm.memory.base import PeerWindow, WindowKind
from mimatrix.comm.work import CollectiveThread
from mimatrix.core import environment
from mimatrix.core.addresses import local_address
from mimatrix.core.units import parse_bytes

_PINNED_ARENA_BYTES = 512 << 20
"""GPU memory, and memory registered with a NIC, is allocated at once."""


class Store(Protocol):
    """A key-value store that all ranks reach, such as those of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Wait until a value is written, and return it."""
        ...


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is, and the handle of its arena for each kind of window."""

    host: str
    windows: dict[str, str]


class Endpoint:
    """One rank of a job. Groups of ranks are views on it.

    `window_kinds` are the kinds of windows that this rank has: `host` is memory that ranks of the same host map,
    `cuda` is memory of its GPU, `remote` is memory that ranks of other hosts read.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        window_kinds: Mapping[str, WindowKind],
        *,
        arenas: Mapping[str, Arena],
        locations: Sequence[RankLocation],
        control: ControlClient,
        coordinator: Coordinator | None,
        thread: CollectiveThread,
    ) -> None:
        self.rank, self.world_size, self.store = rank, len(locations), store
        self.window_kinds, self.arenas, self.locations = window_kinds, arenas, locations
        self.control, self.coordinator, self.thread = control, coordinator, thread
        self._windows: dict[tuple[str, int], PeerWindow] = {}

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        window_kinds: Mapping[str, WindowKind],
        *,
        host: str = "",
        generation: int = 0,
        arena_bytes: int = 0,
    ) -> "Endpoint":
        """Join a job through its store: allocate arenas, wait for the other ranks, connect to the coordinator.

        Args:
            store: The same on all ranks, and empty.
            rank: This rank; rank 0 starts the coordinator.
            world_size: The number of ranks.
            window_kinds: How windows are allocated and opened, by kind.
            host: Name that this rank shares with those that can map its memory; `own_host()` if omitted.
            generation: How many times the job was restarted.
            arena_bytes: Size of each arena; `default_arena_bytes` if 0.
        """
        arenas = {
            kind: Arena(windows, arena_bytes or default_arena_bytes(kind)) for kind, windows in window_kinds.items()
        }
        coordinator: Coordinator | None = None
        if rank == 0:
            address = own_address()
            coordinator = Coordinator.start(address, generation)
            store.set("mimatrix/coordinator", f"{address} {coordinator.port} {coordinator.token}")
        own = RankLocation(host or own_host(), {kind: arena.handle for kind, arena in arenas.items()})
        store.set(f"mimatrix/rank/{rank}", json.dumps(asdict(own)))
        locations = [RankLocation(**json.loads(store.get(f"mimatrix/rank/{peer}"))) for peer in range(world_size)]
        address, port, token = store.get("mimatrix/coordinator").decode().split()
        hosts = [location.host for location in locations]
        return cls(
            rank,
            store,
            window_kinds,
            arenas=arenas,
            locations=locations,
            control=ControlClient.connect(rank, hosts, address, int(port), generation, token),
            coordinator=coordinator,
            thread=CollectiveThread().start(),
        )

    def window(self, kind: str, rank: int) -> PeerWindow:
        """Return another rank's arena, which is opened at the first call."""
        if (kind, rank) not in self._windows:
            self._windows[kind, rank] = self.window_kinds[kind].open(self.locations[rank].windows[kind])
        return self._windows[kind, rank]

    def close(self) -> None:
        """Leave the job: ranks that still wait for this one are told that it left."""
        self.thread.close()
        self.control.close()
        if self.coordinator:
            self.coordinator.close()
        for window in self._windows.values():
            window.close()
        for arena in self.arenas.values():
            arena.close()


def default_arena_bytes(kind: str) -> int:
    """Return MIMATRIX_ARENA; if unset, all memory for mapped windows, whose pages exist only once touched."""
    size = environment.ARENA.get()
    if size:
        return parse_bytes(size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if kind == "host" else _PINNED_ARENA_BYTES


def own_host() -> str:
    """Return a name that only ranks share that can map each other's memory: MIMATRIX_HOST, or machine and namespace."""
    name = environment.HOST.get()
    if name:
        return name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/net').stat().st_ino}"


def own_address() -> str:
    """Return an address at which others reach this rank: MIMATRIX_ADDRESS, or that of the route to MASTER_ADDR."""
    address = environment.ADDRESS.get()
    if address:
        return address
    try:
        return local_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), family=socket.AF_INET)
    except OSError:
        return "127.0.0.1"
