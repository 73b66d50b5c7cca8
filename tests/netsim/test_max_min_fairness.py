"""`fair_rates` against linear programmes, and against what makes an allocation max-min fair."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

from mimatrix.netsim import fair_rates

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Instance:
    """Flows as rows of channels, padded with the last channel, which is infinite."""

    paths: Ints
    capacities: Floats

    @property
    def crosses(self) -> NDArray[np.bool_]:
        """[flow, channel], the padding left out."""
        table = np.zeros((len(self.paths), len(self.capacities)), dtype=bool)
        for flow, path in enumerate(self.paths):
            table[flow, path] = True
        return table[:, :-1]

    @property
    def limited(self) -> NDArray[np.bool_]:
        """[flow]: whether it crosses any channel that has a limit."""
        limits = np.isfinite(self.capacities[:-1])
        return np.array([limits[crossed].any() for crossed in self.crosses], dtype=bool)


@pytest.mark.parametrize("seed", range(200))
def test_rates_are_those_of_linear_programmes(seed: int) -> None:
    instance = random_instance(seed, flows=seed // 9 % 12 + 1, channels=seed % 9 + 1)
    rates = fair_rates(instance.paths, instance.capacities)
    assert rates == pytest.approx(rates_by_programmes(instance), rel=1e-6)
    check_max_min(instance, rates)


@pytest.mark.parametrize("seed", range(12))
def test_large_instances_are_max_min_fair(seed: int) -> None:
    instance = random_instance(1000 + seed, flows=1000, channels=(20, 150, 900)[seed % 3], unit=10.0 ** (seed - 2))
    check_max_min(instance, fair_rates(instance.paths, instance.capacities))


@pytest.mark.parametrize("seed", range(20))
def test_order_does_not_matter(seed: int) -> None:
    instance = random_instance(2000 + seed, flows=40, channels=12)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(instance.paths))
    shuffled = rng.permuted(instance.paths[order], axis=1)
    rates = fair_rates(instance.paths, instance.capacities)
    assert fair_rates(shuffled, instance.capacities) == pytest.approx(rates[order], rel=1e-12)


def test_no_flows_have_no_rates() -> None:
    for width in (0, 3):
        assert fair_rates(np.zeros((0, width), dtype=np.int64), np.array([1.0, 2.0, np.inf])).shape == (0,)


def test_flows_that_nothing_limits_are_infinitely_fast() -> None:
    paths = np.array([[3, 3], [2, 3], [0, 3], [0, 2], [1, 3]])
    rates = fair_rates(paths, np.array([10.0, 4.0, np.inf, np.inf]))
    assert rates.tolist() == [np.inf, np.inf, 5.0, 5.0, 4.0]


def test_a_flow_held_up_elsewhere_leaves_its_part_to_the_others() -> None:
    # Channel 0 is shared by three; the first of them gets only 1 on channel 1, so the others get (10 - 1) / 2.
    paths = np.array([[0, 1], [0, 3], [0, 2], [2, 3]])
    rates = fair_rates(paths, np.array([10.0, 1.0, 20.0, np.inf]))
    assert rates.tolist() == [1.0, 4.5, 4.5, 15.5]


def test_inputs_are_left_as_they_were() -> None:
    instance = random_instance(7, flows=30, channels=9)
    paths, capacities = instance.paths.copy(), instance.capacities.copy()
    fair_rates(instance.paths, instance.capacities)
    assert (instance.paths == paths).all()
    assert (instance.capacities == capacities).all()


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_the_checks_object_to_a_changed_rate(factor: float) -> None:
    instance = random_instance(11, flows=10, channels=5)
    rates = fair_rates(instance.paths, instance.capacities)
    for flow in np.flatnonzero(instance.limited):
        changed = rates.copy()
        changed[flow] *= factor
        assert changed != pytest.approx(rates_by_programmes(instance), rel=1e-6)
        with pytest.raises(AssertionError):
            check_max_min(instance, changed)


def check_max_min(instance: Instance, rates: Floats) -> None:
    """Feasible, and every flow crosses a full channel on which no flow is faster: just then it is max-min fair."""
    assert (rates > 0).all()
    assert np.isinf(rates).tolist() == (~instance.limited).tolist()
    crosses, capacities = instance.crosses[instance.limited], instance.capacities[:-1]
    finite = rates[instance.limited]
    loads = finite @ crosses
    assert (loads <= capacities * (1 + 1e-9)).all()
    full = loads >= capacities * (1 - 1e-9)
    fastest = np.where(crosses, finite[:, None], 0.0).max(axis=0, initial=0.0)
    at_bottleneck = crosses & full & (finite[:, None] >= fastest * (1 - 1e-9))
    assert at_bottleneck.any(axis=1).all()


def rates_by_programmes(instance: Instance) -> Floats:
    """Make the smallest rate as large as can be, fix the flows that this holds down, and go on with the others."""
    rates = np.full(len(instance.paths), np.inf)
    finite = np.isfinite(instance.capacities[:-1])
    uses = instance.crosses[np.ix_(instance.limited, finite)].T.astype(float)
    capacities = instance.capacities[:-1][finite]
    fixed: dict[int, float] = {}
    while len(fixed) < uses.shape[1]:
        fixed |= _held_down(uses, capacities, fixed)
    rates[instance.limited] = [fixed[flow] for flow in range(uses.shape[1])]
    return rates


def _held_down(uses: Floats, capacities: Floats, fixed: dict[int, float]) -> dict[int, float]:
    """Return the flows that cannot have more than the best smallest rate, and that rate.

    The unknowns are all rates and the smallest one.
    """
    channels, flows = uses.shape
    free = [flow for flow in range(flows) if flow not in fixed]
    above = np.zeros((len(free), flows + 1))
    above[range(len(free)), free] = -1.0
    above[:, -1] = 1.0
    within = np.hstack([uses, np.zeros((channels, 1))])
    bounds = [(fixed[flow], fixed[flow]) if flow in fixed else (0, None) for flow in range(flows)]
    found = linprog(
        np.append(np.zeros(flows), -1.0),
        A_ub=np.vstack([within, above]),
        b_ub=np.append(capacities, np.zeros(len(free))),
        bounds=[*bounds, (0, None)],
    )
    assert found.success, found.message
    # Complementary slackness: where "this rate is at least the smallest" has a price, it is tight in every best answer.
    best, marginals = found.x, found.ineqlin.marginals
    assert best is not None
    assert marginals is not None
    prices = -marginals[channels:]
    held = {flow: float(best[-1]) for flow, price in zip(free, prices, strict=True) if price > 1e-6}
    assert held
    return held


def random_instance(seed: int, flows: int, channels: int, unit: float = 1.0) -> Instance:
    """Paths of unlike length, none to six channels; capacities from a few whole numbers (ties), or any, or infinite."""
    rng = np.random.default_rng(seed)
    widest = min(6, channels)
    paths = np.full((flows, widest), channels, dtype=np.int64)
    for path in paths:
        length = rng.integers(0 if rng.random() < 0.1 else 1, widest + 1)
        path[:length] = rng.choice(channels, length, replace=False)
    whole = rng.integers(1, 6, channels).astype(float)
    capacities = np.where(rng.random(channels) < 0.5, whole, rng.uniform(0.5, 50.0, channels)) * unit
    capacities[rng.random(channels) < 0.1] = np.inf
    return Instance(paths, np.append(capacities, np.inf))
