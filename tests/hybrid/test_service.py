"""Groups push to shards over real sockets: exact, whoever is lost."""

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
def services(*, mirrored: bool = True) -> Iterator[tuple[list[ShardServer], list[list[Address]]]]:
    """Three of them; shard k lies with service k, and again with the next one."""
    parts = torch.split(START, list(SHARES.cut(COUNT)))
    made = [
        ShardServer.open(
            {number: _shard(parts[number]) for number in (k, (k - 1) % 3)},
            "secret",
            timeout_s=5,
            make_shard=_copied,
        )
        for k in range(3)
    ]
    if mirrored:
        replicate_in_ring(made)
    places = [[made[(k + n) % 3].address for n in range(3)] for k in range(3)]
    try:
        yield made, places
    finally:
        for service in made:
            service.close()


def _shard(values: torch.Tensor) -> Shard:
    return Shard(
        values, OptimizerSpec(torch.optim.AdamW, (ADAM,), (ParamSpan(0, 0, len(values)),)), PushScaling(reference=B)
    )


def _copied(_: int, kept: ShardState) -> Shard:
    found = _shard(kept.values)
    found.load(kept)
    return found


def stepped(link: ShardsClient, step: int) -> float:
    now = link.pull()
    return link.push(gradient(now.values, step), B, B, [ADAM], now.versions).staleness


def gradient(at: torch.Tensor, step: int) -> torch.Tensor:
    return at * 0.5 + torch.cos(torch.arange(COUNT, dtype=torch.float64) + step)


def alone(steps: int) -> torch.Tensor:
    value = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.AdamW([value], **ADAM)  # type: ignore[arg-type]
    for step in range(steps):
        value.grad = gradient(value.detach(), step)
        optimizer.step()
    return value.detach()


def trained(link: ShardsClient, steps: range) -> None:
    for step in steps:
        stepped(link, step)


