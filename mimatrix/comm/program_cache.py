"""The programs of one rank, compiled from schedules at their first use and kept for the next calls of the same kind."""

from dataclasses import replace

from mimatrix.collectives.catalog import AlgorithmRequest, build
from mimatrix.collectives.compose import group_by_owner
from mimatrix.collectives.hierarchical import Groups
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import SHARDED, CollectiveOp
from mimatrix.comm.execution.mixed import check_mixed
from mimatrix.comm.execution.program import Compiler, Program
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.tuning.forecast import Forecast
from mimatrix.core.errors import UnsuitedError

_MAX_COMPILERS = 1024


class ProgramCache:
    """What one rank of a group does in each collective, by each algorithm; `hosts` has the members of each host."""

    def __init__(self, rank: int, hosts: Groups, forecast: Forecast | None) -> None:
        self._rank, self._hosts, self._forecast = rank, hosts, forecast
        self._world_size = sum(map(len, hosts))
        self._compilers: dict[tuple[Collective, AlgorithmChoice, Shares | None, int, int], Compiler] = {}

    def program(self, op: CollectiveOp, choice: AlgorithmChoice, count: int) -> Program:
        """Return the program for a tensor of `count` elements that is worked on as a whole."""
        return self.compiler(op, choice, count).program(count)

    def compiler(self, op: CollectiveOp, choice: AlgorithmChoice, count: int | None = None) -> Compiler:
        """Return what compiles programs for any length, or with `count` for tensors of that length only."""
        shares = op.shares or choice.shares
        # Segments of shards are cut from the elements that a rank owns, so their schedule depends on the length.
        length = (count or 0) if choice.segments > 1 and op.collective in SHARDED else 0
        if count == 0:
            choice = replace(choice, segments=1)  # nothing to cut
        key = (op.collective, choice, shares, op.root, length)
        if key not in self._compilers:
            if len(self._compilers) >= _MAX_COMPILERS:
                self._compilers.clear()
            schedule = self._schedule(op, choice, shares, length)
            if choice.transport == "mixed":
                check_mixed(schedule, self._hosts)
            self._compilers[key] = Compiler(schedule, self._rank)
        return self._compilers[key]

    def _schedule(self, op: CollectiveOp, choice: AlgorithmChoice, shares: Shares | None, count: int) -> Schedule:
        """Return the schedule, fitted to the network if that is described and each rank may own any shard."""
        is_fitted = choice.transport != "mixed" and op.collective is Collective.ALL_REDUCE and not op.shares
        if self._forecast and is_fitted:
            return self._forecast.schedule(choice, op.collective)
        request = AlgorithmRequest(
            op.collective,
            self._world_size,
            shares=shares,
            segments=choice.segments,
            root=op.root,
            groups=self._hosts,
        )
        schedule = build(choice.algorithm, request)
        if count:
            schedule = group_by_owner(schedule, (shares or Shares.equal(self._world_size)).cut(count))
        is_in_order = list(schedule.owners) == sorted(schedule.owners)
        if op.collective in SHARDED and not (is_in_order and len(set(schedule.owners)) == self._world_size):
            raise UnsuitedError(f"{choice} does not leave each rank one shard in the order of ranks; use gdraa or ring")
        return schedule
