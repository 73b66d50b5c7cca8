"""The job's key-value store: what ranks share behind the job's token."""

import threading
import time
from collections.abc import Iterator

import pytest
from support.control import GENERATION, start_coordinator
from support.ranks import together

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.job_store import JobStore
from mimatrix.comm.control.key_value_store import MAX_VALUE_CHARACTERS, KeyValueStore, StoreRequest
from mimatrix.core.errors import PeerLost, UserError, WorldError


@pytest.fixture
def clients() -> Iterator[list[ControlClient]]:
    coordinator = start_coordinator(world_size=3)
    made = [
        ControlClient.connect(rank, ["a", "b", "c"], "127.0.0.1", coordinator.port, GENERATION, coordinator.token)
        for rank in range(3)
    ]
    yield made
    for client in made:
        client.close()
    coordinator.close(timeout_s=1)


def test_store_shares_values_among_ranks(clients: list[ControlClient]) -> None:
    one, other = JobStore(clients[0]), JobStore(clients[1])
    one.set("key", "ä value")
    assert other.get("key").decode() == "ä value"
    other.set("key", "")
    assert one.get("key") == b""


def test_store_get_waits_until_a_key_is_written(clients: list[ControlClient]) -> None:
    stores = [JobStore(client) for client in clients]
    waiting = threading.Event()

    def each(rank: int) -> bytes:
        if rank:
            waiting.set()
            return stores[rank].get("late", timeout_s=20)
        waiting.wait()
        stores[0].set("other", "x")
        stores[0].set("late", "here")
        return b"here"

    assert together(3, each) == [b"here"] * 3
    stores[1].wait(["late", "other"])


def test_store_get_has_a_deadline(clients: list[ControlClient]) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError, match=r"the job's store has no never after 0\.2 s; see the output of all ranks"):
        JobStore(clients[0]).get("never", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 3


def test_store_adds_up(clients: list[ControlClient]) -> None:
    sums = together(3, lambda rank: [JobStore(clients[rank]).add("sum", 1) for _ in range(20)])
    assert sorted(number for own in sums for number in own) == list(range(1, 61))


def test_store_compare_set_has_one_winner(clients: list[ControlClient]) -> None:
    seen = together(3, lambda rank: JobStore(clients[rank]).compare_set("leader", "", str(rank)))
    assert len(set(seen)) == 1
    (leader,) = set(seen)
    assert JobStore(clients[0]).compare_set("leader", leader.decode(), "next") == b"next"
    assert JobStore(clients[1]).compare_set("leader", leader.decode(), "too late") == b"next"


def test_store_wait_names_a_rank_that_is_lost_meanwhile(clients: list[ControlClient]) -> None:
    threading.Timer(0.3, lambda: clients[2]._stream.shutdown(2)).start()  # as if it were killed
    with pytest.raises(PeerLost, match="rank 2 on c was lost in a request for rank/2 in the job's store") as raised:
        JobStore(clients[0]).get("rank/2", timeout_s=30)
    assert raised.value.rank == 2


def test_store_wait_names_a_coordinator_that_is_lost(clients: list[ControlClient]) -> None:
    threading.Timer(0.3, lambda: clients[0]._stream.shutdown(2)).start()
    with pytest.raises(WorldError, match="the coordinator of this job, a process on a, was lost in a request for k"):
        JobStore(clients[0]).get("k", timeout_s=30)


@pytest.mark.parametrize(("key", "value"), [("k" * 600, ""), ("k", "v" * (MAX_VALUE_CHARACTERS + 1))])
def test_store_refuses_what_is_too_long(clients: list[ControlClient], key: str, value: str) -> None:
    with pytest.raises(UserError, match="do not fit into the job's store"):
        JobStore(clients[0]).set(key, value)


def test_store_is_bounded() -> None:
    store, refused = KeyValueStore(), 0
    for number in range(300):
        request = StoreRequest(number=number, operation="set", key=f"k{number}", value="v" * MAX_VALUE_CHARACTERS)
        (reply,) = store.handle(0, request, 0.0)
        refused += "it is full" in reply.error
    assert 300 - refused == (64 << 20) // (MAX_VALUE_CHARACTERS + 4)
    (reply,) = store.handle(0, StoreRequest(number=0, operation="get", key="k0"), 0.0)
    assert reply.value == "v" * MAX_VALUE_CHARACTERS


def test_store_refuses_to_add_to_a_text(clients: list[ControlClient]) -> None:
    store = JobStore(clients[0])
    store.set("text", "abc")
    with pytest.raises(WorldError, match="the job's store refuses to add text: invalid literal"):
        store.add("text", 1)
    assert store.get("text") == b"abc"


def test_store_forgets_the_waits_of_a_rank_that_is_gone() -> None:
    store = KeyValueStore()
    for rank in (0, 1):
        assert store.handle(rank, StoreRequest(number=5, operation="get", key="k", timeout_s=9.0), 0.0) == []
    store.forget(1)
    replies = store.handle(2, StoreRequest(number=8, operation="set", key="k", value="v"), 1.0)
    assert [(reply.rank, reply.number, reply.value) for reply in replies] == [(2, 8, ""), (0, 5, "v")]
    assert store.expire(100.0) == []
