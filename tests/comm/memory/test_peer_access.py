"""Who can read whose GPU memory: asked, tried, agreed on by all ranks; and arenas only where they are used."""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.ranks import ARENA_BYTES, together
from torch._C._distributed_c10d import HashStore

from mimatrix.comm import Endpoint, Group
from mimatrix.comm.memory import peer_access
from mimatrix.comm.memory.base import MappedView, WindowKind
from mimatrix.comm.memory.in_process import InProcessWindow, InProcessWindows
from mimatrix.comm.memory.peer_access import (
    PROBE_BYTES,
    GpuDescription,
    PeerAccess,
    can_access_peer,
    describe_gpu,
    describe_refusal,
    find_peer_access,
)
from mimatrix.core.errors import WorldError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ASKED = "cudaDeviceCanAccessPeer refuses"


def gpu(number: int, refusal: str = "") -> GpuDescription:
    """Return a GPU that no process sees by its PCI bus id, so that CUDA is not asked."""
    return GpuDescription(uuid=f"GPU-{number}", pci_bus_id="", platform="CUDA 13.0", refusal=refusal)


class FakeGpuWindows:
    """Windows of one rank on a fake GPU, in this process. `fails` makes opening fail, `garbles` what is read."""

    def __init__(
        self, shared: InProcessWindows | None = None, *, fails: Exception | None = None, garbles: bool = False
    ) -> None:
        self.shared = shared or InProcessWindows()
        self._fails, self._garbles = fails, garbles
        self.allocated: list[int] = []
        self.windows: list[InProcessWindow] = []

    def allocate(self, size: int) -> InProcessWindow:
        self.allocated.append(size)
        self.windows.append(self.shared.allocate(size))
        return self.windows[-1]

    def open(self, handle: str) -> MappedView:
        if self._fails:
            raise self._fails
        view = self.shared.open(handle)
        return MappedView(torch.zeros(PROBE_BYTES, dtype=torch.uint8)) if self._garbles else view


class FullGpuWindows(FakeGpuWindows):
    """Windows on a fake GPU that has no memory left."""

    def allocate(self, size: int) -> InProcessWindow:
        raise WorldError("allocating 65536 bytes on the GPU failed: out of memory; check nvidia-smi")


def find(
    hosts: Sequence[str],
    gpus: Sequence[GpuDescription | None],
    kinds: Mapping[int, FakeGpuWindows] | None = None,
) -> PeerAccess:
    """Return what all ranks agree on; `kinds` replaces the windows of some of them."""
    store, shared = HashStore(), InProcessWindows()
    windows = [(kinds or {}).get(rank) or FakeGpuWindows(shared) for rank in range(len(hosts))]
    for kind in windows:
        kind.shared = shared

    def on_rank(rank: int) -> PeerAccess:
        return find_peer_access(store, rank, len(hosts), hosts[rank], gpus[rank], windows[rank])

    first, *others = together(len(hosts), on_rank)
    assert all(other == first for other in others)
    assert all(size <= 2 << 20 for kind in windows for size in kind.allocated)
    assert not any(window.bytes.numel() for kind in windows for window in kind.windows), "a probe was not freed"
    return first


