"""Servers that say nothing any more without closing a connection are replaced in seconds; busy ones are not."""

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from mimatrix.collectives.shares import Shares
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.net import Address, connect
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.process import ServerSpec
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.server.state import ShardState

pytestmark = pytest.mark.timeout(100)
COUNT = 100
HERE, THERE = "198.18.77.1", "198.18.77.2"
SGD = {"lr": 0.1}
SPEC = OptimizerSpec(torch.optim.SGD, (SGD,), (ParamSpan(0, 0, COUNT),))
SCALING = PushScaling(reference=1)


@contextmanager
def server_process(
    timeout_s: float, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> Iterator[tuple[Address, "subprocess.Popen[bytes]"]]:
    """Run a server with a shard of zeros as a process that can be stopped."""
    spec = ServerSpec(
        host=host,
        token="secret",
        groups=2,
        scaling=SCALING,
        shards={0: torch.zeros(COUNT)},
        optimizers=(SPEC,),
        timeout_s=timeout_s,
    )
    command = [*prefix, sys.executable, "-m", "mimatrix.hybrid.server.process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    try:
        with process.stdin, process.stdout:
            process.stdin.write(pickle.dumps(spec))
            process.stdin.close()
            yield Address(host, int(process.stdout.readline())), process
    finally:
        process.kill()
        process.wait()


def make_replica(_: int, state: ShardState) -> Shard:
    shard = Shard(state.values, SPEC, SCALING)
    shard.load(state)
    return shard


@contextmanager
def server_here(timeout_s: float, host: str = "127.0.0.1") -> Iterator[ShardServer]:
    shards = {0: Shard(torch.zeros(COUNT), SPEC, SCALING)}
    server = ShardServer.open(shards, "secret", host, timeout_s=timeout_s, make_shard=make_replica)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def client_of(addresses: list[Address], timeout_s: float, group: int = 0) -> Iterator[ShardsClient]:
    client = ShardsClient(group, COUNT, Shares.equal(1), [addresses], "secret", timeout_s=timeout_s)
    try:
        yield client
    finally:
        client.close()


def push_ones(client: ShardsClient) -> float:
    """Push a gradient of ones, and return the seconds that it took."""
    started_s = time.monotonic()
    client.push(torch.ones(COUNT), 1, 1, [SGD], client.pull().versions)
    return time.monotonic() - started_s


def introduce(primary: Address, replica: Address) -> None:
    """Tell the primary where its replica shall be; it copies its shard there with the next push."""
    connection = connect(primary, "secret", 10)
    encoded = [primary.to_json(), replica.to_json()]
    connection.send({"type": "set_peers", "addresses": encoded, "groups": 2})
    connection.receive()
    connection.close()


def test_a_stopped_server_is_replaced_by_its_replica_within_10_s() -> None:
    with server_process(40) as (primary, process), server_here(40) as replica:
        introduce(primary, replica.address)
        with client_of([primary, replica.address], 40) as client:
            push_ones(client)
            process.send_signal(signal.SIGSTOP)
            assert push_ones(client) < 10
            torch.testing.assert_close(client.pull().values, torch.full((COUNT,), -0.2))


@pytest.mark.long
def test_a_shard_waits_seconds_for_a_stopped_replica() -> None:
    """Not a third of the timeout, since all groups wait for the shard meanwhile."""
    with server_process(60) as (address, process), server_here(60) as primary:
        primary.replicas.set_peers([primary.address, address], 2)
        primary.replicas.attach(0, address)
        with client_of([primary.address, address], 60) as client:
            push_ones(client)
            process.send_signal(signal.SIGSTOP)
            assert push_ones(client) < 10
            torch.testing.assert_close(client.pull().values, torch.full((COUNT,), -0.2))


def test_a_busy_server_is_not_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A push waits for a hold, far longer than a silent server would be given."""
    monkeypatch.setattr("mimatrix.hybrid.net.SILENCE_S", 1.5, raising=False)
    with ExitStack() as stack, caplog.at_level(logging.INFO, "mimatrix.hybrid"):
        servers = [stack.enter_context(server_here(30)) for _ in range(3)]
        addresses = [server.address for server in servers]
        for server in servers:
            server.replicas.set_peers(addresses, 3)
        servers[0].replicas.attach(0, addresses[1])
        holder = stack.enter_context(client_of(addresses, 30))
        client = stack.enter_context(client_of(addresses, 30, group=1))
        seconds: list[float] = []
        pushing = threading.Thread(target=lambda: seconds.append(push_ones(client)))
        with holder.hold(lease_s=4):
            pushing.start()
            pushing.join(30)
        assert seconds[0] > 3
        torch.testing.assert_close(holder.pull().values, torch.full((COUNT,), -0.1))
    assert caplog.messages == []


@contextmanager
def host_of_its_own() -> Iterator[str]:
    """Make a network namespace with one link to this one; its processes have the second address of the link."""
    name = f"mmxtest{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name[-15:], "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{HERE}/30", "dev", name[-15:])
        ip("link", "set", name[-15:], "up")
        ip("-n", name, "address", "add", f"{THERE}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield name
    finally:
        ip("netns", "delete", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip")
def test_a_host_that_vanished_is_replaced_within_10_s() -> None:
    """Nothing comes from it any more, not even an acknowledgement of TCP."""
    with (
        host_of_its_own() as host,
        server_process(60, THERE, ("ip", "netns", "exec", host)) as (primary, _),
        server_here(60, HERE) as replica,
        client_of([primary, replica.address], 60) as client,
    ):
        introduce(primary, replica.address)
        push_ones(client)
        ip("-n", host, "route", "add", "blackhole", f"{HERE}/32")
        assert push_ones(client) < 10
        torch.testing.assert_close(client.pull().values, torch.full((COUNT,), -0.2))


class CuttableRelay:
    """Passes bytes on to a server, over connections that can be cut."""

    def __init__(self, server: Address) -> None:
        self._server, self._listener = server, socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection((self._server.host, self._server.port))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_connection_that_broke_is_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    """The server is there: turning to the replica would leave the shard with one copy less."""
    with ExitStack() as stack, caplog.at_level(logging.INFO, "mimatrix.hybrid"):
        servers = [stack.enter_context(server_here(20)) for _ in range(3)]
        addresses = [server.address for server in servers]
        for server in servers:
            server.replicas.set_peers(addresses, 3)
        servers[0].replicas.attach(0, addresses[1])
        relay = CuttableRelay(addresses[0])
        stack.callback(relay.close)
        client = stack.enter_context(client_of([relay.address, *addresses[1:]], 20))
        for _ in range(3):
            push_ones(client)
            relay.cut()
        torch.testing.assert_close(client.pull().values, torch.full((COUNT,), -0.3))
    assert caplog.messages == []
