"""A rank's end of the job: its arena, its line to the coordinator, where the other ranks are, the thread that works."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.memory import PeerWindow, WindowKind
from mimatrix.comm.memory.arena import Arena
from mimatrix.comm.work import CollectiveThread
from mimatrix.core.units import parse_bytes

_PINNED_BYTES = 512 << 20
"""Memory of a GPU, or memory registered with a NIC, exists at once."""


class Store(Protocol):
    """A key-value store that all ranks reach, as those of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read; waits until it is written."""
        ...


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is and how its memory is reached: the handle of its arena by the kind of windows."""

    host: str
    windows: dict[str, str]


class Endpoint:
    """Joins a job through its store. Groups of ranks are views on it.

    `kinds` are the windows that this rank has: `host` is memory that ranks of the host map, `cuda` that of its GPU,
    `far` what ranks of other hosts read.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        kinds: Mapping[str, WindowKind],
        *,
        host: str = "",
        generation: int = 0,
        arena_bytes: int = 0,
    ) -> None:
        self.store, self.rank, self.world_size, self.kinds = store, rank, world_size, kinds
        self.arenas = {name: Arena(kind, arena_bytes or usual_arena_bytes(name)) for name, kind in kinds.items()}
        self.coordinator: Coordinator | None = None
        if rank == 0:
            address = own_address()
            self.coordinator = Coordinator(address, generation)
            store.set("mimatrix/coordinator", f"{address} {self.coordinator.port} {self.coordinator.token}")
        place = RankLocation(host or own_host(), {name: arena.handle for name, arena in self.arenas.items()})
        store.set(f"mimatrix/rank/{rank}", json.dumps(asdict(place)))
        self.places = [RankLocation(**json.loads(store.get(f"mimatrix/rank/{other}"))) for other in range(world_size)]
        address, port, token = store.get("mimatrix/coordinator").decode().split()
        self.control = ControlClient(rank, [place.host for place in self.places], address, int(port), generation, token)
        self.thread = CollectiveThread()
        self._windows: dict[tuple[str, int], PeerWindow] = {}

    def window(self, kind: str, rank: int) -> PeerWindow:
        """Another rank's arena, opened once."""
        if (kind, rank) not in self._windows:
            self._windows[kind, rank] = self.kinds[kind].open(self.places[rank].windows[kind])
        return self._windows[kind, rank]

    def close(self) -> None:
        """Leave in good order: others that still wait for this rank are told that it left."""
        self.thread.close()
        self.control.close()
        if self.coordinator:
            self.coordinator.close()
        for window in self._windows.values():
            window.close()
        for arena in self.arenas.values():
            arena.close()


def usual_arena_bytes(kind: str) -> int:
    """MIMATRIX_ARENA; or for mapped memory all there is, since its pages exist only once touched."""
    given = os.environ.get("MIMATRIX_ARENA")
    if given:
        return parse_bytes(given)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if kind == "host" else _PINNED_BYTES


def own_host() -> str:
    """A name that only ranks which can map one another's memory share: MIMATRIX_HOST, or machine and namespace."""
    given = os.environ.get("MIMATRIX_HOST")
    if given:
        return given
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"{socket.gethostname()}-{boot}-{Path('/proc/self/ns/net').stat().st_ino}"


def own_address() -> str:
    """An address at which others reach this rank: MIMATRIX_ADDRESS, or the one that leads to MASTER_ADDR."""
    given = os.environ.get("MIMATRIX_ADDRESS")
    if given:
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