def refuse(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Let these GPUs be refused to others when they are asked for."""
    monkeypatch.setattr(peer_access, "can_access_peer", lambda _own, peer: ASKED if peer.uuid in uuids else "")


def test_gpus_that_read_each_other_reach_each_other() -> None:
    assert find(["a"] * 3, [gpu(0), gpu(0), gpu(1)]) == PeerAccess(((1, 2), (0, 2), (0, 1)), {})


def test_ranks_of_other_hosts_and_without_a_gpu_are_not_reached_and_need_no_reason() -> None:
    access = find(["a", "b", "a", "a"], [gpu(0), gpu(1), None, gpu(2)])
    assert access == PeerAccess(((3,), (), (), (0,)), {})
    assert access.has_partner(0)
    assert not access.has_partner(1)
    assert not access.has_partner(2)


def test_no_rank_allocates_a_probe_if_it_has_no_peer() -> None:
    kinds = {rank: FakeGpuWindows() for rank in range(3)}
    find(["a", "b", "b"], [gpu(0), gpu(1), None], kinds)
    assert [kind.allocated for kind in kinds.values()] == [[], [], []]


def test_refused_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "GPU-2")
    access = find(["a"] * 3, [gpu(0), gpu(1), gpu(2)])
    assert access.reaches == ((1,), (0,), (0, 1))
    assert access.reasons == {(0, 2): ASKED, (1, 2): ASKED}
    assert access.is_mutual([0, 1])
    assert not access.is_mutual([0, 1, 2])
    assert not access.has_partner(2), "one way only is of no use"


@pytest.mark.parametrize(
    "error", [WorldError("peer access is not supported"), RuntimeError("CUDA error\nmore"), ValueError()]
)
def test_refused_by_trying(error: Exception) -> None:
    access = find(["a"] * 2, [gpu(0), gpu(0)], {1: FakeGpuWindows(fails=error)})
    assert access.reaches == ((1,), ())
    first_line = (str(error) or "ValueError").splitlines()[0]
    assert access.reasons == {(1, 0): f"reading fails ({first_line})"}


def test_other_bytes_than_were_written_are_a_refusal() -> None:
    access = find(["a"] * 2, [gpu(0), gpu(1)], {0: FakeGpuWindows(garbles=True)})
    assert access == PeerAccess(((), (0,)), {(0, 1): "reading gives other bytes than were written"})


def test_a_gpu_without_memory_for_a_probe_is_refused_both_ways() -> None:
    access = find(["a"] * 3, [gpu(0), gpu(1), gpu(2)], {1: FullGpuWindows()})
    assert access.reaches == ((2,), (), (0,))
    assert "out of memory" in access.reasons[0, 1]
    assert (1, 0) in access.reasons


def test_a_gpu_that_has_no_windows_is_not_tried() -> None:
    reason = "windows in GPU memory need CUDA, and this torch is built for ROCm 6.2"
    access = find(["a"] * 3, [gpu(0), gpu(1, reason), gpu(2)])
    assert access.reaches == ((2,), (), (0,))
    assert set(access.reasons.values()) == {reason}


def test_rocm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())
    monkeypatch.setattr(torch.version, "hip", "6.2.41133-dd7f95766")
    found = describe_gpu()
    assert found
    assert found.platform == "ROCm 6.2"
    assert found.refusal == "windows in GPU memory need CUDA, and this torch is built for ROCm 6.2"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA runtime")
def test_a_torch_without_the_runtime_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())
    found = describe_gpu()
    assert found
    assert found.refusal.startswith("windows in GPU memory need the CUDA runtime library (")


class FakeRuntime:
    """The calls of the CUDA runtime that are made, on two visible GPUs of which only the first reads the second."""

    VISIBLE = (b"0000:3b:00.0", b"0000:5e:00.0")

    def cudaDeviceGetByPCIBusId(self, number: Any, bus_id: ctypes.c_char_p) -> int:  # noqa: N802 (CUDA's name)
        if bus_id.value not in self.VISIBLE:
            return 1
        number._obj.value = self.VISIBLE.index(bus_id.value)
        return 0

    def cudaDeviceCanAccessPeer(self, can: Any, here: ctypes.c_int, there: ctypes.c_int) -> int:  # noqa: N802
        can._obj.value = int((here.value, there.value) == (0, 1))
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0


def test_cuda_is_asked_about_gpus_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access, "cuda_runtime", FakeRuntime)
    first, second, hidden = (
        GpuDescription(uuid=uuid, pci_bus_id=bus_id, platform="CUDA 13.0")
        for uuid, bus_id in (("A", "0000:3b:00.0"), ("B", "0000:5e:00.0"), ("C", "0000:af:00.0"))
    )
    assert can_access_peer(first, second) == ""
    assert can_access_peer(second, first) == ASKED
    assert can_access_peer(second, hidden) == "", "a GPU that is not visible can only be tried"
    assert can_access_peer(second, second) == ""


def test_the_refusal_is_one_sentence_for_the_whole_job() -> None:
    hosts = ["lab2", "lab1", "lab1", "lab2"]
    access = PeerAccess(((), (), (), ()), {(2, 1): ASKED, (1, 2): ASKED, (3, 0): "reading fails (x)"})
    assert describe_refusal(access, hosts) == (
        "GPUs of hosts lab1, lab2 cannot read each other's memory (rank 0 and rank 3: reading fails (x)); "
        "NCCL or pinned host memory carries their tensors"
    )
    assert describe_refusal(PeerAccess.none(4), hosts) == ""


def in_endpoints(
    hosts: Sequence[str],
    gpus: Sequence[GpuDescription | None],
    on_rank: Callable[[Endpoint], Any],
) -> list[Any]:
    """Run `on_rank` on threads that are ranks with host windows, and windows on fake GPUs where there is one."""
    store, on_host, on_gpu = HashStore(), InProcessWindows(), InProcessWindows()

    def join(rank: int) -> Any:
        kinds: dict[str, WindowKind] = {"host": on_host}
        if gpus[rank]:
            kinds["cuda"] = FakeGpuWindows(on_gpu)
        endpoint = Endpoint.join(
            store, rank, len(hosts), kinds, host=hosts[rank], gpu=gpus[rank], arena_bytes=ARENA_BYTES
        )
        try:
            return on_rank(endpoint)
        finally:
            endpoint.close()

    return together(len(hosts), join)


def test_arenas_in_gpu_memory_exist_only_where_they_are_used() -> None:
    arenas = in_endpoints(["a", "a", "b", "b"], [gpu(0), gpu(1), gpu(2), None], lambda end: sorted(end.arenas))
    assert arenas == [["cuda", "host"], ["cuda", "host"], ["host"], ["host"]]


def test_refused_gpus_have_no_arena_and_rank_0_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_access, "can_access_peer", lambda _own, _peer: ASKED)
    with caplog.at_level(logging.WARNING, "mimatrix"):
        arenas = in_endpoints(["lab1"] * 3, [gpu(0), gpu(1), gpu(2)], lambda end: sorted(end.arenas))
    assert arenas == [["host"]] * 3
    (record,) = [record for record in caplog.records if "memory" in record.message]
    assert record.message == (
        f"GPUs of host lab1 cannot read each other's memory (rank 0 and rank 1: {ASKED}); "
        "NCCL or pinned host memory carries their tensors"
    )


def test_groups_have_windows_in_gpu_memory_only_if_all_members_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 reach each other; rank 2, on the same host or another, reaches neither."""
    refuse(monkeypatch, "GPU-2")

    def kinds_and_status(endpoint: Endpoint) -> Any:
        whole = Group.create(endpoint, "all", range(3), timeout_s=10)
        assert {status.is_available for status in whole.transport_status() if status.device == "cuda"} == {False}
        found = [whole.window_kinds]
        if endpoint.rank < 2:
            pair = Group.create(endpoint, "pair", [0, 1], timeout_s=10)
            assert [s.is_available for s in pair.transport_status() if s.transport == "windows"] == [True, True]
            found.append(pair.window_kinds)
        whole.barrier()
        return found

    gpus = [gpu(0), gpu(1), gpu(2)]
    one_host = in_endpoints(["a", "a", "a"], gpus, kinds_and_status)
    assert one_host == [[("host",), ("host", "cuda")]] * 2 + [[("host",)]]
    two_hosts = in_endpoints(["a", "a", "b"], gpus, kinds_and_status)
    assert two_hosts == [[(), ("host", "cuda")]] * 2 + [[()]]


def test_refused_gpus_reduce_over_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access, "can_access_peer", lambda _own, _peer: ASKED)

    def reduce(endpoint: Endpoint) -> float:
        tensor = torch.full((100,), float(endpoint.rank + 1))
        Group.create(endpoint, "all", range(2), timeout_s=10).all_reduce(tensor)
        return float(tensor.mean())

    assert in_endpoints(["a", "a"], [gpu(0), gpu(1)], reduce) == [3.0, 3.0]
