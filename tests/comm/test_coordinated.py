"""Between hosts: a rank sends and receives as many control messages for a GDRAA among 64 ranks as between two."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.ranks import ARENA_BYTES, in_groups, together
from torch._C._distributed_c10d import HashStore

from mimatrix.comm import AlgorithmChoice, Endpoint, Group
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import ControlMessage, Decoder, MessageType
from mimatrix.comm.control.wait_graph import Culprit, Query, WaitGraphSearch
from mimatrix.comm.memory.base import MappedView
from mimatrix.comm.memory.in_process import InProcessWindow, InProcessWindows
from mimatrix.core.errors import MismatchError, PeerLost, WorldError

GDRAA = AlgorithmChoice("windows", "gdraa")


class Arrived:
    """A read that was done at once."""

    def wait(self, deadline: float | None = None) -> None:
        """Nothing to wait for."""


class FakeFarPeer(MappedView):
    """A window that has to be fetched, in this process: stands in for NIXL, which needs a process for each rank."""

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> Arrived:
        self.read(start, stop, into)
        return Arrived()


class FakeFarWindows:
    """Windows of hosts far apart, as threads."""

    def __init__(self) -> None:
        self._inner = InProcessWindows()

    def allocate(self, size: int) -> InProcessWindow:
        return self._inner.allocate(size)

    def open(self, handle: str) -> FakeFarPeer:
        return FakeFarPeer(self._inner._windows[handle])


def messages_per_gdraa(ranks: int) -> set[tuple[int, int]]:
    """(sent, received) of every rank for one GDRAA, the wait for its readers included."""
    shared, everyone = FakeFarWindows(), threading.Barrier(ranks)

    def each(group: Group) -> tuple[int, int]:
        control, tensor = group.endpoint.control, group.empty(128, kind="remote")
        group.barrier()
        before = control.sent, control.received
        tensor.fill_(float(group.rank))
        group.all_reduce(tensor, choice=GDRAA)
        assert (tensor == sum(range(ranks))).all()
        placed = group.endpoint.arenas["remote"].slot_of(tensor)
        assert placed
        placed[0].wait_readers()
        counted = control.sent - before[0], control.received - before[1]
        everyone.wait(30)  # one that leaves earlier is reported to the others
        return counted

    hosts = [f"host{rank}" for rank in range(ranks)]
    return set(in_groups(ranks, each, hosts=hosts, kinds=lambda: {"remote": shared}))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_the_same_number_of_control_messages_for_any_number_of_ranks(ranks: int) -> None:
    assert messages_per_gdraa(ranks) == {(3, 3)}


def test_the_coordinators_load_grows_and_is_counted_apart() -> None:
    shared, loads = FakeFarWindows(), {}
    for ranks in (2, 8):

        def each(group: Group, ranks: int = ranks) -> None:
            group.barrier()
            group.all_reduce(group.empty(64, kind="remote").zero_(), choice=GDRAA)
            group.barrier()
            if group.endpoint.coordinator:
                loads[ranks] = group.endpoint.coordinator.received

        in_groups(ranks, each, hosts=[str(rank) for rank in range(ranks)], kinds=lambda: {"remote": shared})
    assert loads[8] > 3 * loads[2]


def test_a_mismatch_between_hosts_is_named_on_every_rank() -> None:
    shared = FakeFarWindows()

    def each(group: Group) -> str:
        tensor = group.empty(64 + group.rank // 2, kind="remote")
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(tensor, choice=GDRAA)
        return str(caught.value)

    for text in in_groups(3, each, hosts=["a", "b", "c"], kinds=lambda: {"remote": shared}, timeout_s=10):
        assert "64 float32" in text
        assert "65 float32" in text


def test_a_rank_that_never_comes_is_named_between_hosts() -> None:
    shared = FakeFarWindows()

    def each(group: Group) -> int:
        if group.rank == 1:
            time.sleep(3)
            return 1
        with pytest.raises(
            PeerLost, match=r"rank 1 on b was lost in all_reduce of 8 .* round 0, since .* did not come"
        ) as lost:
            group.all_reduce(group.empty(8, kind="remote"), choice=GDRAA)
        return lost.value.rank

    assert in_groups(3, each, hosts=["a", "b", "c"], kinds=lambda: {"remote": shared}, timeout_s=0.5) == [1, 1, 1]


def test_a_rank_that_never_comes_is_named_on_one_host_through_others() -> None:
    """In a ring rank 0 waits for rank 3, that for 2, that for 1, which does something else: all must name 1."""

    def each(group: Group) -> int:
        if group.rank == 1:
            time.sleep(3)
            return 1
        with pytest.raises(PeerLost, match="rank 1 on here was lost") as lost:
            group.all_reduce(torch.ones(8), choice=AlgorithmChoice("windows", "ring"))
        return lost.value.rank

    assert in_groups(4, each, timeout_s=0.5) == [1, 1, 1, 1]


def test_a_rank_that_left_is_missed_only_by_who_waits_for_it() -> None:
    store, shared = HashStore(), InProcessWindows()
    left = threading.Event()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 3, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        whole, pair = Group.create(endpoint, "all", range(3), timeout_s=10), None
        if rank != 2:
            pair = Group.create(endpoint, "pair", [0, 1], timeout_s=10)
        whole.barrier()
        if pair is None:
            endpoint.close()
            left.set()
            return
        left.wait(10)
        time.sleep(0.2 * rank)
        pair.all_reduce(torch.ones(4))
        with pytest.raises(PeerLost, match=r"rank 2 on here was lost .* it left"):
            whole.all_reduce(torch.ones(4))
        endpoint.close()

    together(3, each)


def test_search_follows_who_waits_for_whom() -> None:
    search = WaitGraphSearch(waited_s=2.0, has_suspect=True)
    assert search.start([3], now_s=0.0) == Query((3,))
    assert search.answer(3, 2, now_s=0.1) == Query((2,))
    assert search.answer(3, None, now_s=0.1) is None, "it was not asked"
    assert search.overdue(now_s=1.0) is None
    assert search.overdue(now_s=1.2) == Culprit(2, "it did not come for 2.0 s and does not answer")
    assert search.answer(2, None, now_s=1.2) == Culprit(2, "it did not come for 2.0 s")


def test_search_ends_in_a_circle_and_among_all() -> None:
    circle = WaitGraphSearch(waited_s=1.0, has_suspect=True)
    circle.start([0], now_s=0.0)
    circle.answer(0, 1, now_s=0.0)
    assert isinstance(circle.answer(1, 0, now_s=0.0), Culprit)
    among = WaitGraphSearch(waited_s=1.0, has_suspect=False)
    among.start([0, 1, 2], now_s=0.0)
    assert among.answer(0, 2, now_s=0.1) is None
    assert among.answer(2, None, now_s=0.1) is None
    assert among.overdue(now_s=2.0) == Culprit(1, "it did not come for 1.0 s and does not answer")
    among.answer(1, 0, now_s=0.2)
    assert among.overdue(now_s=2.0) is None
    assert among.is_over(now_s=2.0)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda frame: b"HTTP" + frame[4:], "it starts with b'HTTP'"),
        (lambda frame: frame[:-1] + b"!", "its checksum differs"),
        (lambda frame: frame[:4] + b"\xff\xff\xff\xff" + frame[8:], "it announces 4294967295"),
    ],
)
def test_corrupt_control_messages_are_refused(spoil: Callable[[bytes], bytes], sentence: str) -> None:
    frame = ControlMessage(MessageType.GO, 7, {"ticket": 1}).encode()
    assert [message.body for message in Decoder(7).feed(frame)] == [{"ticket": 1}]
    with pytest.raises(WorldError, match=sentence):
        list(Decoder(7).feed(spoil(frame)))


def test_control_messages_of_another_generation_are_refused() -> None:
    with pytest.raises(WorldError, match="is of generation 6, and this is generation 7"):
        list(Decoder(7).feed(ControlMessage(MessageType.GO, 6).encode()))


@pytest.mark.parametrize("header", [{"type": 99}, {"type": "GO"}, {"generation": "7"}, {"body": []}])
def test_control_messages_with_wrong_fields_are_refused(header: dict[str, object]) -> None:
    with pytest.raises(WorldError, match="its fields are not those of a message"):
        ControlMessage.decode({"type": 3, "generation": 7, "body": {}} | header)


def test_messages_may_arrive_byte_by_byte() -> None:
    inbox, frames = (
        Decoder(0),
        b"".join(ControlMessage(MessageType.GO, 0, {"n": number}).encode() for number in range(3)),
    )
    found = [message.body["n"] for byte in frames for message in inbox.feed(bytes([byte]))]
    assert found == [0, 1, 2]


def test_a_coordinator_lives_on_when_strangers_call() -> None:
    coordinator = Coordinator.start("127.0.0.1", generation=3)
    old = ControlMessage(MessageType.HELLO, 2, {"rank": 0, "host": "old", "token": coordinator.token}).encode()
    forged = ControlMessage(MessageType.HELLO, 3, {"rank": 0, "host": "a", "token": "guessed"}).encode()
    unasked = ControlMessage(MessageType.FAULT, 3, {"text": "believe me"}).encode()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", old, forged, unasked, b""):
        with socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            assert stranger.recv(100) == b"", "it is not answered"
    lines = [
        ControlClient.connect(rank, ["a", "b"], "127.0.0.1", coordinator.port, 3, coordinator.token)
        for rank in range(2)
    ]
    for line in lines:
        line.arrive("g", 1, [0, 1], f"from {line.rank}")
    assert [line.wait_arrivals("g", 1, 5) for line in lines] == [["from 0", "from 1"]] * 2
    for line in lines:
        line.close()
    coordinator.close()


def test_a_mismatch_in_one_group_is_no_trouble_of_another() -> None:
    store, shared, late = HashStore(), InProcessWindows(), threading.Event()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 4, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        pair = Group.create(endpoint, f"pair{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], timeout_s=10)
        if rank < 2:
            with pytest.raises(MismatchError):
                pair.all_reduce(torch.ones(4 + rank))
            late.set()
        else:
            late.wait(10)
            time.sleep(0.2 * (rank - 2))
            pair.all_reduce(torch.ones(4))
        endpoint.close()

    together(4, each)


def test_a_lost_rank_of_another_group_does_not_change_who_is_named() -> None:
    """Rank 2 is gone; in the group of 0 and 1 it is 1 that does not come."""
    store, shared = HashStore(), InProcessWindows()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 3, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        Group.create(endpoint, "all", range(3), timeout_s=10)
        if rank == 2:
            endpoint.control._stream.close()  # as if it were killed
            return
        pair = Group.create(endpoint, "pair", [0, 1], timeout_s=0.5)
        time.sleep(0.3)
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 on here was lost"):
                pair.all_reduce(torch.ones(4))
        else:
            time.sleep(3)
        endpoint.close()

    together(3, each)
