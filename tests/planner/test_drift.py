"""Batches follow speeds: invented ranks whose speeds change, step by step."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.collectives.shares import Shares
from mimatrix.planner.drift import Change, Drift, Keep, estimate_drift
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.planner import make_plan

BATCH = 240


def profile(speed: float, sample_s: float = 0.001) -> Profile:
    """Return a profile of some overhead, then a straight line."""
    seconds = Curve.of((size, sample_s * (2 + size) / speed) for size in (1, 8, 64, BATCH))
    return Profile("cpu", "m", seconds, Curve.of([(1, 1.0), (BATCH, 1.0)]), 10**9, 0.001 / speed)


def problem(speeds: Sequence[float], sample_s: float = 0.001) -> Problem:
    free = Communication((0.001,) * 4)
    size = ModelSize("m", "m", 10, 40, 40, 80, 40)
    names = tuple(f"rank {rank}" for rank in range(len(speeds)))
    return Problem(
        global_batch=BATCH,
        model=size,
        profiles=tuple(profile(speed, sample_s) for speed in speeds),
        names=names,
        communication=FixedCommunication(free),
        stages=(0,),
    )


def busy(split: Split, speeds: Sequence[float], noise: Callable[[], float]) -> list[float]:
    return [
        sum(profile(speed).seconds.at(size) for size in sizes) * (1 + noise())
        for sizes, speed in zip(split.micro, speeds, strict=True)
    ]


class SimulatedWorld:
    """Steps whose ranks have the speeds of the moment."""

    def __init__(self, drift: Drift, noise: float = 0.0) -> None:
        chance = random.Random(1)
        self.drift, self.changes = drift, list[Change]()
        self._noise = lambda: chance.uniform(-noise, noise)

    def step(self, speeds: Sequence[float]) -> None:
        """Take one step; a change holds at once."""
        split = self.drift.plan.split
        self.drift.observe(split, busy(split, speeds, self._noise))
        found = self.drift.decide()
        if isinstance(found, Change):
            self.changes.append(found)
            self.drift.changed(found.plan)

    def steps_for(self, seconds: float, speeds: Sequence[float]) -> None:
        """Take steps until the slowest rank was busy for `seconds`."""
        while seconds > 0:
            seconds -= self.longest(speeds)
            self.step(speeds)

    def longest(self, speeds: Sequence[float]) -> float:
        return max(busy(self.drift.plan.split, speeds, lambda: 0.0))


def followed(speeds: Sequence[float]) -> SimulatedWorld:
    asked = problem(speeds)
    return SimulatedWorld(Drift(asked, make_plan(asked)))


def optimum(speeds: Sequence[float]) -> float:
    return max(busy(make_plan(problem(speeds)).split, speeds, lambda: 0.0))


def test_nothing_changes_while_nothing_changes() -> None:
    asked = problem((1.0, 0.5, 0.25))
    world = SimulatedWorld(Drift(asked, make_plan(asked)), noise=0.04)
    for _ in range(300):
        world.step((1.0, 0.5, 0.25))
    assert not world.changes


def test_speeds_that_jump_about_are_not_run_after() -> None:
    """On a crowded machine each rank is slower now and then, for a few steps: a plan for that comes too late."""
    asked, chance = problem((1.0, 1.0, 0.5)), random.Random(3)
    world = SimulatedWorld(Drift(asked, make_plan(asked)), noise=0.05)
    for _ in range(100):
        speeds = [speed * chance.uniform(0.7, 1.0) for speed in (1.0, 1.0, 0.5)]
        for _ in range(4):
            world.step(speeds)
    assert len(world.changes) <= 4
    for _ in range(10):
        world.step((1.0, 0.3, 0.5))  # a drop that lasts is followed all the same
    assert world.longest((1.0, 0.3, 0.5)) < 1.15 * optimum((1.0, 0.3, 0.5))


def test_one_slow_step_changes_nothing() -> None:
    world = followed((1.0, 1.0))
    for step in range(40):
        world.step((1.0, 0.1 if step == 20 else 1.0))
    assert not world.changes


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize(("before", "after"), [((1.0, 0.5), (0.3, 0.5)), ((1.0, 1.0, 0.25), (1.0, 0.3, 0.25))])
def test_a_drop_is_followed_within_a_few_steps(
    before: tuple[float, ...], after: tuple[float, ...], noise: float
) -> None:
    asked = problem(before)
    world = SimulatedWorld(Drift(asked, make_plan(asked)), noise)
    for _ in range(10):
        world.step(before)
    for _ in range(10):
        world.step(after)
    assert world.changes
    assert world.longest(after) < 1.06 * optimum(after)
    assert sum(world.drift.plan.split.batches) == BATCH
    for _ in range(100):
        world.step(after)
    assert len(world.changes) <= 3


def test_a_rank_that_recovers_gets_its_samples_back() -> None:
    world = followed((1.0, 1.0))
    for _ in range(10):
        world.step((1.0, 0.3))
    assert world.drift.plan.split.batches[1] < 70
    for _ in range(10):
        world.step((1.0, 1.0))
    assert world.longest((1.0, 1.0)) < 1.06 * optimum((1.0, 1.0))


def test_a_slow_rank_keeps_a_sample_while_that_does_not_double_the_step() -> None:
    world = followed((1.0, 1.0))
    for _ in range(10):
        world.step((1.0, 0.01))
    assert world.drift.plan.split.batches == (BATCH - 1, 1)


def test_a_rank_without_samples_is_tried_again() -> None:
    world = followed((1.0, 1.0))
    for _ in range(10):
        world.step((1.0, 0.001))
    assert world.drift.plan.split.batches[1] == 0
    for _ in range(800):
        world.step((1.0, 1.0))
    assert world.longest((1.0, 1.0)) < 1.06 * optimum((1.0, 1.0))


def test_a_change_says_why_and_has_the_next_version() -> None:
    world = followed((1.0, 1.0))
    for _ in range(10):
        world.step((1.0, 0.5))
    assert [change.plan.version for change in world.changes] == list(range(1, len(world.changes) + 1))
    assert "rank 1 takes 2.0" in world.changes[0].reason


def test_what_does_not_pay_before_the_end_is_left() -> None:
    world = followed((1.0, 1.0))
    split = world.drift.plan.split
    for _ in range(40):
        world.drift.observe(split, busy(split, (1.0, 0.9), lambda: 0.0))
    kept = world.drift.decide(steps_left=2)
    assert isinstance(kept, Keep)
    assert "would gain" in kept.reason


def test_learning_needs_no_measurements() -> None:
    split = Split.of((BATCH // 2, BATCH // 2))
    drift = estimate_drift(busy(split, (1.0, 0.25), lambda: 0.0), split, (120, 120), 0, Shares.equal(2))
    world = SimulatedWorld(drift)
    for _ in range(20):
        world.step((1.0, 0.25))
    assert world.longest((1.0, 0.25)) < 1.06 * optimum((1.0, 0.25))
    assert max(size for sizes in drift.plan.split.micro for size in sizes) <= 120


@pytest.mark.parametrize("batch", [7, 16, 24])
def test_a_drop_long_after_the_start_is_followed_at_once(batch: int) -> None:
    """Small batches never finish at exactly the same moment, so there is something to look for in vain at all times."""
    asked = replace(problem((1.0, 0.7)), global_batch=batch)
    world = SimulatedWorld(Drift(asked, make_plan(asked)))
    world.steps_for(60.0, (1.0, 0.7))
    before = len(world.changes)
    world.steps_for(1.5, (0.3, 0.7))
    assert len(world.changes) > before


class NoisyWorld:
    """Ranks that need the same time for the same batch, but for noise; a change holds at once."""

    def __init__(self, step_s: float, ranks: int = 2, *, is_measured: bool = True) -> None:
        sample_s = step_s / (BATCH // ranks + 2)
        self._problem = problem((1.0,) * ranks, sample_s)
        even = Split.of((BATCH // ranks,) * ranks)
        self.drift = (
            Drift(self._problem, make_plan(self._problem))
            if is_measured
            else estimate_drift((step_s,) * ranks, even, (BATCH // ranks,) * ranks, 0, Shares.equal(ranks))
        )
        self.splits = list[Split]()
        self.seconds = 0.0

    def step(self, factors: Sequence[float]) -> None:
        """Take a step whose ranks take `factors` times as long as they should."""
        split = self.drift.plan.split
        profiles = self._problem.profiles
        busy_s = [
            factor * sum(profile.seconds.at(size) for size in sizes)
            for factor, profile, sizes in zip(factors, profiles, split.micro, strict=True)
        ]
        self.seconds += max(busy_s)
        self.drift.observe(split, busy_s)
        found = self.drift.decide()
        if isinstance(found, Change):
            self.splits.append(found.plan.split)
            self.drift.changed(found.plan)

    def steps_for(self, seconds: float, factors: Sequence[float]) -> None:
        """Take steps until ranks were busy for `seconds` more."""
        end_s = self.seconds + seconds
        while self.seconds < end_s:
            self.step(factors)

    def until_change(self, factors: Sequence[float], most_s: float = 100.0) -> float:
        """Take steps until the split changes; return how long that took."""
        began_s, before = self.seconds, len(self.splits)
        while len(self.splits) == before and self.seconds < began_s + most_s:
            self.step(factors)
        return self.seconds - began_s


def heavy_tail(chance: random.Random) -> float:
    """Return a factor as on a busy host: log-normal, and now and then ten times as long."""
    return chance.lognormvariate(0.0, 0.4) * (10.0 if chance.random() < 0.03 else 1.0)


@pytest.mark.parametrize("is_measured", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_short_steps_of_alike_ranks_stay_even_on_a_noisy_host(is_measured: bool, seed: int) -> None:
    world, chance = NoisyWorld(0.005, is_measured=is_measured), random.Random(seed)
    for _ in range(2000):
        world.step((heavy_tail(chance), heavy_tail(chance)))
    assert len(world.splits) <= 2
    assert all(0.4 * BATCH <= batch <= 0.6 * BATCH for split in world.splits for batch in split.batches)


@pytest.mark.parametrize(("step_s", "noise"), [(0.005, 0.2), (0.1, 0.1)])
@pytest.mark.parametrize("factor", [2.0, 0.5])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_a_rank_of_twice_or_half_the_speed_is_followed_within_seconds(
    step_s: float, noise: float, factor: float, seed: int
) -> None:
    """However long nothing happened before: of the 3.5 s here, two are evidence, and noise may delay that."""
    world, chance = NoisyWorld(step_s), random.Random(seed)
    while world.seconds < 10.0:
        world.step((chance.lognormvariate(0.0, noise), chance.lognormvariate(0.0, noise)))
    assert not world.splits
    while world.seconds < 13.5:
        world.step((chance.lognormvariate(0.0, noise), factor * chance.lognormvariate(0.0, noise)))
    wanted, even = BATCH / (1 + factor), BATCH / 2
    assert abs(world.drift.plan.split.batches[1] - wanted) < abs(even - wanted) / 2


def test_nothing_moves_before_a_second_of_evidence() -> None:
    assert 1.0 <= NoisyWorld(0.005).until_change((1.0, 4.0)) < 1.2


def test_to_and_fro_is_followed_ever_more_slowly() -> None:
    """One rank is slow for two seconds, then the other, for ten minutes: each reversal doubles the evidence."""
    world = NoisyWorld(0.01)
    while world.seconds < 600.0:
        is_first = int(world.seconds / 2) % 2 == 0
        world.step((3.0, 1.0) if is_first else (1.0, 3.0))
    assert 2 <= len(world.splits) <= 20
    first, second = world.drift.plan.split.batches
    lasting = (3.0, 1.0) if first > second else (1.0, 3.0)
    assert world.until_change(lasting) < 40.0


def test_reversals_are_forgotten_in_calm_times() -> None:
    world = NoisyWorld(0.01)
    for factors in ((1.0, 3.0), (1.0, 1.0)) * 4:
        world.until_change(factors)
    for calm_s, least_s, most_s in ((0.0, 8.0, 40.0), (900.0, 0.5, 1.5)):
        world.steps_for(calm_s, (1.0, 1.0))
        assert least_s < world.until_change((1.0, 3.0)) < most_s
        world.until_change((1.0, 1.0))


def test_a_first_change_without_measurements_names_no_plan_that_was_wrong() -> None:
    world = NoisyWorld(0.1, is_measured=False)
    for _ in range(20):
        split = world.drift.plan.split
        world.drift.observe(split, [0.1, 0.3])
        found = world.drift.decide()
        if isinstance(found, Change):
            assert found.reason.startswith("by what ranks have taken so far a step would take")
            return
    pytest.fail("three times as slow a rank was not followed in six seconds")
