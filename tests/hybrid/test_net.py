"""Messages between groups and shards, over TCP and through windows."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.memory.nixl import nixl_available
from mimatrix.core import environment
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Connection

pytestmark = pytest.mark.timeout(30)


class CountingSocket(socket.socket):
    """A socket that counts the bytes that it sends."""

    sent_bytes = 0

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:  # type: ignore[override]
        self.sent_bytes += len(data)
        super().sendall(data, flags)


@pytest.fixture
def client_socket() -> CountingSocket:
    return CountingSocket()


@pytest.fixture
def pair(client_socket: CountingSocket) -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client_socket.connect(listener.getsockname())
        one = Connection(client_socket, 10)
        other = Connection(listener.accept()[0], 10)
    yield one, other
    one.close()
    other.close()


def negotiated(
    pair: tuple[Connection, Connection], way: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Connection, Connection]:
    """Both ends, which take each other for near, or far with RDMA or without."""
    if way == "rdma" and not nixl_available():
        pytest.skip("NIXL is not installed")
    # There is no RDMA here: NIXL reads over whatever UCX finds instead, by the same calls.
    monkeypatch.setenv(environment.RDMA.name, "1" if way == "rdma" else "0")
    for stream in pair:
        stream.negotiate({"host": own_host() if way == "near" else "elsewhere", "rdma": way == "rdma"})
    return pair


@pytest.mark.parametrize("way", ["near", "far", "rdma"])
def test_messages_arrive_over_every_transport(
    pair: tuple[Connection, Connection], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = negotiated(pair, way, monkeypatch)
    for count, dtype in ((0, torch.float32), (3, torch.float64), (40_000, torch.float32), (10_000, torch.float64)):
        values = torch.arange(count).to(dtype)
        one.send({"type": "push", "count": count}, values)
        head, found = other.receive()
        assert (head["type"], head["count"]) == ("push", count)
        assert found is None if count == 0 else torch.equal(found, values)  # type: ignore[arg-type]
        other.send({"base_version": count})
        assert one.receive() == ({"base_version": count}, None)


@pytest.mark.parametrize("way", ["near", "rdma"])
def test_tensors_in_windows_do_not_travel_over_tcp(
    pair: tuple[Connection, Connection],
    client_socket: CountingSocket,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = negotiated(pair, way, monkeypatch)
    for count in (100_000, 300_000, 200_000):
        one.send({}, torch.full((count,), float(count)))
        found = other.receive()[1]
        assert found is not None
        assert found.tolist() == [float(count)] * count
    assert client_socket.sent_bytes < 10_000


def test_a_lost_window_is_a_lost_connection(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the client turns to the replica."""
    one, other = negotiated(pair, "near", monkeypatch)
    one.send({}, torch.ones(100_000))
    one.close()
    with pytest.raises(ConnectionError, match="cannot be read"):
        other.receive()


def test_bytes_of_other_protocols_are_refused(
    pair: tuple[Connection, Connection], client_socket: CountingSocket
) -> None:
    client_socket.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    with pytest.raises(WorldError, match="a message is corrupt"):
        pair[1].receive()


def test_payloads_larger_than_the_first_memory_arrive_whole(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a payload grows with what has arrived."""
    one, other = negotiated(pair, "far", monkeypatch)
    monkeypatch.setattr("mimatrix.hybrid.stream._FIRST_BYTES", 1000)
    values = torch.arange(300_000)
    sender = threading.Thread(target=one.send, args=({}, values))
    sender.start()
    found = other.receive()[1]
    sender.join(10)
    assert found is not None
    assert torch.equal(found, values)


def test_a_silent_peer_is_given_up_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats make the difference; even a busy peer has no more than the timeout."""
    monkeypatch.setattr("mimatrix.hybrid.net.SILENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Connection(socket.create_connection(listener.getsockname()), 2.0)
        server = Connection(listener.accept()[0], None)
    has_ended = threading.Event()

    def send_heartbeats() -> None:
        while not has_ended.wait(0.1):
            server.send_heartbeat()

    try:
        with pytest.raises(TimeoutError, match=r"the peer has sent nothing for 0\.3 s"):
            client.receive()
        threading.Thread(target=send_heartbeats, daemon=True).start()
        answer = threading.Timer(1.0, server.send, ({"version": 1},))
        answer.start()
        assert client.receive() == ({"version": 1}, None)
        with pytest.raises(TimeoutError, match="the peer is busy"):
            client.receive()
    finally:
        has_ended.set()
        client.close()
        server.close()
