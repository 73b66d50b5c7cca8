"""Consistent cuts: all shards have the same pushes, and a client that dies blocks no group for long."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.hybrid_groups import replicate_in_ring

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.shard_client import ShardClient
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.server.state import ShardState

COUNT, SHARES = 60, Shares((0.5, 0.2, 0.3))
SIZES = list(SHARES.cut(COUNT))
SGD = {"lr": 1.0}
ONE = -torch.ones(COUNT, dtype=torch.float64)
"""A push that adds 1 to every element."""


@contextmanager
def servers(timeout_s: float = 6.0) -> Iterator[tuple[list[ShardServer], list[list[Address]]]]:
    """Three servers; server k has shard k, and the next one has its replica."""
    running = [
        ShardServer.open(
            {n: _shard(n) for n in (k, (k - 1) % 3)}, "secret", timeout_s=timeout_s, make_shard=_make_replica
        )
        for k in range(3)
    ]
    replicate_in_ring(running)
    try:
        yield running, [[running[k].address, running[(k + 1) % 3].address] for k in range(3)]
    finally:
        for server in running:
            server.close()


def _shard(number: int) -> Shard:
    size = SIZES[number]
    stepping = OptimizerSpec(torch.optim.SGD, (SGD,), (ParamSpan(0, 0, size),))
    return Shard(torch.zeros(size, dtype=torch.float64), stepping, PushScaling.unscaled(1))


def _make_replica(number: int, state: ShardState) -> Shard:
    found = _shard(number)
    found.load(state)
    return found


def make_client(group: int, addresses: list[list[Address]]) -> ShardsClient:
    return ShardsClient(group, COUNT, SHARES, addresses, "secret", timeout_s=6)


def push_one(client: ShardsClient) -> None:
    client.push(ONE, 1, 1, [SGD], client.pull().versions)


def copy_all(client: ShardsClient) -> list[ShardState]:
    with client.hold() as held:
        held.copy()
    return held.fetch()


def same(state: list[ShardState]) -> float:
    """All elements of all shards are the number of pushes that came in."""
    assert state[0].log.pushes == state[1].log.pushes == state[2].log.pushes
    values: set[float] = set(torch.cat([each.values for each in state]).tolist())
    assert values == {state[0].log.version} == {sum(state[0].log.pushes.values())}
    return values.pop()


def test_copies_of_all_shards_have_the_same_pushes() -> None:
    with servers() as (_, addresses):
        stops, counts = threading.Event(), [0] * 4

        def hammer(group: int) -> None:
            client = make_client(group, addresses)
            while not stops.is_set():
                push_one(client)
                counts[group] += 1
            client.close()

        threads = [threading.Thread(target=hammer, args=(group,)) for group in range(4)]
        for thread in threads:
            thread.start()
        seen: list[float] = []

        def look() -> None:
            client = make_client(9, addresses)
            seen.extend(same(copy_all(client)) for _ in range(15))
            client.close()

        lookers = [threading.Thread(target=look) for _ in range(2)]
        for looker in lookers:
            looker.start()
        for looker in lookers:
            looker.join(60)
        stops.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        last = make_client(9, addresses)
        assert same(copy_all(last)) == sum(counts) >= max(seen)
        last.close()
    assert len(seen) == 30
    assert min(seen) < max(seen)


def test_holds_end_with_their_client_or_expire() -> None:
    with servers() as (_, addresses):
        client, other = make_client(0, addresses), make_client(1, addresses)
        push_one(client)
        began = time.monotonic()
        held = other.hold()
        held.close()
        push_one(client)
        assert time.monotonic() - began < 1
        asleep = other.hold(1.0)
        push_one(client)
        assert 0.9 < time.monotonic() - began < 3
        with pytest.raises(WorldError, match="hold on a shard expired"):
            asleep.copy()
        asleep.close()
        assert same(copy_all(other)) == 3
        client.close()
        other.close()


def half_pushed(group: int, addresses: list[list[Address]]) -> ShardClient:
    """Return the client of a group whose push has reached the first shard only."""
    line = ShardClient(group, 0, addresses[0], "secret", 6)
    head = {
        "type": "push",
        "group": group,
        "number": 1,
        "incarnation": 0,
        "samples": 1,
        "nominal_samples": 1,
        "base_version": 0,
    }
    line.request(head | {"hyperparameters": [SGD], "without_grad": []}, ONE[: SIZES[0]])
    return line


def test_a_push_that_reached_only_some_shards_is_awaited_or_given_up() -> None:
    """Its group is there: it is waited for, and the others go on. It has died: what it owes is given up."""
    with servers() as (_, addresses):
        client, half = make_client(0, addresses), half_pushed(1, addresses)
        began = time.monotonic()
        with pytest.raises(WorldError, match="push 1 of group 1 reached only some shards"):
            copy_all(client)
        push_one(client)
        assert time.monotonic() - began < 3
        half.close()
        state = copy_all(client)
        assert [each.log.pushes for each in state] == [{0: 1, 1: 1}] * 3
        assert [each.log.version for each in state] == [2, 1, 1]
        push_one(client)
        client.close()


def test_a_server_lost_while_it_is_held() -> None:
    with servers() as (running, addresses):
        client, other = make_client(0, addresses), make_client(1, addresses)
        push_one(client)
        with other.hold() as held:
            running[1].close()
            with pytest.raises(WorldError, match="the shard moved to its replica"):
                held.copy()
        assert same(copy_all(other)) == 1
        push_one(client)
        assert same(copy_all(other)) == 2
        client.close()
        other.close()


def test_a_rejoined_group_continues_and_its_old_process_is_refused() -> None:
    with servers() as (running, addresses):
        first = make_client(1, addresses)
        first.join()
        for _ in range(3):
            push_one(first)
        half = ShardClient(None, 0, addresses[0], "secret", 6)
        head = {
            "type": "push",
            "group": 1,
            "number": 4,
            "incarnation": 1,
            "samples": 1,
            "nominal_samples": 1,
            "base_version": 3,
        }
        half.request(head | {"hyperparameters": [SGD], "without_grad": []}, ONE[: SIZES[0]])
        again = make_client(1, addresses)
        again.join()
        push_one(again)
        assert again.pull().versions == (5, 4, 4)
        with pytest.raises(WorldError, match="push of group 1 is refused"):
            push_one(first)
        running[0].close()
        push_one(again)
        assert again.pull().versions == (6, 5, 5)
        half.close()
        first.close()
        again.close()