def test_one_group_alone_is_the_optimizer_itself(caplog: pytest.LogCaptureFixture) -> None:
    with services() as (_, places):
        link = ShardsClient(0, COUNT, SHARES, places, "secret")
        trained(link, range(20))
        assert (link.pull().values - alone(20)).abs().max() < 1e-12
        assert link.pull().versions == (20, 20, 20)
        assert link.pull().samples == 20 * B
        link.close()
    assert messages(caplog) == []


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_service_is_replaced_by_mirrors_without_a_trace(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    with services() as (made, places):
        link = ShardsClient(0, COUNT, SHARES, places, "secret", timeout_s=5)
        trained(link, range(7))
        made[lost].close()
        trained(link, range(7, 20))
        assert (link.pull().values - alone(20)).abs().max() < 1e-12
        link.close()
    before, last = (lost - 1) % 3, (lost + 2) % 3
    assert sorted(each.partition(" (")[0].partition(", at")[0] for each in messages(caplog)) == sorted(
        [
            f"shard {before} has lost its replica",
            f"shard {before} has a replica again",
            f"shard {lost} has a replica again",
        ]
    )
    assert str(made[last].address.port) in next(
        each for each in messages(caplog) if each.startswith(f"shard {lost} has")
    )


@pytest.mark.parametrize("first", range(3))
def test_shards_that_lost_their_mirror_get_another(first: int) -> None:
    """So the next loss costs nothing either; and one service alone has all."""
    with services() as (made, places):
        links = [ShardsClient(group, COUNT, SHARES, places, "secret", timeout_s=5) for group in range(2)]
        trained(links[0], range(4))
        made[first].close()
        trained(links[0], range(4, 8))
        made[(first + 1) % 3].close()
        trained(links[0], range(8, 12))
        # One that slept through all of it, and knows only where shards once were.
        trained(links[1], range(12, 16))
        assert (links[1].pull().values - alone(16)).abs().max() < 1e-12
        assert links[0].pull().versions == (16, 16, 16)
        for link in links:
            link.close()


def test_one_that_comes_later_gets_what_lies_once() -> None:
    with services() as (made, places):
        link = ShardsClient(0, COUNT, SHARES, places, "secret", timeout_s=5)
        trained(link, range(4))
        made[1].close()
        trained(link, range(4, 6))
        made[2].close()
        trained(link, range(6, 8))
        late = ShardServer.open({}, "secret", timeout_s=5, make_shard=_copied)
        known = made[0].replicas.add_peer(late.address)
        late.replicas.set_peers(known, 3)
        trained(link, range(8, 12))
        made[0].close()
        trained(link, range(12, 20))
        assert (link.pull().values - alone(20)).abs().max() < 1e-12
        link.close()
        late.close()


def test_a_mirror_that_was_given_up_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    """It has what there was then: whoever has seen more since goes on to the next."""
    with services() as (made, places):
        link = ShardsClient(0, COUNT, SHARES, places, "secret", timeout_s=5)
        trained(link, range(4))
        made[0].replicas.drop(0, OSError("it is silent"))
        trained(link, range(4, 8))
        assert "shard 0 has a replica again" in messages(caplog)[-1]
        behind = ShardsClient(1, COUNT, SHARES, places, "secret", timeout_s=5)
        assert behind.pull().versions == (8, 8, 8)
        # It has not heard of another mirror, though.
        behind._clients[0]._addresses = list(places[0])
        made[0].close()
        trained(behind, range(8, 12))
        assert (behind.pull().values - alone(12)).abs().max() < 1e-12
        link.close()
        behind.close()


def test_whoever_was_replaced_and_still_lives_sends_everybody_on(caplog: pytest.LogCaptureFixture) -> None:
    """One group loses its way to a service, the others do not: all must end with the same shard."""
    with services() as (_, places):
        cut_off = [[places[0][1]], *places[1:]]
        lost, other = (
            ShardsClient(0, COUNT, SHARES, cut_off, "secret"),
            ShardsClient(1, COUNT, SHARES, places, "secret"),
        )
        trained(other, range(3))
        trained(lost, range(3, 6))
        trained(other, range(6, 9))
        trained(lost, range(9, 12))
        # The first step of `other` after that was late: it pulled before it heard of it.
        assert lost.pull().versions == other.pull().versions == (12, 12, 12)
        assert torch.equal(lost.pull().values, other.pull().values)
        lost.close()
        other.close()
    assert [each.partition(", at")[0] for each in messages(caplog)] == ["shard 0 has a replica again"]


def test_groups_count_each_other_and_never_wait() -> None:
    with services() as (_, places):
        links = [ShardsClient(group, COUNT, SHARES, places, "secret") for group in range(3)]
        nothing = torch.zeros(COUNT, dtype=torch.float64)
        late = [link.push(nothing, B, B, [ADAM], (0, 0, 0)).staleness for link in links]
        assert late == [0, 1, 2]

        def push(link: ShardsClient) -> None:
            for step in range(10):
                stepped(link, step)

        threads = [threading.Thread(target=push, args=(link,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [link.pull().versions for link in links] == [(33, 33, 33)] * 3
        assert torch.equal(links[0].pull().values, links[1].pull().values)
        for link in links:
            link.close()


def test_strangers_are_refused_and_nobody_there_is_said() -> None:
    with services() as (made, places):
        with pytest.raises(WorldError, match="belongs to another run"):
            ShardsClient(0, COUNT, SHARES, places, "guess").pull()
        for service in made:
            service.close()
        with pytest.raises(WorldError, match="shard 0 does not answer"):
            ShardsClient(0, COUNT, SHARES, places, "secret", timeout_s=1).pull()


def test_a_shard_that_is_silent_has_a_mirror() -> None:
    """Whoever listens and never answers has its time, and the mirror its own."""
    with services(mirrored=False) as (_, places), socket.create_server(("127.0.0.1", 0)) as silent:
        there = Address(*silent.getsockname())
        link = ShardsClient(0, COUNT, SHARES, [[there, places[k][1]] for k in range(3)], "secret", timeout_s=0.5)
        torch.testing.assert_close(link.pull().values, START, rtol=0, atol=0)
        link.close()


def test_what_a_service_fails_with_is_told_once() -> None:
    with services() as (_, places):
        link = ShardsClient(0, COUNT, SHARES, places, "secret", timeout_s=5)
        now = link.pull()
        with pytest.raises(WorldError, match="the shard server failed: KeyError: 'lr'"):
            link.push(torch.zeros(COUNT, dtype=torch.float64), B, B, [{}], now.versions)
        link.close()
