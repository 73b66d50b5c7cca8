"""Batches follow speeds: invented ranks whose speeds change, step by step."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mimatrix.collectives.shares import Shares
from mimatrix.planner.curve import Curve
from mimatrix.planner.drift import Change, Drift, Keep, learned
from mimatrix.planner.planning import Problem, make_plan
from mimatrix.planner.profile import Communication, ModelSize, Profile
from mimatrix.planner.split import Split

BATCH = 240


def profile(speed: float) -> Profile:
    """Some overhead, then a straight line."""
    seconds = Curve.of((size, (0.002 + 0.001 * size) / speed) for size in (1, 8, 64, BATCH))
    return Profile("cpu", "m", seconds, Curve.of([(1, 1.0), (BATCH, 1.0)]), 10**9, 0.001 / speed)


def problem(speeds: Sequence[float]) -> Problem:
    free = Communication((0.001,) * 4)
    size = ModelSize("m", "m", 10, 40, 40, 80, 40)
    names = tuple(f"rank {rank}" for rank in range(len(speeds)))
    return Problem(BATCH, size, tuple(map(profile, speeds)), names, lambda _: free, stages=(0,))


def busy(split: Split, speeds: Sequence[float], noise: Callable[[], float]) -> list[float]:
    return [
        sum(profile(speed).seconds.at(size) for size in sizes) * (1 + noise())
        for sizes, speed in zip(split.micro, speeds, strict=True)
    ]


class World:
    """Steps whose ranks have the speeds of the moment."""

    def __init__(self, drift: Drift, noise: float = 0.0) -> None:
        chance = random.Random(1)
        self.drift, self.changes = drift, list[Change]()
        self._noise = lambda: chance.uniform(-noise, noise)

    def step(self, speeds: Sequence[float]) -> None:
        """A change holds at once."""
        split = self.drift.plan.split
        self.drift.observe(split, busy(split, speeds, self._noise))
        found = self.drift.decide()
        if isinstance(found, Change):
            self.changes.append(found)
            self.drift.changed(found.plan)

    def longest(self, speeds: Sequence[float]) -> float:
        return max(busy(self.drift.plan.split, speeds, lambda: 0.0))


def followed(speeds: Sequence[float]) -> World:
    asked = problem(speeds)
    return World(Drift(asked, make_plan(asked)))


def optimum(speeds: Sequence[float]) -> float:
    return max(busy(make_plan(problem(speeds)).split, speeds, lambda: 0.0))


def test_nothing_changes_while_nothing_changes() -> None:
    asked = problem((1.0, 0.5, 0.25))
    world = World(Drift(asked, make_plan(asked)), noise=0.04)
    for _ in range(300):
        world.step((1.0, 0.5, 0.25))
    assert not world.changes


def test_speeds_that_jump_about_are_not_run_after() -> None:
    """On a crowded machine each rank is slower now and then, for a few steps: a plan for that comes too late."""
    asked, chance = problem((1.0, 1.0, 0.5)), random.Random(3)
    world = World(Drift(asked, make_plan(asked)), noise=0.05)
    for _ in range(100):
        speeds = [speed * chance.uniform(0.7, 1.0) for speed in (1.0, 1.0, 0.5)]
        for _ in range(4):
            world.step(speeds)
    assert 0 < len(world.changes) <= 20
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
    world = World(Drift(asked, make_plan(asked)), noise)
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
    for _ in range(5):
        world.drift.observe(split, busy(split, (1.0, 0.9), lambda: 0.0))
    kept = world.drift.decide(steps_left=2)
    assert isinstance(kept, Keep)
    assert "would gain" in kept.reason


def test_learning_needs_no_measurements() -> None:
    split = Split.of((BATCH // 2, BATCH // 2))
    drift = learned(busy(split, (1.0, 0.25), lambda: 0.0), split, (120, 120), 0, Shares.equal(2))
    world = World(drift)
    for _ in range(20):
        world.step((1.0, 0.25))
    assert world.longest((1.0, 0.25)) < 1.06 * optimum((1.0, 0.25))
    assert max(size for sizes in drift.plan.split.micro for size in sizes) <= 120


@pytest.mark.parametrize("batch", [7, 16, 24])
def test_a_drop_long_after_the_start_is_followed_at_once(batch: int) -> None:
    """Small batches never finish at exactly the same moment, so there is something to look for in vain at all times."""
    asked = replace(problem((1.0, 0.7)), global_batch=batch)
    world = World(Drift(asked, make_plan(asked)))
    for _ in range(60):
        world.step((1.0, 0.7))
    before = len(world.changes)
    for _ in range(8):
        world.step((0.3, 0.7))
    assert len(world.changes) > before
