"""Shard servers over real sockets: exact, whichever server is lost."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.hybrid_groups import replicate_in_ring

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.server.state import ShardState

COUNT, B = 1001, 16
SHARES = Shares((0.5, 0.2, 0.3))
ADAM = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99)}
START = torch.linspace(-1, 1, COUNT, dtype=torch.float64)


@pytest.fixture(autouse=True, params=["over streams", "through windows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are few here: on one host they go through windows only if they must."""
    if request.param == "through windows":
        monkeypatch.setattr("mimatrix.hybrid.net._MIN_WINDOW_BYTES", 1)


@pytest.fixture(autouse=True)
def log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mimatrix.hybrid")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("mimatrix.hybrid")]


@contextmanager
def servers(*, mirrored: bool = True) -> Iterator[tuple[list[ShardServer], list[list[Address]]]]:
    """Three servers; server k has shard k, and the next one has its replica."""
    parts = torch.split(START, list(SHARES.cut(COUNT)))
    running = [
        ShardServer.open(
            {number: _shard(parts[number]) for number in (k, (k - 1) % 3)},
            "secret",
            timeout_s=5,
            make_shard=_make_replica,
        )
        for k in range(3)
    ]
    if mirrored:
        replicate_in_ring(running)
    addresses = [[running[(k + n) % 3].address for n in range(3)] for k in range(3)]
    try:
        yield running, addresses
    finally:
        for server in running:
            server.close()


def _shard(values: torch.Tensor) -> Shard:
    return Shard(
        values, OptimizerSpec(torch.optim.AdamW, (ADAM,), (ParamSpan(0, 0, len(values)),)), PushScaling(reference=B)
    )


def _make_replica(_: int, state: ShardState) -> Shard:
    found = _shard(state.values)
    found.load(state)
    return found


def step_once(client: ShardsClient, step: int) -> float:
    now = client.pull()
    return client.push(gradient(now.values, step), B, B, [ADAM], now.versions).staleness


def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
    return at * 0.5 + torch.cos(torch.arange(COUNT, dtype=torch.float64) + step)


def train_alone(steps: int) -> torch.Tensor:
    value = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.AdamW([value], **ADAM)  # type: ignore[arg-type]
    for step in range(steps):
        value.grad = gradient(value.detach(), step)
        optimizer.step()
    return value.detach()


def train(client: ShardsClient, steps: range) -> None:
    for step in steps:
        step_once(client, step)


