"""Which transports a group of ranks has for which memory, and why not the others: decided from facts, for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimatrix.comm.memory.peer_access import PeerAccess

_NO_BACKENDS = "the group was created without c10d backends"


@dataclass(frozen=True, slots=True)
class TransportStatus:
    """Whether a transport can carry the tensors of a device, and why."""

    transport: str
    """`windows`, `mixed`, `nccl`, `gloo` or `send_recv`."""
    device: str
    """Where the memory is that it reads and writes: `cpu` or `cuda`."""
    is_available: bool
    reason: str

    def __str__(self) -> str:
        verdict = "available" if self.is_available else "not available"
        return f"{self.transport} ({self.device}): {verdict}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFacts:
    """What decides which transports a group has. All but `peer_access` are by member."""

    members: Sequence[int]
    """Their ranks in the job."""
    hosts: Sequence[str]
    has_gpu: Sequence[bool]
    peer_access: PeerAccess
    """By ranks of the job."""
    has_remote_windows: bool
    """Whether all members have windows that other hosts read, through NIXL."""
    has_gloo: bool
    nccl_reason: str
    """Why there is no NCCL; empty if there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFacts:
    """What decides whether NCCL can have a rank."""

    gpu: str
    """The rank's GPU and host, as NCCL tells them apart; empty if it has none."""
    platform: str
    """What torch is built for, as in `CUDA 13.0` or `ROCm 6.2`."""
    is_built: bool
    """Whether torch is built with NCCL."""


def describe_transports(facts: TransportFacts) -> tuple[TransportStatus, ...]:
    """Return each transport for each device that it serves, whether it is available, and why."""
    backends_reason = "" if facts.has_gloo else _NO_BACKENDS
    return (
        _describe_host_windows(facts),
        _status("windows", "cuda", _why_no_gpu_windows(facts), "all GPUs are on one host and read each other's memory"),
        _status(
            "mixed",
            "cpu",
            backends_reason or _why_not_mixed(facts),
            "the ranks of a host map each other's memory and send to other hosts over Gloo",
        ),
        _status("nccl", "cuda", backends_reason or facts.nccl_reason, "every rank has a GPU of its own"),
        _status("gloo", "cpu", backends_reason, "all ranks are connected"),
        _status(
            "send_recv",
            "cpu",
            backends_reason or _why_no_send_recv(facts),
            "the ranks are on several hosts and send over Gloo",
        ),
        _status(
            "send_recv",
            "cuda",
            backends_reason or facts.nccl_reason or _why_no_send_recv(facts),
            "the ranks are on several hosts and send over NCCL",
        ),
    )


def explain_nccl(ranks: Sequence[NcclFacts]) -> str:
    """Return why NCCL cannot connect these ranks of a group; empty if it can."""
    if not any(rank.gpu for rank in ranks):
        return "no rank has a GPU"
    first: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        if not rank.gpu:
            return f"rank {number} has no GPU"
        if not rank.is_built:
            return f"the torch of rank {number} is built without NCCL"
        if rank.platform.split()[0] != ranks[0].platform.split()[0]:
            return f"rank 0 has {ranks[0].platform} and rank {number} has {rank.platform}, which NCCL cannot connect"
        if rank.gpu in first:
            return f"rank {first[rank.gpu]} and rank {number} share one GPU, which NCCL refuses"
        first[rank.gpu] = number
    return ""


def _status(transport: str, device: str, why_not: str, why: str) -> TransportStatus:
    return TransportStatus(transport, device, not why_not, why_not or why)


def _why_no_send_recv(facts: TransportFacts) -> str:
    return "" if len(set(facts.hosts)) > 1 else "all ranks are on one host, where they map each other's memory"


def _why_not_mixed(facts: TransportFacts) -> str:
    if len(set(facts.hosts)) == 1:
        return _why_no_send_recv(facts)
    return "every rank has a host of its own" if len(set(facts.hosts)) == len(facts.hosts) else ""


def _describe_host_windows(facts: TransportFacts) -> TransportStatus:
    hosts = len(set(facts.hosts))
    if hosts == 1:
        return TransportStatus("windows", "cpu", True, "all ranks are on one host and map each other's memory")
    if facts.has_remote_windows:
        return TransportStatus("windows", "cpu", True, f"ranks on {hosts} hosts read each other's memory through NIXL")
    return TransportStatus("windows", "cpu", False, f"ranks are on {hosts} hosts, and not all of them have NIXL")


def _why_no_gpu_windows(facts: TransportFacts) -> str:
    if not any(facts.has_gpu):
        return "no rank has a GPU"
    if not all(facts.has_gpu):
        return f"rank {facts.members[list(facts.has_gpu).index(False)]} has no GPU"
    if (hosts := len(set(facts.hosts))) > 1:
        return f"ranks are on {hosts} hosts, and a GPU's memory is read from its own host only"
    if len(facts.members) == 1:
        return "the group has one rank"
    if refusal := facts.peer_access.refusal(facts.members):
        first, second, reason = refusal
        return f"rank {first} and rank {second} cannot read each other's memory: {reason}"
    return ""
