"""The channels that a transfer crosses: a shortest path, and a rule that picks among several.

`Ecmp` picks by a seeded hash of source, target and hop, as switches do; `BySource` lets the source choose, as HDRM's
rule for leaf-spine networks does. If the path is unique, as between opposite sides of a BiGraph, both agree.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster.fabric import Exit, Fabric, Floats, Ints
from mimatrix.core.errors import UserError

NO_CHANNEL = -1


class Routes(Protocol):
    """The rule that picks among equally short paths: a number for each transfer and hop, taken modulo the choices."""

    def keys(self, sources: Ints, targets: Ints, hop: int) -> Ints:
        """Return a number of 0 or more for each pair of devices."""
        ...


@dataclass(frozen=True, slots=True)
class Ecmp:
    """Picks by hash, the same for the same seed: what switches do, collisions included."""

    seed: int = 0

    def keys(self, sources: Ints, targets: Ints, hop: int) -> Ints:
        """Return the hash of each pair, a different one at every hop."""
        # In Python's integers, where the product neither overflows nor minds a negative seed.
        offset = np.uint64(self.seed * 0x9E3779B97F4A7C15 % 2**64)
        mixed = _scramble(sources.astype(np.uint64) + offset)
        mixed = _scramble(mixed ^ (targets.astype(np.uint64) << np.uint64(20)) ^ np.uint64(hop))
        return (mixed >> np.uint64(2)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class BySource:
    """Lets the source device choose: `choice[device]` at every hop."""

    choice: tuple[int, ...]

    def keys(self, sources: Ints, targets: Ints, hop: int) -> Ints:  # noqa: ARG002 (the rule looks at the source)
        """Return the choice of each source."""
        return np.asarray(self.choice, dtype=np.int64)[sources]


def find_paths(fabric: Fabric, sources: Ints, targets: Ints, routes: Routes) -> Ints:
    """Return a row of channels for each (source, target) pair, in order of travel, padded with `NO_CHANNEL`."""
    within = fabric.node_of[sources] == fabric.node_of[targets]
    inner = [fabric.inside(int(s), int(t)) for s, t in zip(sources[within], targets[within], strict=True)]
    # Devices of one node without a bus meet outside, like any two devices.
    within[np.flatnonzero(within)] = [path is not None for path in inner]
    outside = _paths_outside(fabric, sources[~within], targets[~within], routes)
    inside = _pad([path for path in inner if path is not None])
    rows = np.full((len(sources), max(outside.shape[1], inside.shape[1])), NO_CHANNEL, dtype=np.int64)
    rows[~within, : outside.shape[1]] = outside
    rows[within, : inside.shape[1]] = inside
    return rows


def _paths_outside(fabric: Fabric, sources: Ints, targets: Ints, routes: Routes) -> Ints:
    """Return the paths out of one device, between cores, into another."""
    exits = _ExitArrays(fabric)
    leave, enter = _choose_exits(fabric, exits, sources, targets, routes)
    outs = exits.out[sources, leave]
    backs = exits.back[targets, enter]
    here, there = exits.core[sources, leave], exits.core[targets, enter]
    columns = [outs]
    hop = 0
    while len(here) and (here != there).any():
        hop += 1
        taken, here = _step(fabric, here, there, routes.keys(sources, targets, hop))
        columns.append(taken[:, None])
    return _compact(np.hstack([*columns, backs]))


def _choose_exits(
    fabric: Fabric, exits: "_ExitArrays", sources: Ints, targets: Ints, routes: Routes
) -> tuple[Ints, Ints]:
    """Return for each pair the exit and entry that are nearest to one another; the rule picks among equals."""
    count = exits.core.shape[1]
    reach = np.full((len(sources), count * count), np.inf)
    for index in range(count * count):
        a, b = exits.core[sources, index // count], exits.core[targets, index % count]
        there = (a >= 0) & (b >= 0)
        reach[there, index] = fabric.distance[a[there], b[there]]
    best = reach.min(axis=1, initial=np.inf)
    _refuse_unreachable(fabric, sources, targets, best)
    picked = _pick(reach == best[:, None], routes.keys(sources, targets, 0))
    return picked // count, picked % count


def _step(fabric: Fabric, here: Ints, there: Ints, keys: Ints) -> tuple[Ints, Ints]:
    """Advance every transfer that has not arrived by one hop: return the channel taken, and the core it leads to."""
    taken = np.full(len(here), NO_CHANNEL, dtype=np.int64)
    onward = here.copy()
    channel, tail, head = np.array(fabric.core_channels, dtype=np.int64).T
    moving = np.flatnonzero(here != there)
    states, state_of = np.unique(here[moving] * len(fabric.core_names) + there[moving], return_inverse=True)
    at, goal = np.divmod(states, len(fabric.core_names))
    order = np.argsort(tail, kind="stable")
    starts = np.searchsorted(tail[order], np.arange(len(fabric.core_names) + 1))
    degree = int(np.diff(starts).max())
    # Every channel out of a state's core, padded; a channel serves when it leads one hop nearer to the goal.
    slots = starts[at][:, None] + np.arange(degree)
    real = slots < starts[at + 1][:, None]
    choices = order[np.where(real, slots, 0)]
    serves = real & (fabric.distance[head[choices], goal[:, None]] == fabric.distance[at, goal][:, None] - 1)
    ranked = np.argsort(~serves, axis=1, kind="stable")
    which = ranked[state_of, keys[moving] % serves.sum(axis=1)[state_of]]
    chosen = choices[state_of, which]
    taken[moving], onward[moving] = channel[chosen], head[chosen]
    return taken, onward


class _ExitArrays:
    """The exits of every device as arrays, padded: channels out, channels back, the core reached (-1: none)."""

    def __init__(self, fabric: Fabric) -> None:
        count = max(len(exits) for exits in fabric.exits)
        self.out = _exit_array([[way.out for way in exits] for exits in fabric.exits], count)
        self.back = _exit_array([[way.back for way in exits] for exits in fabric.exits], count)
        self.core = np.array([_cores(exits, count) for exits in fabric.exits], dtype=np.int64)


def _exit_array(rows: list[list[tuple[int, ...]]], count: int) -> Ints:
    flat = [path for row in rows for path in row + [()] * (count - len(row))]
    padded = _pad(flat)
    return padded.reshape(len(rows), count, padded.shape[1])


def _cores(exits: tuple[Exit, ...], count: int) -> list[int]:
    return [way.core for way in exits] + [-1] * (count - len(exits))


def _pad(paths: list[tuple[int, ...]]) -> Ints:
    rows = np.full((len(paths), max(map(len, paths), default=0)), NO_CHANNEL, dtype=np.int64)
    for index, path in enumerate(paths):
        rows[index, : len(path)] = path
    return rows


def _compact(rows: Ints) -> Ints:
    """Move the padding to the end of each row, and drop columns of nothing but padding."""
    order = np.argsort(rows == NO_CHANNEL, axis=1, kind="stable")
    tight = np.take_along_axis(rows, order, axis=1)
    return tight[:, (tight != NO_CHANNEL).any(axis=0)]


def _pick(allowed: NDArray[np.bool_], keys: Ints) -> Ints:
    """Return for each row the (key modulo count)-th column that is allowed."""
    ranked = np.argsort(~allowed, axis=1, kind="stable")
    picked: Ints = ranked[np.arange(len(allowed)), keys % allowed.sum(axis=1)]
    return picked


def _refuse_unreachable(fabric: Fabric, sources: Ints, targets: Ints, reach: Floats) -> None:
    lost = np.flatnonzero(np.isinf(reach))
    if len(lost):
        names = fabric.cluster.device_names
        a, b = names[sources[lost[0]]], names[targets[lost[0]]]
        raise UserError(
            f"{a} cannot reach {b} in {fabric.cluster.name}; add a [[link]] that joins their parts of the network"
        )


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64: every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
