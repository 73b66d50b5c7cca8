"""Which ranks of a host can read the memory of each other's GPUs: asked of CUDA, then tried, and agreed on by all.

GPUs of one host need not reach each other: GeForce cards and unlike generations refuse. So every rank offers a small
probe window, every peer on its host reads it back, and all ranks read all results. A refusal is a reason in words,
never an error: other transports carry the tensors.
"""

import ctypes
import json
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

import torch

from mimatrix.comm.memory.base import Window, WindowKind
from mimatrix.comm.memory.cuda_ipc import cuda_error, cuda_runtime

if TYPE_CHECKING:
    from mimatrix.comm.control.job_store import Store

PROBE_BYTES = 64 << 10
_KEY = "mimatrix/peer_access"
_BUS_ID_BYTES = 32
"""The longest that CUDA writes, as in `0000:3b:00.0`, is 13 with its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDescription:
    """The GPU of a rank, as its peers need to know it."""

    uuid: str
    pci_bus_id: str
    platform: str
    """What torch is built for, as in `CUDA 13.0`."""
    refusal: str = ""
    """Why there are no windows in its memory; empty if there can be."""


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Whose windows in GPU memory each rank can open; the same value on all ranks."""

    reaches: tuple[tuple[int, ...], ...]
    """For each rank the ranks whose windows it has read."""
    reasons: Mapping[tuple[int, int], str]
    """Why the first rank of a pair cannot read the second one's memory, for GPU ranks of one host."""

    @classmethod
    def none(cls, world_size: int) -> "PeerAccess":
        """Return that no rank reaches another."""
        return cls(((),) * world_size, {})

    def is_mutual(self, members: Sequence[int]) -> bool:
        """Return whether every member reaches every other one."""
        return all(other in self.reaches[rank] for rank, other in permutations(members, 2))

    def has_partner(self, rank: int) -> bool:
        """Return whether a rank and at least one other reach each other, so that a window has a use."""
        return any(rank in self.reaches[other] for other in self.reaches[rank])

    def refusal(self, members: Sequence[int]) -> tuple[int, int, str] | None:
        """Return the first two members of one host of which one cannot read the other's memory, and the reason."""
        refused = [pair for pair in self.reasons if set(pair) <= set(members)]
        first = min(refused, key=lambda pair: (sorted(pair), pair), default=None)
        return (min(first), max(first), self.reasons[first]) if first else None


def describe_gpu() -> GpuDescription | None:
    """Return this process's current GPU, or None if it has none."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or f"unknown-{secrets.token_hex(8)}"
    gpu = GpuDescription(uuid=uuid, pci_bus_id="", platform=f"CUDA {torch.version.cuda}")
    if torch.version.hip:
        platform = f"ROCm {'.'.join(torch.version.hip.split('.')[:2])}"
        refusal = f"windows in GPU memory need CUDA, and this torch is built for {platform}"
        return replace(gpu, platform=platform, refusal=refusal)
    try:
        return replace(gpu, pci_bus_id=_pci_bus_id(device))
    except OSError as error:
        return replace(gpu, refusal=f"windows in GPU memory need the CUDA runtime library ({error})")


def can_access_peer(own: GpuDescription, peer: GpuDescription) -> str:
    """Ask CUDA whether one GPU can read another one's memory; return why it cannot, or nothing.

    One and the same GPU is not asked, nor one that this process does not see: then only a try shows it.
    """
    if own.uuid == peer.uuid:
        return ""
    here, there = _ordinal(own), _ordinal(peer)
    if here is None or there is None or here == there:
        return ""
    can = ctypes.c_int(0)
    code = cuda_runtime().cudaDeviceCanAccessPeer(ctypes.byref(can), ctypes.c_int(here), ctypes.c_int(there))
    if code:
        return f"cudaDeviceCanAccessPeer fails: {cuda_error(code)}"
    return "" if can.value else "cudaDeviceCanAccessPeer refuses"


def find_peer_access(
    store: "Store",
    rank: int,
    world_size: int,
    host: str,
    gpu: GpuDescription | None,
    windows: WindowKind | None,
) -> PeerAccess:
    """Find out which ranks can read each other's GPU memory. A collective; all ranks return the same.

    Args:
        store: The same on all ranks.
        rank: This rank.
        world_size: The number of ranks.
        host: Name that this rank shares with the ranks of its host.
        gpu: This rank's GPU, if it has one.
        windows: How windows in its memory are allocated and opened.
    """
    if gpu and not gpu.refusal and windows is None:
        gpu = replace(gpu, refusal="this process has no windows in GPU memory")
    store.set(f"{_KEY}/gpu/{rank}", json.dumps([host, asdict(gpu) if gpu else None]))
    on_host = defaultdict[str, list[tuple[int, GpuDescription]]](list)
    for peer in range(world_size):
        peer_host, fields = json.loads(store.get(f"{_KEY}/gpu/{peer}"))
        if fields:
            on_host[peer_host].append((peer, GpuDescription(**fields)))
    reasons: dict[tuple[int, int], str] = {}
    peers: dict[int, dict[int, GpuDescription]] = {peer: {} for peer in range(world_size)}
    for neighbours in on_host.values():
        for (reader, first), (owner, second) in permutations(neighbours, 2):
            if first.refusal or second.refusal:
                reasons[reader, owner] = first.refusal or second.refusal
            else:
                peers[reader][owner] = second
    if peers[rank]:
        assert gpu
        assert windows
        _probe(store, rank, gpu, peers[rank], windows)
    reaches: list[tuple[int, ...]] = []
    for reader, owners in peers.items():
        tried: dict[str, str] = json.loads(store.get(f"{_KEY}/tried/{reader}")) if owners else {}
        reaches.append(tuple(owner for owner in owners if not tried[str(owner)]))
        reasons |= {(reader, owner): tried[str(owner)] for owner in owners if tried[str(owner)]}
    return PeerAccess(tuple(reaches), reasons)


def describe_refusal(access: PeerAccess, hosts: Sequence[str]) -> str:
    """Return one sentence about all GPUs that cannot read each other's memory; empty if there are none."""
    if not (refusal := access.refusal(range(len(hosts)))):
        return ""
    first, second, reason = refusal
    names = sorted({hosts[reader] for reader, _ in access.reasons})
    where = f"host{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return (
        f"GPUs of {where} cannot read each other's memory (rank {first} and rank {second}: {reason}); "
        "NCCL or pinned host memory carries their tensors"
    )


