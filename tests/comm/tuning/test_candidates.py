"""No candidate is measured which cannot carry the tensor, and every one that is measured gives the exact result."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.ranks import in_groups
from support.remote_windows import FakeRemoteWindows

from mimatrix.collectives import AlgorithmRequest, Collective, Schedule, Shares, build, verify
from mimatrix.collectives.compose import group_by_owner
from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.comm.c10d import is_native
from mimatrix.comm.calls import DTYPES, REDUCE_OPS, SHARDED, CollectiveOp
from mimatrix.comm.memory.base import WindowKind
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.comm.tuning.choice import C10D, LISTS, Carriers, Message, Transport, candidates
from mimatrix.comm.tuning.forecast import Forecast
from mimatrix.comm.tuning.tuner import SizeClass, Tuner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CARRIERS = st.builds(
    Carriers,
    windows=st.booleans(),
    mixed=st.booleans(),
    send_recv=st.booleans(),
    native=st.booleans(),
    native_lists=st.booleans(),
)
WEIGHTS = st.lists(st.one_of(st.integers(0, 5), st.just(1), st.just(100)), min_size=2, max_size=9).filter(any)
"""What each rank owns; some nothing, some far more than others."""


@settings(max_examples=200, deadline=None)
@given(collective=st.sampled_from(Collective), carriers=CARRIERS, weights=WEIGHTS, count=st.integers(0, 1 << 19))
def test_every_candidate_has_a_schedule_that_leaves_shards_in_the_order_of_ranks(
    collective: Collective, carriers: Carriers, weights: list[int], count: int
) -> None:
    shares = Shares.of(weights) if collective in SHARDED else Shares.equal(len(weights))
    counts = shares.cut(count)
    message = Message(
        collective=collective,
        bytes=4 * count,
        world_size=len(counts),
        is_uneven=collective in SHARDED and len(set(counts)) > 1,
        has_empty_shards=0 in counts,
    )
    for choice in candidates(message, carriers):
        assert_carried(choice, carriers, collective, counts)
        if choice.transport == "c10d":
            continue
        schedule = schedule_of(choice, collective, shares, count)
        verify(schedule)
        if collective in SHARDED:
            assert sum_by_owner(schedule, count) == counts
            assert list(schedule.owners) == sorted(schedule.owners)


def schedule_of(choice: AlgorithmChoice, collective: Collective, shares: Shares, count: int) -> Schedule:
    schedule = build(
        choice.algorithm, AlgorithmRequest(collective, len(shares), shares=shares, segments=choice.segments)
    )
    is_regrouped = choice.segments > 1 and collective in SHARDED
    return group_by_owner(schedule, shares.cut(count)) if is_regrouped else schedule


def sum_by_owner(schedule: Schedule, count: int) -> tuple[int, ...]:
    sums = [0] * schedule.ranks
    for owner, size in zip(schedule.owners, schedule.shares.cut(count), strict=True):
        sums[owner] += size
    return tuple(sums)


def assert_carried(choice: AlgorithmChoice, carriers: Carriers, collective: Collective, counts: Sequence[int]) -> None:
    """Fail if a choice cannot carry a message of which each rank owns `counts`."""
    if choice.transport != "c10d":
        assert {"windows": carriers.windows, "mixed": carriers.mixed}.get(choice.transport, carriers.send_recv)
        return
    assert carriers.native
    if choice == C10D:
        assert collective not in SHARDED or len(set(counts)) == 1
    else:
        assert collective in SHARDED
    if choice == LISTS:
        assert carriers.native_lists
        assert min(counts) > 0


@dataclass
class _Backend:
    waits: int = 0

    def max_over_ranks(self, figures: list[float]) -> list[float]:
        self.waits += 1
        return figures


@dataclass
class _Ranks:
    """What the tuner sees of ranks; it keeps what is measured instead of running it."""

    carriers_found: Carriers
    world_size: int
    rank: int = 1
    members: tuple[int, ...] = ()
    endpoint: Any = None
    forecast: Forecast | None = None
    cpu_backend: Any = field(default_factory=_Backend)
    transports: tuple[Transport, ...] = ("windows", "send_recv", "c10d")
    measured: list[tuple[CollectiveOp, int, AlgorithmChoice]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """How often the ranks had waited for each other when a measurement started."""

    def carriers(self, collective: Collective, device: str, dtype: torch.dtype) -> Carriers:
        return self.carriers_found

    def execute(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        self.measured.append((op, tensor.numel(), choice))
        self.waits.append(self.cpu_backend.waits)


@settings(max_examples=200, deadline=None)
@given(
    collective=st.sampled_from(Collective),
    dtype=st.sampled_from(DTYPES),
    carriers=CARRIERS.filter(lambda found: found.windows or found.send_recv),
    weights=WEIGHTS,
    count=st.one_of(st.integers(0, 300), st.integers(0, 1 << 19)),
)
@example(  # the small shard would be empty if as many bytes of float32 were measured
    collective=Collective.ALL_GATHER,
    dtype=torch.uint8,
    carriers=Carriers(windows=False, send_recv=True, native=True, native_lists=True),
    weights=[1, 100],
    count=200,
)
def test_tuner_measures_only_what_can_carry_the_tensor(
    collective: Collective, dtype: torch.dtype, carriers: Carriers, weights: list[int], count: int
) -> None:
    """What NCCL would be asked included, which there is none of here."""
    shares, ranks = Shares.of(weights), _Ranks(carriers, len(weights))
    tensor = torch.empty(count, dtype=dtype, device="meta")
    key = SizeClass.of(collective, tensor, "host", "cpu", carriers, is_placed=False, counts=shares.cut(count))
    tuner = Tuner(ranks, {}, Path("/nowhere"), "")
    choice = tuner.choose(key, shares)
    assert_carried(choice, carriers, collective, shares.cut(count))
    for op, length, measured in ranks.measured:
        assert_carried(measured, carriers, collective, (op.shares or Shares.equal(len(weights))).cut(length))
    assert bool(ranks.measured) == (len(tuner.candidates(key)) > 1)


def test_ranks_start_every_measurement_together() -> None:
    """Otherwise a rank that owns little waits for those that own much, and the next candidate is blamed for it."""
    carriers, shares = Carriers(windows=True, send_recv=True, native=True), Shares.of([6, 3, 1])
    ranks, tensor = _Ranks(carriers, 3), torch.empty(1000)
    key = SizeClass.of(
        Collective.REDUCE_SCATTER, tensor, "host", "cpu", carriers, is_placed=False, counts=shares.cut(1000)
    )
    Tuner(ranks, {}, Path("/nowhere"), "").choose(key, shares)
    assert len(set(ranks.waits)) == len(ranks.measured) > 1


Kinds = Callable[[], dict[str, WindowKind]]
HOSTS = {"one host": "aaa", "two hosts": "aab", "three hosts": "abc", "hosts with windows": "aab"}


def window_kinds(*, remote: bool) -> Kinds:
    kinds: dict[str, WindowKind] = {"host": InProcessWindows()}
    if remote:
        kinds["remote"] = FakeRemoteWindows()
    return lambda: kinds


@dataclass(frozen=True)
class Call:
    """A random call, the same on all ranks."""

    op: CollectiveOp
    count: int
    in_arena: bool

    @classmethod
    def draw(cls, random_of: random.Random, world_size: int) -> "Call":
        collective = random_of.choice(list(Collective))
        weights = [random_of.choice([0, 0, 1, 1, 2, 7]) for _ in range(world_size)]
        has_shares = collective in SHARDED and any(weights) and random_of.random() < 0.7
        op = CollectiveOp(
            collective,
            random_of.choice(DTYPES),
            random_of.choice(REDUCE_OPS),
            Shares.of(weights) if has_shares else None,
            random_of.randrange(world_size) if collective is Collective.BROADCAST else 0,
        )
        count = random_of.choice([0, 1, 2, 3, 9, 100, 4097, 150_000, (1 << 20) + 5])
        return cls(op, count, in_arena=random_of.random() < 0.5)

    def given(self, rank: int) -> torch.Tensor:
        """Return what a rank contributes: small whole numbers, so that sums are exact in every type."""
        return ((torch.arange(self.count) * 7 + rank * 3) % 5).to(self.op.dtype)

    def expected(self, world_size: int) -> torch.Tensor:
        every = torch.stack([self.given(rank) for rank in range(world_size)])
        if self.op.collective is Collective.BROADCAST:
            return every[self.op.root]
        if self.op.collective is Collective.ALL_GATHER:
            return every[self.owners(world_size), torch.arange(self.count)]
        precise = every.double()
        match self.op.reduce_op:
            case "sum":
                total = precise.sum(0)
            case "avg":
                total = precise.mean(0)
            case "max":
                total = precise.amax(0)
            case _:
                total = precise.amin(0)
        return total.to(self.op.dtype)

    def owners(self, world_size: int) -> torch.Tensor:
        counts = (self.op.shares or Shares.equal(world_size)).cut(self.count)
        return torch.repeat_interleave(torch.arange(world_size), torch.tensor(counts))

    def check(self, group: Group, choice: AlgorithmChoice | None) -> None:
        """Run the call by a choice, or as it is tuned, and compare its result."""
        kinds = group.window_kinds
        tensor = (
            group.empty(self.count, self.op.dtype, kinds[0])
            if self.in_arena and kinds
            else torch.empty(self.count, dtype=self.op.dtype)
        )
        tensor.copy_(self.given(group.rank))
        group.start(self.op, tensor, choice, may_run_here=True).wait()
        own = slice(None)
        if self.op.collective is Collective.REDUCE_SCATTER:
            part = group.part(self.count, self.op.shares)
            own = slice(part.start, part.stop)
        is_same = torch.equal(tensor[own], self.expected(group.world_size)[own])
        assert is_same, f"{self} by {choice or 'what was tuned'} on rank {group.rank} is wrong"
        group.free(tensor)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "layout",
    [
        "one host",
        "two hosts",
        pytest.param("three hosts", marks=pytest.mark.long),
        pytest.param("hosts with windows", marks=pytest.mark.long),
    ],
)
def test_every_candidate_of_random_calls_gives_the_exact_result(
    layout: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    hosts = list(HOSTS[layout])

    def each(group: Group) -> set[str]:
        assert group.tuner
        random_of, names = random.Random(seed), set[str]()
        for _ in range(24):
            call = Call.draw(random_of, group.world_size)
            place = group.window_kinds[0] if call.in_arena and group.window_kinds else ""
            tensor = (
                group.empty(call.count, call.op.dtype, place) if place else torch.empty(call.count, dtype=call.op.dtype)
            )
            found = group.tuner.candidates(group.size_class(call.op, tensor))
            group.free(tensor)
            assert found
            for choice in found.values():
                assert choice.transport != "c10d" or is_native(call.op.collective, call.op.dtype)
                call.check(group, choice)
            call.check(group, None)
            names |= found.keys()
        return names

    kinds = window_kinds(remote=layout == "hosts with windows")
    first, *others = in_groups(len(hosts), each, hosts=hosts, kinds=kinds, with_gloo=True, tune=True)
    assert all(names == first for names in others)
    assert len(first) > 1, "hardly anything was tried"
    assert any(name.startswith("mixed") for name in first) == (HOSTS[layout] == "aab")