def test_servers_with_one_group_step_like_its_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    with servers() as (_, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret")
        train(client, range(20))
        assert (client.pull().values - train_alone(20)).abs().max() < 1e-12
        assert client.pull().versions == (20, 20, 20)
        assert client.pull().samples == 20 * B
        client.close()
    assert messages(caplog) == []


@pytest.mark.parametrize("lost", range(3))
def test_replicas_replace_a_lost_server_exactly(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    with servers() as (running, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=5)
        train(client, range(7))
        running[lost].close()
        train(client, range(7, 20))
        assert (client.pull().values - train_alone(20)).abs().max() < 1e-12
        client.close()
    before, last = (lost - 1) % 3, (lost + 2) % 3
    assert sorted(each.partition(" (")[0].partition(", at")[0] for each in messages(caplog)) == sorted(
        [
            f"shard {before} has lost its replica",
            f"shard {before} has a replica again",
            f"shard {lost} has a replica again",
        ]
    )
    assert str(running[last].address.port) in next(
        each for each in messages(caplog) if each.startswith(f"shard {lost} has")
    )


@pytest.mark.parametrize("first", range(3))
def test_shards_that_lost_their_replica_get_another(first: int) -> None:
    """So the next loss costs nothing either, until one server has all shards."""
    with servers() as (running, addresses):
        clients = [ShardsClient(group, COUNT, SHARES, addresses, "secret", timeout_s=5) for group in range(2)]
        train(clients[0], range(4))
        running[first].close()
        train(clients[0], range(4, 8))
        running[(first + 1) % 3].close()
        train(clients[0], range(8, 12))
        # One that slept through all of it, and knows only where shards once were.
        train(clients[1], range(12, 16))
        assert (clients[1].pull().values - train_alone(16)).abs().max() < 1e-12
        assert clients[0].pull().versions == (16, 16, 16)
        for client in clients:
            client.close()


def test_a_server_added_later_gets_replicas_of_single_copies() -> None:
    with servers() as (running, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=5)
        train(client, range(4))
        running[1].close()
        train(client, range(4, 6))
        running[2].close()
        train(client, range(6, 8))
        late = ShardServer.open({}, "secret", timeout_s=5, make_shard=_make_replica)
        known = running[0].replicas.add_peer(late.address)
        late.replicas.set_peers(known, 3)
        train(client, range(8, 12))
        running[0].close()
        train(client, range(12, 20))
        assert (client.pull().values - train_alone(20)).abs().max() < 1e-12
        client.close()
        late.close()


def test_a_server_that_was_slow_once_gets_replicas_again() -> None:
    """It was given up as a replica; later it is the only other server."""
    with servers() as (running, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=2)
        train(client, range(4))
        running[2].replicas.drop(2, OSError("it was slow"))
        train(client, range(4, 6))
        running[1].close()
        train(client, range(6, 8))
        running[2].close()
        train(client, range(8, 12))
        assert (client.pull().values - train_alone(12)).abs().max() < 1e-12
        client.close()


def test_a_primary_that_was_replaced_unnoticed_does_not_undo_pushes() -> None:
    """It gave up its replica, which then became the primary: it must not copy its older state over newer ones."""
    with servers() as (running, addresses):
        cut_off = [[addresses[0][1]], *addresses[1:]]
        lost = ShardsClient(0, COUNT, SHARES, cut_off, "secret", timeout_s=5)
        other = ShardsClient(1, COUNT, SHARES, addresses, "secret", timeout_s=5)
        train(other, range(3))
        running[0].replicas.drop(0, OSError("it was slow"))
        train(lost, range(3, 6))
        train(other, range(6, 9))
        train(lost, range(9, 12))
        assert lost.pull().versions == other.pull().versions == (12, 12, 12)
        assert torch.equal(lost.pull().values, other.pull().values)
        lost.close()
        other.close()


def test_a_dropped_replica_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    """It has an old version: a client that has seen a newer one tries the next server."""
    with servers() as (running, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=5)
        train(client, range(4))
        running[0].replicas.drop(0, OSError("it is silent"))
        train(client, range(4, 8))
        assert "shard 0 has a replica again" in messages(caplog)[-1]
        behind = ShardsClient(1, COUNT, SHARES, addresses, "secret", timeout_s=5)
        assert behind.pull().versions == (8, 8, 8)
        # It does not know of the new replica, though.
        behind._clients[0]._addresses = list(addresses[0])
        running[0].close()
        train(behind, range(8, 12))
        assert (behind.pull().values - train_alone(12)).abs().max() < 1e-12
        client.close()
        behind.close()


def test_a_replaced_primary_redirects_its_clients(caplog: pytest.LogCaptureFixture) -> None:
    """One group cannot reach a server that others reach: all must end with the same shard."""
    with servers() as (_, addresses):
        cut_off = [[addresses[0][1]], *addresses[1:]]
        lost, other = (
            ShardsClient(0, COUNT, SHARES, cut_off, "secret"),
            ShardsClient(1, COUNT, SHARES, addresses, "secret"),
        )
        train(other, range(3))
        train(lost, range(3, 6))
        train(other, range(6, 9))
        train(lost, range(9, 12))
        # The first step of `other` after that was late: it pulled before it heard of it.
        assert lost.pull().versions == other.pull().versions == (12, 12, 12)
        assert torch.equal(lost.pull().values, other.pull().values)
        lost.close()
        other.close()
    assert [each.partition(", at")[0] for each in messages(caplog)] == ["shard 0 has a replica again"]


def test_staleness_counts_pushes_of_other_groups() -> None:
    with servers() as (_, addresses):
        clients = [ShardsClient(group, COUNT, SHARES, addresses, "secret") for group in range(3)]
        nothing = torch.zeros(COUNT, dtype=torch.float64)
        late = [client.push(nothing, B, B, [ADAM], (0, 0, 0)).staleness for client in clients]
        assert late == [0, 1, 2]

        def push(client: ShardsClient) -> None:
            for step in range(10):
                step_once(client, step)

        threads = [threading.Thread(target=push, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [client.pull().versions for client in clients] == [(33, 33, 33)] * 3
        assert torch.equal(clients[0].pull().values, clients[1].pull().values)
        for client in clients:
            client.close()


def test_wrong_tokens_and_lost_servers_are_reported() -> None:
    with servers() as (running, addresses):
        with pytest.raises(WorldError, match="belongs to another run"):
            ShardsClient(0, COUNT, SHARES, addresses, "guess").pull()
        for server in running:
            server.close()
        with pytest.raises(WorldError, match="shard 0 does not answer"):
            ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=1).pull()


def test_a_silent_server_is_replaced_by_its_replica() -> None:
    """A server that listens and never answers times out, and the replica has its own timeout."""
    with servers(mirrored=False) as (_, addresses), socket.create_server(("127.0.0.1", 0)) as silent:
        there = Address(*silent.getsockname())
        client = ShardsClient(0, COUNT, SHARES, [[there, addresses[k][1]] for k in range(3)], "secret", timeout_s=0.5)
        torch.testing.assert_close(client.pull().values, START, rtol=0, atol=0)
        client.close()


def test_errors_of_a_server_reach_the_client() -> None:
    with servers() as (_, addresses):
        client = ShardsClient(0, COUNT, SHARES, addresses, "secret", timeout_s=5)
        now = client.pull()
        with pytest.raises(WorldError, match="the shard server failed: KeyError: 'lr'"):
            client.push(torch.zeros(COUNT, dtype=torch.float64), B, B, [{}], now.versions)
        client.close()
