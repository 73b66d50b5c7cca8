"""The coordinator reads nothing of strangers, and outlives them, bad messages and moments without descriptors."""

import json
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
from support.control import GENERATION, greet, start_coordinator
from support.ranks import together

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import GREETING_BYTES, ControlMessage, MessageType, greeting
from mimatrix.comm.control.server import ServerLimits
from mimatrix.core.errors import PeerLost, WorldError

HELLO = ControlMessage(MessageType.HELLO, GENERATION, {"rank": 0, "host": "a"}).encode()


def connect_clients(coordinator: Coordinator, ranks: Sequence[int] = (0, 1)) -> list[ControlClient]:
    hosts = ["a", "b", "c"]
    return [
        ControlClient.connect(rank, hosts, "127.0.0.1", coordinator.port, GENERATION, coordinator.token)
        for rank in ranks
    ]


def meet(clients: Sequence[ControlClient], ticket: int = 1) -> None:
    """Return once the coordinator has let all of them go."""
    for client in clients:
        client.arrive("g", ticket, [each.rank for each in clients], f"from {client.rank}")
    for client in clients:
        assert client.wait_arrivals("g", ticket, 5) == [f"from {each.rank}" for each in clients]


@contextmanager
def serving(world_size: int = 2, **options: object) -> Iterator[Coordinator]:
    coordinator = start_coordinator(world_size, **options)
    try:
        yield coordinator
    finally:
        coordinator.close(timeout_s=0)


def is_closed_by_peer(stream: socket.socket, within_s: float) -> bool:
    stream.settimeout(within_s)
    try:
        return stream.recv(100) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_coordinator_ignores_strangers_and_keeps_serving_its_ranks() -> None:
    with serving() as coordinator:
        strange = b"S" * GREETING_BYTES
        old = greeting(coordinator.token, GENERATION - 1) + HELLO
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"", HELLO, strange, old, greeting("guessed", GENERATION) + HELLO):
            with socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
                with suppress(OSError):  # it may be closed already
                    stranger.sendall(sent)
                    stranger.shutdown(socket.SHUT_WR)
                assert is_closed_by_peer(stranger, 5), "it is not answered"
        clients = connect_clients(coordinator)
        meet(clients)
        for client in clients:
            client.close()


def test_coordinator_parses_nothing_of_a_peer_that_has_not_shown_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, size = [], 800_000
    monkeypatch.setattr(json, "loads", lambda data: parsed.append(len(data)))
    with serving() as coordinator, socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
        body = {"text": "x" * size}
        frame = ControlMessage(MessageType.HELLO, GENERATION, body).encode()
        with suppress(OSError):  # the coordinator has closed the connection before it was sent
            stranger.sendall(frame)
        assert is_closed_by_peer(stranger, 5)
    assert not [length for length in parsed if length >= size], "what is shorter comes from other threads of the tests"


def test_coordinator_closes_connections_that_do_not_greet_in_time() -> None:
    with serving(limits=ServerLimits(greeting_s=0.2)) as coordinator:
        with socket.create_connection(("127.0.0.1", coordinator.port)) as silent:
            assert is_closed_by_peer(silent, 5)
        with socket.create_connection(("127.0.0.1", coordinator.port)) as slow:
            slow.sendall(greeting(coordinator.token, GENERATION)[:-1])
            assert is_closed_by_peer(slow, 5)


def test_coordinator_bounds_connections_that_have_not_greeted() -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(limits=ServerLimits(max_strangers=8)))
        streams = [stack.enter_context(socket.create_connection(("127.0.0.1", coordinator.port))) for _ in range(20)]
        assert all(is_closed_by_peer(stream, 5) for stream in streams[:12]), "the oldest are closed"
        clients = connect_clients(coordinator)
        meet(clients)
        assert not any(is_closed_by_peer(stream, 0.01) for stream in streams[14:])


def test_coordinator_accepts_again_after_a_moment_without_descriptors() -> None:
    """Here the coordinator is a thread of this process, so their descriptors are the same."""
    with serving() as coordinator, socket.socket() as waiting:
        clients = connect_clients(coordinator)
        meet(clients)
        with no_descriptors():
            waiting.connect(("127.0.0.1", coordinator.port))
            waiting.sendall(b"x" * GREETING_BYTES)
            # It cannot be accepted, and meanwhile the ranks are served as before.
            for ticket in range(2, 20):
                meet(clients, ticket)
            assert not is_closed_by_peer(waiting, 0.2)
        assert is_closed_by_peer(waiting, 5), "it is accepted and refused"
        assert coordinator.is_serving


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


MALFORMED = [
    (MessageType.HELLO, {"rank": "1", "host": "b"}),
    (MessageType.HELLO, {"rank": 2, "host": "b"}),
    (MessageType.HELLO, {"rank": 0, "host": "b"}),
    (MessageType.ARRIVE, {"group": "g", "ticket": 1, "members": [0, 1], "payload": None}),
]


@pytest.mark.parametrize(("kind", "body"), MALFORMED)
def test_bad_first_message_harms_only_its_sender(kind: MessageType, body: dict[str, object]) -> None:
    with serving() as coordinator:
        clients = connect_clients(coordinator)
        meet(clients)
        with socket.create_connection(("127.0.0.1", coordinator.port)) as sender:
            sender.sendall(greeting(coordinator.token, GENERATION) + ControlMessage(kind, GENERATION, body).encode())
            assert is_closed_by_peer(sender, 5)
        meet(clients, 2)
        assert [client.has_news for client in clients] == [False, False]


