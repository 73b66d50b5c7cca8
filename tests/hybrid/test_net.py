"""Messages between groups and shards, over TCP and through windows."""

import socket
from collections.abc import Iterator

import pytest
import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.memory.nixl import nixl_available
from mimatrix.core import environment
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Connection

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Connection(socket.create_connection(listener.getsockname()), 10)
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
    pair: tuple[Connection, Connection], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = negotiated(pair, way, monkeypatch)
    sent: list[int] = []
    raw = one._raw

    class Counted:
        def sendall(self, data: bytes) -> None:
            sent.append(len(data))
            raw.sendall(data)

    one._raw = Counted()  # type: ignore[assignment]
    try:
        for count in (100_000, 300_000, 200_000):
            one.send({}, torch.full((count,), float(count)))
            found = other.receive()[1]
            assert found is not None
            assert found.tolist() == [float(count)] * count
    finally:
        one._raw = raw
    assert sum(sent) < 10_000


def test_a_lost_window_is_a_lost_connection(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the client turns to the replica."""
    one, other = negotiated(pair, "near", monkeypatch)
    one.send({}, torch.ones(100_000))
    one.close()
    with pytest.raises(ConnectionError, match="cannot be read"):
        other.receive()


def test_bytes_of_other_protocols_are_refused(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    one._raw.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    with pytest.raises(WorldError, match="a message is corrupt"):
        other.receive()
