"""The search on invented devices: with knees, noise and memory of their own; it finds the way without touching any."""

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.planner.model.curve import Curve
from mimatrix.profiler.batch_search import BatchSizeSearch, ProbedBatch

MB = 1e6


@dataclass
class Invented:
    """A device whose time has a fixed part and a knee, and whose memory grows with the batch, slightly bent."""

    fixed_s: float = 0.002
    each_s: float = 0.0005
    knee: int = 1
    memory_fixed: float = 5 * MB
    memory_each: float = 1 * MB
    bend: float = 0.0
    noise: float = 0.0
    room: float = 1e12
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, samples: int) -> float:
        return self.fixed_s + self.each_s * max(samples, self.knee)

    def memory(self, samples: int) -> float:
        return self.memory_fixed + self.memory_each * samples * (1 + self.bend * samples)

    def point(self, samples: int) -> ProbedBatch:
        off = 1 + self.noise * self.chance.uniform(-1, 1)
        return ProbedBatch(samples, self.seconds(samples) * off, self.memory(samples), self.noise)

    def most(self, most: int) -> int:
        """Return the largest batch that fits."""
        return bisect_right(range(1, most + 1), self.room, key=self.memory)


def searched(
    device: Invented,
    most: int,
    believed_room: float | None = None,
    left: Callable[[int], float] | None = None,
    may_oom: bool = True,
) -> tuple[BatchSizeSearch, list[int]]:
    """Return the finished search, and what it probed in order."""
    search = BatchSizeSearch(most, device.room if believed_room is None else believed_room, may_oom=may_oom)
    probed: list[int] = []
    while (samples := search.next(left(len(probed)) if left else float("inf"))) is not None:
        probed.append(samples)
        assert len(probed) < 100
        if device.memory(samples) > device.room:
            search.add_oom(samples)
        else:
            search.add(device.point(samples))
    return search, probed


devices = st.builds(
    Invented,
    fixed_s=st.floats(0, 0.05),
    each_s=st.floats(1e-5, 1e-2),
    knee=st.integers(1, 300),
    memory_fixed=st.floats(0, 50 * MB),
    memory_each=st.floats(0.01 * MB, 20 * MB),
    bend=st.floats(0, 1e-5),
    noise=st.floats(0, 0.05),
    room=st.floats(100 * MB, 20_000 * MB),
    chance=st.integers(0, 99).map(random.Random),
)


@settings(max_examples=200, deadline=None)
@given(devices, st.integers(1, 5000))
def test_the_search_finds_the_largest_batch_that_fits(device: Invented, most: int) -> None:
    search, probed = searched(device, most)
    assert len(probed) < 25
    assert all(probed.count(samples) <= 2 for samples in probed)
    assert max(probed) <= most
    assert search.oom_count <= 1
    largest, fits = search.points[-1].samples, device.most(most)
    assert largest <= fits
    assert largest >= fits / 1.06 - 1


@settings(max_examples=200, deadline=None)
@given(devices, st.integers(1, 5000), st.floats(1.1, 3))
def test_the_search_survives_less_memory_than_believed(device: Invented, most: int, times: float) -> None:
    search, probed = searched(device, most, believed_room=device.room * times)
    assert len(probed) < 25
    assert max(probed) <= most
    assert search.oom_count <= 2
    assert search.points[-1].samples >= device.most(most) / 2.5 - 1


@settings(max_examples=200, deadline=None)
@given(devices, st.integers(1, 5000))
def test_a_search_that_must_not_oom_never_does(device: Invented, most: int) -> None:
    device.bend = 0.0
    search, _ = searched(device, most, may_oom=False)
    assert search.oom_count == 0
    if device.memory(2) * 2 < device.room:
        assert search.points[-1].samples >= device.most(most) / 1.06 - 1


@settings(max_examples=100, deadline=None)
@given(devices)
def test_points_between_are_predicted(device: Invented) -> None:
    device.noise = 0.0
    search, _ = searched(device, 1024)
    curve = Curve.of((point.samples, point.seconds) for point in search.points)
    sizes = np.arange(1, curve.most + 1)
    truth = np.array([device.seconds(int(size)) for size in sizes])
    assert np.median(np.abs(curve.table[1:] / truth - 1)) < 0.02
    assert np.max(np.abs(curve.table[1:] / truth - 1)) < 0.12


def test_a_linear_curve_is_not_refined() -> None:
    _, probed = searched(Invented(), 256)
    assert probed == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_a_knee_is_refined() -> None:
    _, probed = searched(Invented(knee=48), 256)
    assert any(32 < samples < 64 for samples in probed)


def test_a_disturbed_point_is_measured_again() -> None:
    device, search, probed = Invented(), BatchSizeSearch(256, 1e12), []
    while (samples := search.next()) is not None:
        held_up = samples == 16 and 16 not in probed
        probed.append(samples)
        search.add(replace(device.point(samples), seconds=device.seconds(samples) * (3 if held_up else 1)))
    assert probed.count(16) == 2
    assert [point.seconds for point in search.points] == [device.seconds(point.samples) for point in search.points]
    assert len(probed) == 10


def test_a_batch_that_fits_only_by_luck_is_dropped() -> None:
    device, search, probed = Invented(knee=48), BatchSizeSearch(256, 1e12), []
    while (samples := search.next()) is not None:
        probed.append(samples)
        if len(probed) > 9:
            search.add_oom(samples)
        else:
            search.add(device.point(samples))
    assert len(probed) <= 12
    assert search.oom_count <= 2
    assert search.points[-1].samples < min(probed[9:])


def test_noise_is_not_refined() -> None:
    _, quiet = searched(Invented(noise=0.0), 1024)
    _, noisy = searched(Invented(noise=0.05), 1024)
    assert len(noisy) <= len(quiet) + 2


def test_flat_throughput_takes_longer_strides() -> None:
    _, probed = searched(Invented(fixed_s=0.0), 4096)
    assert probed == [1, 2, 4, 16, 64, 256, 1024, 4096]


def test_without_time_only_the_smallest_batch_is_measured() -> None:
    _, probed = searched(Invented(), 256, left=lambda _: 0.0)
    assert probed == [1]
    search, probed = searched(Invented(knee=48), 4096, left=lambda done: 3.0 - 0.25 * done)
    assert len(probed) <= 12
    assert search.points[-1].samples < 4096


def test_batches_slower_than_the_time_left_are_not_started() -> None:
    search, _ = searched(Invented(each_s=0.1), 4096, left=lambda _: 20.0)
    assert search.points[-1].seconds < 10


def test_the_search_ends_if_nothing_fits() -> None:
    search, probed = searched(Invented(room=1 * MB), 64)
    assert probed == [1]
    assert search.points == []
    assert search.oom_count == 1


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_the_largest_wanted_batch_is_measured_itself(most: int) -> None:
    search, _ = searched(Invented(), most)
    assert search.points[-1].samples == most