CORRUPT = [
    (MessageType.ARRIVE, {"group": "g", "ticket": "1", "members": [0, 2], "payload": None}),
    (MessageType.ARRIVE, {"group": "g", "ticket": 9, "members": [0, 1], "payload": None}),
    (MessageType.ARRIVE, {"group": "g", "ticket": 9, "members": [2, 2], "payload": None}),
    (MessageType.ARRIVE, {"group": "g", "ticket": 9, "members": None, "payload": None}),
    (MessageType.ARRIVE, {"group": "g" * 500, "ticket": 9, "members": [0, 2], "payload": None}),
    (MessageType.FAULT, {"text": "no more"}),
    (MessageType.FAULT, {"text": "no more", "ranks": ["0"], "failed": None, "is_users": False}),
    (MessageType.LATE, {"waits_for": None, "waited_s": "long", "arrival": None, "members": [0]}),
    (MessageType.STORE, {"number": 1, "operation": "get"}),
    (MessageType.GO, {}),
    (MessageType.BYE, {}),
]


@pytest.mark.parametrize(("kind", "body"), CORRUPT)
def test_bad_message_harms_only_the_rank_that_sent_it(kind: MessageType, body: dict[str, object]) -> None:
    with serving(world_size=3) as coordinator, greet(coordinator, 2, "c") as sender:
        clients = connect_clients(coordinator)
        meet(clients)
        sender.sendall(ControlMessage(kind, GENERATION, body).encode())
        error = first_failure(clients[0], [0, 2])
        assert isinstance(error, PeerLost)
        assert error.rank == 2
        meet(clients, 2)
        assert clients[1].failure(-1, [0, 1], "a test") is None


def first_failure(client: ControlClient, members: Sequence[int]) -> Exception | None:
    until = time.monotonic() + 5
    while not (error := client.failure(-1, members, "a test")) and time.monotonic() < until:
        time.sleep(0.005)
    return error


def test_rank_that_does_not_read_does_not_delay_the_others_and_is_lost() -> None:
    limits = ServerLimits(max_unread_bytes=1 << 20)
    with serving(world_size=3, limits=limits) as coordinator, greet(coordinator, 2, "c"):
        clients = connect_clients(coordinator)
        meet(clients)
        started = time.monotonic()
        text = "x" * 500_000
        for number in range(20):
            clients[0].report_failure([0, 1, 2, number + 3], text, ValueError())
        meet(clients, 2)
        assert time.monotonic() - started < 5
        error = first_failure(clients[1], [1, 2])
        assert "rank 2 on c was lost" in str(error)
        assert "it does not read its messages" in str(error)


def test_coordinator_that_fails_tells_all_ranks_why() -> None:
    with serving() as coordinator:
        clients = connect_clients(coordinator)
        meet(clients)

        def fail() -> None:
            raise ZeroDivisionError("a defect")

        coordinator.on_tick = fail  # type: ignore[method-assign]
        for client in clients:
            error = first_failure(client, [0, 1])
            assert isinstance(error, WorldError)
            assert str(error) == "the coordinator failed (ZeroDivisionError: a defect); restart the job"


@pytest.mark.parametrize("payload", [{}, {"group": "g"}, {"group": [], "ticket": 1, "payloads": []}])
def test_client_names_a_coordinator_that_sends_a_corrupt_message(payload: dict[str, object]) -> None:
    for kind in (MessageType.GO, MessageType.LOST, MessageType.FAULT, MessageType.REPLY):
        with fake_coordinator() as (client, send):
            send(ControlMessage(kind, GENERATION, payload).encode())
            error = first_failure(client, [0, 1])
            assert isinstance(error, WorldError)
            assert str(error).startswith("the coordinator of this job, a process on a, was lost in a test: ")
            assert "corrupt" in str(error)
            assert str(error).endswith("; restart the job")


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", os.urandom(200)])
def test_client_names_a_coordinator_that_closes_or_sends_what_is_no_message(data: bytes) -> None:
    with fake_coordinator() as (client, send):
        for part in filter(None, (data,)):
            send(part)
        send(b"")
        error = first_failure(client, [0, 1])
        assert "the coordinator of this job, a process on a, was lost in a test: " in str(error)


@contextmanager
def fake_coordinator() -> Iterator[tuple[ControlClient, Callable[[bytes], None]]]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        client = ControlClient.connect(0, ["a", "b"], "127.0.0.1", port, GENERATION, "token")
        stream = stack.enter_context(listener.accept()[0])

        def send(data: bytes) -> None:
            stream.sendall(data) if data else stream.shutdown(socket.SHUT_WR)

        yield client, send


def test_members_are_sent_once_per_group() -> None:
    """The load of one rank does not grow with the number of members in every round."""
    with serving(world_size=2) as coordinator:
        clients = connect_clients(coordinator)

        def arrive(rank: int) -> None:
            for ticket in range(1, 50):
                clients[rank].arrive("h", ticket, [0, 1], None)
                assert clients[rank].wait_arrivals("h", ticket, 5) == [None, None]

        together(2, arrive)
        for client in clients:
            client.arrive("h", 50, [1, 0], client.rank)
        assert [client.wait_arrivals("h", 50, 5) for client in clients] == [[1, 0]] * 2, "members may change"
