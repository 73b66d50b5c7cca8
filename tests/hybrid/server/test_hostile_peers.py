"""Shard servers on an open network: strangers cost next to nothing, and no moment ends a server."""

import logging
import os
import resource
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.net import Address, Connection
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.stream import FRAMES

pytestmark = pytest.mark.timeout(60)
COUNT = 1000
MIB = 1 << 20


@contextmanager
def serving(token: str = "secret") -> Iterator[ShardServer]:
    """Run a server with one shard of zeros."""
    spec = OptimizerSpec(torch.optim.SGD, ({"lr": 0.1},), (ParamSpan(0, 0, COUNT),))
    server = ShardServer.open({0: Shard(torch.zeros(COUNT), spec, PushScaling(reference=1))}, token, timeout_s=5)
    try:
        yield server
    finally:
        server.close()


def pulled(address: Address, timeout_s: float = 10, token: str = "secret") -> int:
    """How many elements a client with the secret pulls."""
    client = ShardsClient(0, COUNT, Shares.equal(1), [[address]], token, timeout_s=timeout_s)
    try:
        return len(client.pull().values)
    finally:
        client.close()


def announcing(body_bytes: int) -> bytes:
    """Return a message without a token that announces a body."""
    header = b'{"dtype":"torch.uint8"}'
    return struct.pack("!4sIQI", FRAMES.magic, len(header), body_bytes, zlib.crc32(header)) + header


@contextmanager
def with_secret(address: Address) -> Iterator[tuple[socket.socket, Connection]]:
    """Connect a peer that has shown the secret and been let in, so that any bytes can be sent."""
    raw = socket.create_connection((address.host, address.port))
    peer = Connection(raw, 5)
    try:
        peer.greet("secret")
        peer.receive()
        peer.send({"group": 0})
        yield raw, peer
    finally:
        peer.close()


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reached(condition: Callable[[], bool], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_closed(stranger: socket.socket, within_s: float) -> bool:
    """Whether the server closes the connection, after an answer perhaps."""
    stranger.settimeout(within_s)
    try:
        while stranger.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_stranger_that_announces_a_body_gets_no_memory() -> None:
    with serving() as server, ExitStack() as open_connections:
        before = memory_bytes()
        strangers = []
        for _ in range(4):
            stranger = socket.create_connection((server.address.host, server.address.port))
            strangers.append(open_connections.enter_context(stranger))
            stranger.sendall(announcing(256 * MIB))
        closed = [is_closed(stranger, 2) for stranger in strangers]
        grown = memory_bytes() - before
        assert grown < 64 * MIB
        assert closed == [True] * 4
        assert pulled(server.address) == COUNT


def test_a_peer_that_announces_more_than_it_sends_gets_memory_for_what_came() -> None:
    """Even one with the secret, such as a process that dies in the middle of a message."""
    with serving() as server, with_secret(server.address) as (raw, _):
        before = memory_bytes()
        raw.sendall(announcing(1 << 39) + bytes(4 * MIB))
        assert pulled(server.address) == COUNT
        assert memory_bytes() - before < 160 * MIB


def test_a_silent_stranger_is_closed_within_seconds() -> None:
    with serving() as server, socket.create_connection((server.address.host, server.address.port)) as stranger:
        assert is_closed(stranger, 8)


def test_a_stranger_that_trickles_bytes_is_closed_within_seconds() -> None:
    with serving() as server, socket.create_connection((server.address.host, server.address.port)) as stranger:
        started_s = time.monotonic()
        while time.monotonic() < started_s + 10 and not is_closed(stranger, 0.5):
            with suppress(OSError):
                stranger.sendall(FRAMES.magic[:1])
        assert time.monotonic() - started_s < 8


def test_many_silent_strangers_cost_few_threads_and_keep_nobody_out() -> None:
    with serving() as server, ExitStack() as open_connections:
        threads = threading.active_count()
        for _ in range(300):
            stranger = socket.create_connection((server.address.host, server.address.port))
            open_connections.enter_context(stranger)
        assert pulled(server.address) == COUNT
        assert threading.active_count() - threads < 100


@pytest.mark.parametrize("guess", ["guess", "gu\u00e9ss", ""])
def test_a_wrong_secret_is_told_so_in_any_alphabet(guess: str) -> None:
    with serving("s\u00e9cret") as server:
        with pytest.raises(WorldError, match="belongs to another run"):
            pulled(server.address, token=guess)
        assert pulled(server.address, token="s\u00e9cret") == COUNT


def test_a_server_without_descriptors_for_a_moment_serves_again(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, caplog.at_level(logging.WARNING, "mimatrix.hybrid"), socket.socket() as waiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest_free_descriptor(), hard))
        try:
            waiting.connect((server.address.host, server.address.port))
            was_told = reached(lambda: "cannot accept" in caplog.text, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert pulled(server.address, timeout_s=3) == COUNT
        assert was_told
    assert caplog.text.count("cannot accept") == 1


def _lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def test_nonsense_of_a_peer_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    """Messages with the secret that no group sends: each gets an error or is closed, and the server serves on."""
    messages = [
        {"type": []},
        {"type": "pull", "shard": []},
        {"type": "leave"},
        {"type": "push", "shard": 0},
        {"type": "set_peers", "addresses": 7},
        {"type": "welcome", "address": "x"},
        {"window": ["nowhere", -1], "dtype": "torch.float32"},
        {"window": 3, "dtype": "torch.float32"},
        {"dtype": "nn", "type": "push"},
        [],
    ]
    with serving() as server:
        for message in messages:
            payload = bytes(7) if isinstance(message, dict) and message.get("dtype") == "nn" else b""
            with with_secret(server.address) as (raw, peer):
                raw.sendall(FRAMES.pack(message, len(payload)) + payload)  # type: ignore[arg-type]
                with suppress(OSError):
                    assert peer.receive()[0].keys() & {"error", "moved"}
        assert pulled(server.address) == COUNT
    assert not [record for record in caplog.records if record.levelno > logging.ERROR]
