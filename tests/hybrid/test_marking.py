"""Shards held for a moment: whoever looks sees the same pushes in all, and nobody who dies holds the others up."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.hybrid_groups import make_push, replicate_in_ring

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.checkpoint import GlobalState
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.shard_client import ShardClient
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.hold import latest_pushes, resolve_join
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.server.state import ShardState

COUNT, SHARES = 60, Shares((0.5, 0.2, 0.3))
SIZES = list(SHARES.cut(COUNT))
SGD = {"lr": 1.0}
ONE = -torch.ones(COUNT, dtype=torch.float64)
"""A push that adds 1 to every element."""


@contextmanager
def services(timeout_s: float = 6.0) -> Iterator[tuple[list[ShardServer], list[list[Address]]]]:
    """Three; shard k lies with service k, and again with the next one."""
    made = [
        ShardServer.open({n: _shard(n) for n in (k, (k - 1) % 3)}, "secret", timeout_s=timeout_s, make_shard=_copied)
        for k in range(3)
    ]
    replicate_in_ring(made)
    try:
        yield made, [[made[k].address, made[(k + 1) % 3].address] for k in range(3)]
    finally:
        for service in made:
            service.close()


def _shard(number: int) -> Shard:
    size = SIZES[number]
    stepping = OptimizerSpec(torch.optim.SGD, (SGD,), (ParamSpan(0, 0, size),))
    return Shard(torch.zeros(size, dtype=torch.float64), stepping, PushScaling.unscaled(1))


def _copied(number: int, kept: ShardState) -> Shard:
    found = _shard(number)
    found.load(kept)
    return found


def linked(group: int, places: list[list[Address]]) -> ShardsClient:
    return ShardsClient(group, COUNT, SHARES, places, "secret", timeout_s=6)


def pushed(link: ShardsClient) -> None:
    link.push(ONE, 1, 1, [SGD], link.pull().versions)


def copied(link: ShardsClient) -> list[ShardState]:
    with link.hold() as held:
        held.copy()
    return held.fetch()


def same(kept: list[ShardState]) -> float:
    """All elements of all shards are the number of pushes that came in."""
    assert kept[0].log.pushes == kept[1].log.pushes == kept[2].log.pushes
    values: set[float] = set(torch.cat([each.values for each in kept]).tolist())
    assert values == {kept[0].log.version} == {sum(kept[0].log.pushes.values())}
    return values.pop()


def test_what_is_seen_has_the_same_pushes_in_all_shards() -> None:
    with services() as (_, places):
        stops, counts = threading.Event(), [0] * 4

        def hammer(group: int) -> None:
            link = linked(group, places)
            while not stops.is_set():
                pushed(link)
                counts[group] += 1
            link.close()

        threads = [threading.Thread(target=hammer, args=(group,)) for group in range(4)]
        for thread in threads:
            thread.start()
        seen: list[float] = []

        def look() -> None:
            link = linked(9, places)
            seen.extend(same(copied(link)) for _ in range(15))
            link.close()

        lookers = [threading.Thread(target=look) for _ in range(2)]
        for looker in lookers:
            looker.start()
        for looker in lookers:
            looker.join(60)
        stops.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        last = linked(9, places)
        assert same(copied(last)) == sum(counts) >= max(seen)
        last.close()
    assert len(seen) == 30
    assert min(seen) < max(seen)


def test_whoever_dies_or_sleeps_while_it_holds_is_not_waited_for() -> None:
    with services() as (_, places):
        link, other = linked(0, places), linked(1, places)
        pushed(link)
        began = time.monotonic()
        held = other.hold()
        held.close()
        pushed(link)
        assert time.monotonic() - began < 1
        asleep = other.hold(1.0)
        pushed(link)
        assert 0.9 < time.monotonic() - began < 3
        with pytest.raises(WorldError, match="hold on a shard expired"):
            asleep.copy()
        asleep.close()
        assert same(copied(other)) == 3
        link.close()
        other.close()


def half_pushed(group: int, places: list[list[Address]]) -> ShardClient:
    """A group that has come to the first shard only."""
    line = ShardClient(group, 0, places[0], "secret", 6)
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


def test_a_push_that_came_to_some_shards_only() -> None:
    """Its group is there: it is waited for, and the others go on. It has died: what it owes is given up."""
    with services() as (_, places):
        link, half = linked(0, places), half_pushed(1, places)
        began = time.monotonic()
        with pytest.raises(WorldError, match="push 1 of group 1 reached only some shards"):
            copied(link)
        pushed(link)
        assert time.monotonic() - began < 3
        half.close()
        kept = copied(link)
        assert [each.log.pushes for each in kept] == [{0: 1, 1: 1}] * 3
        assert [each.log.version for each in kept] == [2, 1, 1]
        pushed(link)
        link.close()


def test_a_service_that_dies_while_it_is_held() -> None:
    with services() as (made, places):
        link, other = linked(0, places), linked(1, places)
        pushed(link)
        with other.hold() as held:
            made[1].close()
            with pytest.raises(WorldError, match="the shard moved to its replica"):
                held.copy()
        assert same(copied(other)) == 1
        pushed(link)
        assert same(copied(other)) == 2
        link.close()
        other.close()


def test_a_group_that_comes_again_goes_on_and_the_one_before_is_refused() -> None:
    with services() as (made, places):
        first = linked(1, places)
        first.join()
        for _ in range(3):
            pushed(first)
        half = ShardClient(None, 0, places[0], "secret", 6)
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
        again = linked(1, places)
        again.join()
        pushed(again)
        assert again.pull().versions == (5, 4, 4)
        with pytest.raises(WorldError, match="push of group 1 is refused"):
            pushed(first)
        made[0].close()
        pushed(again)
        assert again.pull().versions == (6, 5, 5)
        half.close()
        first.close()
        again.close()


def test_who_returns_is_not_behind() -> None:
    ledgers = [
        PushLog(9, 9, {0: 7, 1: 2}, incarnations={0: 1, 1: 1}),
        PushLog(8, 8, {0: 6, 1: 2}, incarnations={0: 1, 1: 1}),
    ]
    assert latest_pushes(ledgers) == {0: 7, 1: 2}
    assert resolve_join(1, ledgers, {0}) == (7, 2)
    assert resolve_join(2, ledgers, {0, 1}) == (0, 1)
    assert resolve_join(1, ledgers, set()) == (2, 2)


def test_momentum_keeps_its_size_in_shards_of_other_sizes() -> None:
    """Two shards whose last pushes counted differently become three, and then go on as they would have."""
    rules = PushScaling(reference=4, staleness_exponent=1.0)
    pieces = (ParamSpan(0, 0, 5), ParamSpan(1, 0, 3))
    sgd = {"lr": 0.1, "momentum": 0.9}
    parts = ((ParamSpan(0, 0, 4),), (ParamSpan(0, 0, 1), ParamSpan(1, 0, 3)))
    shards = [
        Shard(torch.ones(4, dtype=torch.float64), OptimizerSpec(torch.optim.SGD, (sgd,), part), rules) for part in parts
    ]
    for number, shard in enumerate(shards):
        shard.push(make_push(0, 1, 4, 0), torch.ones(4, dtype=torch.float64))
        shard.push(make_push(1, 1, 4, number), torch.arange(4, dtype=torch.float64))
    whole = GlobalState.merge([shard.save() for shard in shards], pieces)
    assert [factor for _, factor in whole.factors] == [0.5, 1.0]
    sizes = (3, 3, 2)
    cuts = ((ParamSpan(0, 0, 3),), (ParamSpan(0, 0, 2), ParamSpan(1, 0, 1)), (ParamSpan(1, 0, 2),))
    others = [
        Shard(torch.zeros(size, dtype=torch.float64), OptimizerSpec(torch.optim.SGD, (sgd,), part), rules)
        for size, part in zip(sizes, cuts, strict=True)
    ]
    for shard, kept in zip(others, whole.split(pieces, sizes, rules, "here"), strict=True):
        shard.load(kept)
    for shard in (*shards, *others):
        now = shard.pull()
        number = shard.log.pushes.get(0, 0) + 1
        shard.push(make_push(0, number, 4, now.version), now.values * 2)
    one, other = (torch.cat([shard.pull().values for shard in found]) for found in (shards, others))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
