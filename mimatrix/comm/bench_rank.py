"""One rank of `mimatrix bench`: competitors take turns on the same data in the same processes.

Started as `python -m mimatrix.comm.bench_rank REQUEST` with torchrun's variables, or under mpiexec. Rank 0 prints
lines of JSON: progress, then the rows.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.group import Group
from mimatrix.comm.tuning.choice import LISTS, AlgorithmChoice
from mimatrix.core.errors import UserError

BOUND = "bound: read and write once"
"""What memory allows: all ranks read and write their own data once, at the same time, and nothing else."""
_MAX_TURNS = 200
_TUNED = ("mimatrix arena", "mimatrix")
"""The rows for which the tuner chooses."""
_BUS_FACTOR = {
    Collective.ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    Collective.REDUCE_SCATTER: lambda ranks: (ranks - 1) / ranks,
    Collective.ALL_GATHER: lambda ranks: (ranks - 1) / ranks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What to measure."""

    collective: str
    sizes: list[int]
    against: list[str]
    seconds: float
    """How long to measure each size, about."""
    candidates: bool = False
    explain: bool = False
    choices: tuple[str, ...] = ()
    """Transports and algorithms to measure as they are, besides what the tuner chooses."""
    shares: tuple[float, ...] = ()
    """What each rank owns of a reduce-scatter or an all-gather; equal parts if it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One competitor at one size. `algbw` and `busbw` in bytes per second, as nccl-tests define them."""

    who: str
    collective: str
    world: int
    bytes: int
    median_s: float
    spread_s: float
    """Between the quartiles."""
    algbw: float
    busbw: float
    wrong: int
    repeats: int
    predicted_s: float | None = None
    choice: str = ""
    """What the tuner chose, of rows that it chooses for."""


Runner = Callable[[torch.Tensor], None]