def _probe(
    store: "Store", rank: int, gpu: GpuDescription, peers: Mapping[int, GpuDescription], windows: WindowKind
) -> None:
    """Offer a probe window, try those of all peers, publish the results, and wait until all have done so."""
    seed = secrets.randbits(32)
    window, offer = _offer_probe(windows, seed)
    try:
        store.set(f"{_KEY}/probe/{rank}", json.dumps(offer))
        tried = {}
        for peer, peer_gpu in peers.items():
            peer_offer = json.loads(store.get(f"{_KEY}/probe/{peer}"))
            tried[peer] = _try_peer(gpu, peer_gpu, window, peer_offer, windows)
        store.set(f"{_KEY}/tried/{rank}", json.dumps(tried))
        for peer in peers:  # which may still read this rank's probe
            store.get(f"{_KEY}/tried/{peer}")
    finally:
        if window:
            _free_probe(window)


def _offer_probe(windows: WindowKind, seed: int) -> tuple[Window | None, dict[str, str | int]]:
    """Return a window with a pattern, and what peers need to read it, or why there is none."""
    window = None
    try:
        window = windows.allocate(PROBE_BYTES)
        window.bytes.copy_(_pattern(seed))
        return window, {"handle": window.handle(), "seed": seed, "refusal": ""}
    except Exception as error:  # noqa: BLE001 (any error is a reason to use another transport)
        _clear_cuda_error()
        if window:
            _free_probe(window)
        return None, {"handle": "", "seed": seed, "refusal": f"no window can be offered ({_first_line(error)})"}


def _try_peer(
    gpu: GpuDescription, peer_gpu: GpuDescription, own: Window | None, offer: Mapping[str, str], windows: WindowKind
) -> str:
    """Ask CUDA, then read a peer's probe with this rank's GPU; return why that fails, or nothing."""
    try:
        if reason := can_access_peer(gpu, peer_gpu) or offer["refusal"]:
            return reason
        if own is None:
            return "this rank could not allocate memory to read it"
        peer = windows.open(offer["handle"])
        try:
            read = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=own.bytes.device)
            peer.read(0, PROBE_BYTES, read)
            is_same = torch.equal(read.cpu(), _pattern(int(offer["seed"])))
        finally:
            peer.close()
    except Exception as error:  # noqa: BLE001 (any error is a reason to use another transport)
        _clear_cuda_error()
        return f"reading fails ({_first_line(error)})"
    return "" if is_same else "reading gives other bytes than were written"


def _free_probe(window: Window) -> None:
    try:
        window.close()
    except Exception:  # noqa: BLE001 (it is only memory; other transports still work)
        _clear_cuda_error()


def _pattern(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (PROBE_BYTES,), dtype=torch.uint8, generator=generator)


def _pci_bus_id(device: int) -> str:
    """Return where a GPU is on this host, or nothing if CUDA does not say."""
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    if cuda_runtime().cudaDeviceGetPCIBusId(text, ctypes.c_int(_BUS_ID_BYTES), ctypes.c_int(device)):
        _clear_cuda_error()
        return ""
    return text.value.decode()


def _ordinal(gpu: GpuDescription) -> int | None:
    """Return the number of a GPU in this process, or None if it is not visible here."""
    number = ctypes.c_int(-1)
    bus_id = ctypes.c_char_p(gpu.pci_bus_id.encode())
    if not gpu.pci_bus_id or cuda_runtime().cudaDeviceGetByPCIBusId(ctypes.byref(number), bus_id):
        _clear_cuda_error()
        return None
    return number.value


def _clear_cuda_error() -> None:
    """Forget the last error, which CUDA would otherwise report at the next kernel."""
    with suppress(OSError):
        cuda_runtime().cudaGetLastError()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
