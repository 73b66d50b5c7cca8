"""A schedule laid on a cluster: the channels that each move crosses, which rank waits for which. For any size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.routes import NO_CHANNEL, Ecmp, Routes, find_paths
from mimatrix.collectives.schedule import Schedule
from mimatrix.core.errors import UserError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """The moves of a schedule as arrays, ordered by reader, then round, then the order within the round."""

    fabric: Fabric
    placement: Ints
    """The device of each rank."""
    ranks: int
    rounds: int
    src: Ints
    dst: Ints
    round: Ints
    fraction: Floats
    """Part of the message that each move carries; moves of empty blocks are left out, the waiting for them is not."""
    adds: NDArray[np.bool_]
    path: Ints
    """Channels of each move, padded with the number of channels."""
    latency_s: Floats
    queue_end: Ints
    """[rank * rounds + round]: where the queue of that rank and round ends; it starts where the one before ends."""
    needs: Ints
    """[rank * rounds + round]: how many must have finished the round before (peers, and the rank itself)."""
    reader_end: Ints
    readers: Ints
    """The ranks that wait for a rank before a round, row after row; the row of (rank, round) ends at `reader_end`."""

    @classmethod
    def of(
        cls, schedule: Schedule, fabric: Fabric, placement: Sequence[int] | None = None, routes: Routes | None = None
    ) -> "Traffic":
        """Lay `schedule` on the cluster: rank i runs on device `placement[i]` (by default device i)."""
        devices = check_placement(fabric, schedule.ranks, placement)
        rounds = len(schedule.rounds)
        moves = _columns(schedule)
        moves = moves.select(np.argsort(moves.dst * rounds + moves.round, kind="stable"))
        needs, reader_end, readers = _waits(schedule, moves)
        moves = moves.select(np.flatnonzero(moves.fraction > 0))
        path = _paths(fabric, devices[moves.src], devices[moves.dst], routes or Ecmp())
        lengths = np.bincount(moves.dst * rounds + moves.round, minlength=schedule.ranks * rounds)
        return cls(
            fabric,
            devices,
            schedule.ranks,
            rounds,
            moves.src,
            moves.dst,
            moves.round,
            moves.fraction,
            moves.adds,
            path,
            np.append(fabric.latencies, 0.0)[path].sum(axis=1),
            np.cumsum(lengths),
            needs,
            reader_end,
            readers,
        )

    def max_link_flows(self) -> int:
        """Return the most moves on one channel in one round, whether or not at the same moment."""
        return int(self.link_flows().max(initial=0))

    def link_flows(self) -> Ints:
        """Return [round, channel]: the moves on each channel in each round."""
        channels = len(self.fabric.channels) + 1
        keys = (self.round[:, None] * channels + self.path).ravel()
        return np.bincount(keys, minlength=self.rounds * channels).reshape(self.rounds, channels)[:, :-1]


def check_placement(fabric: Fabric, ranks: int, placement: Sequence[int] | None) -> Ints:
    """Return the device of each rank, or raise an error that says what is wrong with the placement."""
    ports = len(fabric.exits)
    if ranks > ports:
        raise UserError(
            f"{ranks} ranks do not fit the {ports} devices of {fabric.cluster.name}; use at most {ports} ranks"
        )
    devices = np.arange(ranks) if placement is None else np.asarray(placement, dtype=np.int64)
    if len(devices) != ranks:
        raise UserError(f"the placement names {len(devices)} devices for {ranks} ranks; name one for each rank")
    if len(np.unique(devices)) != ranks or devices.min() < 0 or devices.max() >= ports:
        raise UserError(f"a placement names different devices from 0 to {ports - 1}; name each at most once")
    return devices


@dataclass(frozen=True, slots=True)
class _Columns:
    """The moves of a schedule, one array for each field."""

    src: Ints
    dst: Ints
    round: Ints
    fraction: Floats
    adds: NDArray[np.bool_]

    def select(self, rows: Ints) -> "_Columns":
        return _Columns(self.src[rows], self.dst[rows], self.round[rows], self.fraction[rows], self.adds[rows])


def _columns(schedule: Schedule) -> _Columns:
    moves = [move for moves in schedule.rounds for move in moves]
    count = len(moves)
    src = np.fromiter((move.src for move in moves), np.int64, count)
    dst = np.fromiter((move.dst for move in moves), np.int64, count)
    start = np.fromiter((move.blocks.start for move in moves), np.int64, count)
    stop = np.fromiter((move.blocks.stop for move in moves), np.int64, count)
    adds = np.fromiter((move.adds for move in moves), np.bool_, count)
    number = np.repeat(np.arange(len(schedule.rounds)), [len(moves) for moves in schedule.rounds])
    return _Columns(src, dst, number, _fractions(schedule, start, stop), adds)


def _fractions(schedule: Schedule, start: Ints, stop: Ints) -> Floats:
    """Return the part of the message in blocks [start, stop); exactly zero if all those blocks are empty."""
    ends = schedule.shares.ends()
    filled = np.concatenate(([0], np.cumsum(np.asarray(schedule.shares.fractions) > 0)))
    return np.where(filled[stop] > filled[start], ends[stop] - ends[start], 0.0)


def _waits(schedule: Schedule, moves: _Columns) -> tuple[Ints, Ints, Ints]:
    """Return, by the wait rule, the needs of each (rank, round), and the ranks that wait for each (rank, round)."""
    rounds, ranks = len(schedule.rounds), schedule.ranks
    pairs = np.unique((moves.src * rounds + moves.round) * ranks + moves.dst)
    waited_for, reader = np.divmod(pairs, ranks)
    needs = 1 + np.bincount(reader * rounds + waited_for % rounds, minlength=ranks * rounds)
    reader_end = np.cumsum(np.bincount(waited_for, minlength=ranks * rounds))
    return needs, reader_end, reader


def _paths(fabric: Fabric, sources: Ints, targets: Ints, routes: Routes) -> Ints:
    """Return the routes of all moves; each pair of devices is routed once."""
    devices = len(fabric.exits)
    pairs, pair_of = np.unique(sources * devices + targets, return_inverse=True)
    rows = find_paths(fabric, pairs // devices, pairs % devices, routes)
    return np.where(rows == NO_CHANNEL, len(fabric.channels), rows)[pair_of]
