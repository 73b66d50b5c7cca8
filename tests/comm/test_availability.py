"""Which transports there are, and why: pure, from facts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mimatrix.comm.availability import NcclFacts, TransportFacts, TransportStatus, describe_transports, explain_nccl
from mimatrix.comm.endpoint import own_nccl_host
from mimatrix.comm.memory.peer_access import PeerAccess

BOTH = PeerAccess(((1,), (0,)), {})
LAB = TransportFacts(
    members=(0, 1),
    hosts=("a", "a"),
    has_gpu=(True, True),
    peer_access=BOTH,
    has_remote_windows=False,
    has_gloo=True,
    nccl_reason="",
)


def status(facts: TransportFacts, transport: str, device: str) -> TransportStatus:
    (found,) = [row for row in describe_transports(facts) if (row.transport, row.device) == (transport, device)]
    return found


def test_every_transport_has_one_row_with_a_reason() -> None:
    rows = describe_transports(LAB)
    assert [(row.transport, row.device, row.is_available) for row in rows] == [
        ("windows", "cpu", True),
        ("windows", "cuda", True),
        ("mixed", "cpu", False),
        ("nccl", "cuda", True),
        ("gloo", "cpu", True),
        ("send_recv", "cpu", False),
        ("send_recv", "cuda", False),
    ]
    assert all(row.reason for row in rows)
    assert str(rows[5]) == (
        "send_recv (cpu): not available: all ranks are on one host, where they map each other's memory"
    )


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("aa", "all ranks are on one host, where they map each other's memory"),
        ("ab", "every rank has a host of its own"),
        ("aba", "the ranks of a host map each other's memory and send to other hosts over Gloo"),
    ],
)
def test_mixed_needs_several_hosts_and_one_with_several_ranks(hosts: str, reason: str) -> None:
    facts = replace(LAB, members=tuple(range(len(hosts))), hosts=tuple(hosts), has_gpu=(False,) * len(hosts))
    found = status(facts, "mixed", "cpu")
    assert (found.is_available, found.reason) == (hosts == "aba", reason)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(LAB, has_gpu=(False, False)), "no rank has a GPU"),
        (replace(LAB, members=(3, 5), has_gpu=(True, False)), "rank 5 has no GPU"),
        (
            replace(LAB, hosts=("a", "b")),
            "ranks are on 2 hosts, and a GPU's memory is read from its own host only",
        ),
        (
            replace(LAB, peer_access=PeerAccess(((1,), ()), {(1, 0): "cudaDeviceCanAccessPeer refuses"})),
            "rank 0 and rank 1 cannot read each other's memory: cudaDeviceCanAccessPeer refuses",
        ),
        (replace(LAB, members=(0,), hosts=("a",), has_gpu=(True,)), "the group has one rank"),
    ],
)
def test_why_there_are_no_windows_in_gpu_memory(facts: TransportFacts, reason: str) -> None:
    assert status(facts, "windows", "cuda") == TransportStatus("windows", "cuda", False, reason)


def test_a_refusal_between_other_ranks_does_not_matter() -> None:
    access = PeerAccess(((1,), (0,), ()), {(0, 2): "no", (2, 0): "no"})
    assert status(replace(LAB, peer_access=access), "windows", "cuda").is_available
    assert not status(replace(LAB, members=(0, 2), peer_access=access), "windows", "cuda").is_available


def test_between_hosts_windows_need_nixl_and_messages_are_there() -> None:
    apart = replace(LAB, hosts=("a", "b"))
    assert status(apart, "windows", "cpu") == TransportStatus(
        "windows", "cpu", False, "ranks are on 2 hosts, and not all of them have NIXL"
    )
    assert status(replace(apart, has_remote_windows=True), "windows", "cpu").is_available
    assert status(apart, "send_recv", "cpu").is_available


def test_without_backends_only_windows_are_left() -> None:
    rows = describe_transports(replace(LAB, has_gloo=False))
    assert [row.transport for row in rows if row.is_available] == ["windows", "windows"]


def nccl(gpu: str, platform: str = "CUDA 13.0", is_built: bool = True) -> NcclFacts:
    return NcclFacts(gpu=gpu, platform=platform if gpu else "", is_built=is_built)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([nccl("a 1"), nccl("a 2"), nccl("b 1")], ""),
        ([nccl("a 1"), nccl("a 2", "CUDA 12.8")], ""),
        ([nccl(""), nccl("")], "no rank has a GPU"),
        ([nccl(""), nccl("a 1")], "rank 0 has no GPU"),
        ([nccl("a 1"), nccl("", is_built=False)], "rank 1 has no GPU"),
        ([nccl("a 1"), nccl("a 2", is_built=False)], "the torch of rank 1 is built without NCCL"),
        ([nccl("a 1"), nccl("a 2"), nccl("a 1")], "rank 0 and rank 2 share one GPU, which NCCL refuses"),
        (
            [nccl("a 1"), nccl("b 1", "ROCm 6.2")],
            "rank 0 has CUDA 13.0 and rank 1 has ROCm 6.2, which NCCL cannot connect",
        ),
    ],
)
def test_why_there_is_no_nccl(ranks: Sequence[NcclFacts], reason: str) -> None:
    assert explain_nccl(ranks) == reason


def test_nccl_tells_hosts_apart_by_its_own_variable_and_not_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    machine = own_nccl_host()
    monkeypatch.setenv("MIMATRIX_HOST", "lab1")
    assert own_nccl_host() == machine
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in machine
    monkeypatch.setenv("NCCL_HOSTID", "rank7")
    assert own_nccl_host() == "rank7"
