"""A rank's end of the job: its arenas, its connection to the coordinator, where the other ranks are, its thread."""

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mimatrix.comm.addresses import HostAddress, own_address
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator_process import CoordinatorProcess
from mimatrix.comm.control.job_store import JobStore, Store
from mimatrix.comm.coordinator_start import connect_to_coordinator
from mimatrix.comm.memory.arena import Arena
from mimatrix.comm.memory.base import PeerWindow, WindowKind
from mimatrix.comm.memory.peer_access import GpuDescription, PeerAccess, describe_refusal, find_peer_access
from mimatrix.comm.nccl_watchdog import NcclWatchdog
from mimatrix.comm.work import CollectiveThread
from mimatrix.core import environment
from mimatrix.core.addresses import interface_of, interface_speed
from mimatrix.core.units import parse_bytes

_logger = logging.getLogger(__name__)
_PINNED_ARENA_BYTES = 512 << 20
"""GPU memory, and memory registered with a NIC, is allocated at once."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is, and the handle of its arena for each kind of window."""

    host: str
    address: str
    """As far as the rank knows alone; `choose_address` returns the one for its peers."""
    windows: dict[str, str]
    machine: str = ""
    """Name of the machine, the same after a restart; several hosts may share it."""
    has_gpu: bool = False
    arena_bytes: int = 0
    """Size of its host arena; 0 without one."""
    facts: tuple[str, ...] = ()
    """Its device and its network interface: what was measured among others does not hold here."""


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
        peer_access: PeerAccess,
        control: ControlClient,
        coordinator: CoordinatorProcess | None,
        thread: CollectiveThread,
    ) -> None:
        self.rank, self.world_size, self.store = rank, len(locations), store
        self.window_kinds, self.arenas, self.locations = window_kinds, arenas, locations
        self.peer_access = peer_access
        """Which ranks can read each other's GPU memory. A rank has a `cuda` arena only if it can with another one."""
        self.control, self.coordinator, self.thread = control, coordinator, thread
        self.watchdog = NcclWatchdog(control)
        self.threads = [thread]
        """All that run collectives: that of the endpoint, and those of groups with one of their own."""
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
        gpu: GpuDescription | None = None,
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
            gpu: This rank's GPU, if it has one; without it there is no `cuda` arena.
            generation: How many times the job was restarted.
            arena_bytes: Size of each arena; `default_arena_bytes` if 0.
        """
        host, address = host or own_host(), own_address()
        coordinator, control = connect_to_coordinator(store, rank, world_size, HostAddress(host, address), generation)
        shared = JobStore(control)
        access = find_peer_access(shared, rank, world_size, host, gpu, window_kinds.get("cuda"))
        arenas = {
            kind: Arena(windows, arena_bytes or default_arena_bytes(kind))
            for kind, windows in window_kinds.items()
            if kind != "cuda" or access.has_partner(rank)
        }
        own = RankLocation(
            host=host,
            address=address,
            windows={kind: arena.handle for kind, arena in arenas.items()},
            machine=environment.HOST.get() or socket.gethostname(),
            has_gpu=gpu is not None,
            arena_bytes=arenas["host"].size if "host" in arenas else 0,
            facts=_describe_device(address, has_gpu=gpu is not None),
        )
        shared.set(f"rank/{rank}", json.dumps(asdict(own)))
        locations = [RankLocation(**json.loads(shared.get(f"rank/{peer}"))) for peer in range(world_size)]
        if rank == 0 and (refusal := describe_refusal(access, control.hosts)):
            _logger.warning("%s", refusal)
        return cls(
            rank,
            store,
            window_kinds,
            arenas=arenas,
            locations=locations,
            peer_access=access,
            control=control,
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
        self.watchdog.close()
        self.control.close()
        for window in self._windows.values():
            window.close()
        for arena in self.arenas.values():
            arena.close()


def _describe_device(address: str, *, has_gpu: bool) -> tuple[str, str]:
    """Return the kind of device of this rank, and the speed of its network interface."""
    interface = interface_of(address)
    speed = interface_speed(interface) if interface else None
    name = torch.cuda.get_device_name() if has_gpu and torch.cuda.is_available() else "cpu"
    return name, f"{speed} Mbit/s" if speed else ""


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


def own_nccl_host() -> str:
    """Return what NCCL takes for this host: NCCL_HOSTID, or machine and boot. It knows nothing of MIMATRIX_HOST."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()}-{boot}"