class Bench:
    """The competitors of one rank."""

    def __init__(self, request: BenchRequest, group: Group, mpi: Any = None) -> None:
        self.request, self.collective = request, Collective(request.collective)
        self.group, self.mpi = group, mpi
        self.rank, self.world_size = group.rank, group.world_size
        self.device = "cuda" if "nccl" in request.against else "cpu"
        self.shares = Shares.of(request.shares) if request.shares else None

    @classmethod
    def open(cls, request: BenchRequest) -> "Bench":
        """Join the other ranks."""
        mpi = _load_mpi() if "mpi" in request.against else None
        if mpi:
            os.environ |= {"RANK": str(mpi.rank), "WORLD_SIZE": str(mpi.size), "LOCAL_RANK": str(mpi.rank)}
        dist.init_process_group("mimatrix", timeout=timedelta(seconds=120))
        world: Any = dist.group.WORLD
        group: Group = world.mimatrix
        if "nccl" in request.against and not group.has_nccl:
            raise UserError(f"nccl cannot be measured here: {group.nccl_reason}; leave it out of --against")
        return cls(request, group, mpi)

    def rows(self) -> Iterator[BenchRow]:
        """Measure all sizes, one after the other."""
        for number, size in enumerate(self.request.sizes):
            self.write({"progress": f"{size} bytes ({number + 1} of {len(self.request.sizes)})"})
            yield from self._measure_size(size)

    def tuner_table(self) -> dict[str, dict[str, float]]:
        """Return the times that the tuner measured."""
        return self.group.tuner.used_table if self.group.tuner else {}

    def transports(self) -> list[str]:
        """Return a line for each transport, whether there is one and why; and one for what is known of the network."""
        forecast = self.group.forecast
        known = forecast.known.origin if forecast else 'not known; a run with mode="auto" measures it'
        return [*(str(status) for status in self.group.transport_status()), f"network: {known}"]

    def write(self, value: object) -> None:
        """Print a line of JSON on rank 0."""
        if self.rank == 0:
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()

    def _measure_size(self, size: int) -> Iterator[BenchRow]:
        count = max(1, size // 4 // self.world_size) * self.world_size
        runners = self._runners(count)
        tensors = {who: self._tensor(who, count) for who in runners}
        wrong = {who: 0 if who == BOUND else self._count_wrong(run, tensors[who]) for who, run in runners.items()}
        times = self._time(runners, tensors)
        for who, took_s in times.items():
            quartiles = np.quantile(took_s, [0.25, 0.5, 0.75])
            median_s = float(quartiles[1])
            yield BenchRow(
                who=who,
                collective=self.collective.value,
                world=self.world_size,
                bytes=4 * count,
                median_s=median_s,
                spread_s=float(quartiles[2] - quartiles[0]),
                algbw=4 * count / median_s,
                busbw=4 * count / median_s * _BUS_FACTOR[self.collective](self.world_size),
                wrong=wrong[who],
                repeats=len(took_s),
                predicted_s=self._predict(self._choices(count).get(who), 4 * count),
                choice=self._chosen(tensors[who]) if who in _TUNED else "",
            )
        for tensor in tensors.values():
            self._free(tensor)

    def _op(self) -> CollectiveOp:
        return CollectiveOp(self.collective, torch.float32, shares=self.shares)

    def _chosen(self, tensor: torch.Tensor) -> str:
        return str(self.group.cached_choice(self._op(), tensor) or "")

    def _counts(self, count: int) -> tuple[int, ...]:
        """Return how many elements each rank owns."""
        return (self.shares or Shares.equal(self.world_size)).cut(count)

    def _predict(self, choice: AlgorithmChoice | None, size: int) -> float | None:
        forecast = self.group.forecast if self.collective is Collective.ALL_REDUCE else None
        if not forecast or not choice or choice.transport == "c10d":
            return None
        return forecast.seconds(choice, self.collective, size)

    def _choices(self, count: int) -> dict[str, AlgorithmChoice]:
        requested = {text: AlgorithmChoice.parse(text) for text in self.request.choices}
        if LISTS in requested.values() and not (self.group.has_nccl and self.device == "cuda"):
            raise UserError('only NCCL takes "c10d lists"; measure "c10d padded", or add --against nccl on GPUs')
        if not self.request.candidates or not self.group.tuner:
            return requested
        tensor = self._tensor("windows" if "windows" in self.group.transports else "", count)
        choices = self.group.tuner.candidates(self.group.size_class(self._op(), tensor)).values()
        self._free(tensor)
        # Of equal shards, a competitor's row already has the backend's own collective.
        return requested | {str(choice): choice for choice in choices if self.shares or choice.transport != "c10d"}

    def _runners(self, count: int) -> dict[str, Runner]:
        runners: dict[str, Runner] = {}
        for who in self.request.against:
            runners[who] = self._run_mpi if who == "mpi" else partial(self._run_c10d, who)
        if self._has_arena() and "windows" in self.group.transports:
            runners[_TUNED[0]] = self._run_ours
        runners[_TUNED[1]] = self._run_ours
        if "send_recv" not in self.group.transports:
            runners[BOUND] = lambda tensor: tensor.mul_(1.0)  # type: ignore[assignment]
        for who, choice in self._choices(count).items():
            runners[who] = partial(self._run_ours, choice=choice)
        return runners

    def _tensor(self, who: str, count: int) -> torch.Tensor:
        in_arena = (who == _TUNED[0] or who.startswith("windows")) and self._has_arena()
        kind = "cuda" if self.device == "cuda" else next(iter(self.group.endpoint.arenas))
        return self.group.empty(count, kind=kind) if in_arena else torch.empty(count, device=self.device)

    def _has_arena(self) -> bool:
        """Whether all ranks have an arena on the device; GPUs that cannot read each other's memory have none."""
        return self.device == "cpu" or "cuda" in self.group.window_kinds

    def _free(self, tensor: torch.Tensor) -> None:
        for arena in self.group.endpoint.arenas.values():
            if placed := arena.slot_of(tensor):
                placed[0].free()

    def _run_ours(self, tensor: torch.Tensor, choice: AlgorithmChoice | None = None) -> None:
        self.group.start(self._op(), tensor, choice, may_run_here=True).wait()

    def _run_c10d(self, who: str, tensor: torch.Tensor) -> None:
        backend = self.group.backends["cuda" if who == "nccl" else "cpu"]
        if self.shares:
            backend.run(self.collective, tensor, "sum", 0, self._counts(tensor.numel()), "padded")
        else:
            backend.run(self.collective, tensor, "sum", 0)
        if tensor.is_cuda:
            torch.cuda.synchronize()

    def _run_mpi(self, tensor: torch.Tensor) -> None:
        from mpi4py import MPI

        array = tensor.cpu().numpy()
        counts, own = self._counts(len(array)), self.group.part(len(array), self.shares)
        match self.collective:
            case Collective.REDUCE_SCATTER:
                result = np.empty_like(array[own.start : own.stop])
                if self.shares:
                    self.mpi.Reduce_scatter(array, result, counts)
                else:
                    self.mpi.Reduce_scatter_block(array, result)
                array[own.start : own.stop] = result
            case Collective.ALL_GATHER if self.shares:
                self.mpi.Allgatherv(MPI.IN_PLACE, [array, (counts, None), MPI.FLOAT])
            case Collective.ALL_GATHER:
                self.mpi.Allgather(MPI.IN_PLACE, array)
            case _:
                self.mpi.Allreduce(MPI.IN_PLACE, array)

    def _count_wrong(self, runner: Runner, tensor: torch.Tensor) -> int:
        """Return how many elements differ from what they must be, over all ranks."""
        pattern = torch.arange(tensor.numel()) % 17
        tensor.copy_(pattern + self.rank)
        if self.collective is Collective.ALL_GATHER:
            counts = torch.tensor(self._counts(tensor.numel()))
            expected = (pattern + torch.repeat_interleave(torch.arange(self.world_size), counts)).float()
        else:
            expected = (self.world_size * pattern + self.world_size * (self.world_size - 1) // 2).float()
        runner(tensor)
        checked = slice(None)
        if self.collective is Collective.REDUCE_SCATTER:
            own = self.group.part(tensor.numel(), self.shares)
            checked = slice(own.start, own.stop)
        wrong = torch.tensor([float((tensor[checked] != expected[checked]).sum())])
        dist.all_reduce(wrong)
        return int(wrong)

    def _time(self, runners: dict[str, Runner], tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Run turn by turn until the time is used up; a turn counts as long as its slowest rank took."""
        times: dict[str, list[float]] = {who: [] for who in runners}
        started, turns = time.monotonic(), 0
        assert self.group.cpu_backend
        while True:
            took_s = []
            for who, runner in runners.items():
                tensors[who].zero_()
                self.group.barrier()
                turn_started = time.perf_counter()
                runner(tensors[who])
                took_s.append(time.perf_counter() - turn_started)
            spent_s = time.monotonic() - started
            *slowest_s, spent_s = self.group.cpu_backend.max_over_ranks([*took_s, spent_s])
            turns += 1
            if turns > 1:  # the first warms up
                for who, seconds in zip(runners, slowest_s, strict=True):
                    times[who].append(seconds)
            if (turns > 5 and spent_s > self.request.seconds) or turns > _MAX_TURNS:
                return times


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f"MPI cannot be used here ({error}); install mpi4py and openmpi, or leave mpi out") from error
    return MPI.COMM_WORLD


def main() -> None:
    """Measure what the request asks for."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    bench = Bench.open(BenchRequest(**json.loads(sys.argv[1])))
    rows = [asdict(row) for row in bench.rows()]
    why = bench.tuner_table() if bench.request.explain else {}
    bench.write({"rows": rows, "why": why, "transports": bench.transports() if bench.request.explain else []})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
