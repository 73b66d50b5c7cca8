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
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.group import Group
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.core.errors import UserError

BOUND = "bound: read and write once"
"""What memory allows: all ranks read and write their own data once, at the same time, and nothing else."""
_BUS = {
    Collective.ALL_REDUCE: lambda ranks: 2 * (ranks - 1) / ranks,
    Collective.REDUCE_SCATTER: lambda ranks: (ranks - 1) / ranks,
    Collective.ALL_GATHER: lambda ranks: (ranks - 1) / ranks,
}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is to be measured."""

    collective: str
    sizes: list[int]
    against: list[str]
    seconds: float
    """How long to measure each size, about."""
    candidates: bool = False
    explain: bool = False
    choices: tuple[str, ...] = ()
    """Plans to be measured as they are, beside what the tuner chooses."""


@dataclass(frozen=True, slots=True)
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


Runner = Callable[[torch.Tensor], None]


class Bench:
    """The competitors of one rank."""

    def __init__(self, request: BenchRequest) -> None:
        self.request, self.collective = request, Collective(request.collective)
        self.mpi = _mpi() if "mpi" in request.against else None
        if self.mpi:
            _variables_from(self.mpi)
        dist.init_process_group("mimatrix", timeout=timedelta(seconds=120))
        world: Any = dist.group.WORLD
        self.group: Group = world.mimatrix
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = "cuda" if "nccl" in request.against else "cpu"
        if self.device == "cuda" and not self.group.has_nccl:
            raise UserError("nccl cannot be measured here, it needs a GPU for each rank; leave it out of --against")

    def rows(self) -> Iterator[BenchRow]:
        """All sizes, one after the other."""
        for number, size in enumerate(self.request.sizes):
            self._say({"progress": f"{size} bytes ({number + 1} of {len(self.request.sizes)})"})
            yield from self._size(size)

    def why(self) -> dict[str, dict[str, float]]:
        """The tuner's table."""
        return self.group.tuner.table if self.group.tuner else {}

    def _size(self, size: int) -> Iterator[BenchRow]:
        count = max(1, size // 4 // self.size) * self.size
        runners = self._runners(count)
        tensors = {who: self._tensor(who, count) for who in runners}
        wrong = {who: 0 if who == BOUND else self._wrong(run, tensors[who]) for who, run in runners.items()}
        times = self._timed(runners, tensors)
        forecast = self.group.forecast if self.collective is Collective.ALL_REDUCE else None
        for who, took in times.items():
            quarters = np.quantile(took, [0.25, 0.5, 0.75])
            seconds = float(quarters[1])
            choice = self._choices(count).get(who)
            predicted = (
                forecast.seconds(choice, self.collective, 4 * count)
                if forecast and choice and choice.transport != "c10d"
                else None
            )
            yield BenchRow(
                who,
                self.collective.value,
                self.size,
                4 * count,
                seconds,
                float(quarters[2] - quarters[0]),
                4 * count / seconds,
                4 * count / seconds * _BUS[self.collective](self.size),
                wrong[who],
                len(took),
                predicted,
            )
        for tensor in tensors.values():
            self._free(tensor)

    def _choices(self, count: int) -> dict[str, AlgorithmChoice]:
        given = {text: AlgorithmChoice.parse(text) for text in self.request.choices}
        if not self.request.candidates or not self.group.tuner:
            return given
        like = self._tensor("windows" if "windows" in self.group.transports else "", count)
        choices = self.group.tuner.candidates(self.group.size_class(self.collective, like)).values()
        self._free(like)
        return given | {str(choice): choice for choice in choices if choice.transport != "c10d"}

    def _runners(self, count: int) -> dict[str, Runner]:
        kind = CollectiveOp(self.collective, torch.float32)
        runners: dict[str, Runner] = {}
        for who in self.request.against:
            runners[who] = self._by_mpi if who == "mpi" else partial(self._natively, who)
        if self.group.endpoint.arenas and "windows" in self.group.transports:
            runners["mimatrix arena"] = lambda tensor: self._ours(kind, tensor, None)
        runners["mimatrix"] = lambda tensor: self._ours(kind, tensor, None)
        if "send_recv" not in self.group.transports:
            runners[BOUND] = lambda tensor: tensor.mul_(1.0)  # type: ignore[assignment]
        for who, choice in self._choices(count).items():
            runners[who] = lambda tensor, choice=choice: self._ours(kind, tensor, choice)  # type: ignore[misc]
        return runners

    def _tensor(self, who: str, count: int) -> torch.Tensor:
        in_arena = who == "mimatrix arena" or who.startswith("windows")
        where = "cuda" if self.device == "cuda" else next(iter(self.group.endpoint.arenas))
        return self.group.empty(count, kind=where) if in_arena else torch.empty(count, device=self.device)

    def _free(self, tensor: torch.Tensor) -> None:
        for arena in self.group.endpoint.arenas.values():
            if placed := arena.slot_of(tensor):
                placed[0].free()

    def _ours(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice | None) -> None:
        match kind.collective:
            case Collective.REDUCE_SCATTER:
                self.group.reduce_scatter(tensor, choice=choice)
            case Collective.ALL_GATHER:
                self.group.all_gather(tensor, choice=choice)
            case _:
                self.group.all_reduce(tensor, choice=choice)

    def _natively(self, who: str, tensor: torch.Tensor) -> None:
        native = self.group.natives["cuda" if who == "nccl" else "cpu"]
        native.run(self.collective, tensor, "sum", 0)
        if tensor.is_cuda:
            torch.cuda.synchronize()

    def _by_mpi(self, tensor: torch.Tensor) -> None:
        from mpi4py import MPI

        array = tensor.cpu().numpy()
        each = len(array) // self.size
        mine = array[self.rank * each : (self.rank + 1) * each]
        match self.collective:
            case Collective.REDUCE_SCATTER:
                result = np.empty_like(mine)
                self.mpi.Reduce_scatter_block(array, result)  # type: ignore[union-attr]
                mine[:] = result
            case Collective.ALL_GATHER:
                self.mpi.Allgather(MPI.IN_PLACE, array)  # type: ignore[union-attr]
            case _:
                self.mpi.Allreduce(MPI.IN_PLACE, array)  # type: ignore[union-attr]

    def _wrong(self, runner: Runner, tensor: torch.Tensor) -> int:
        """Elements that differ from what they must be, over all ranks."""
        pattern = torch.arange(tensor.numel()) % 17
        tensor.copy_(pattern + self.rank)
        each = tensor.numel() // self.size
        if self.collective is Collective.ALL_GATHER:
            wanted = (pattern + torch.arange(tensor.numel()) // each).float()
        else:
            wanted = (self.size * pattern + self.size * (self.size - 1) // 2).float()
        runner(tensor)
        seen = slice(None)
        if self.collective is Collective.REDUCE_SCATTER:
            seen = slice(self.rank * each, (self.rank + 1) * each)
        bad = torch.tensor([float((tensor[seen] != wanted[seen]).sum())])
        dist.all_reduce(bad)
        return int(bad)

    def _timed(self, runners: dict[str, Runner], tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        """Turn by turn until the time is used up; a turn counts as long as its slowest rank took."""
        found: dict[str, list[float]] = {who: [] for who in runners}
        started, turns = time.monotonic(), 0
        assert self.group.native
        while True:
            took = []
            for who, runner in runners.items():
                tensors[who].zero_()
                self.group.barrier()
                begun = time.perf_counter()
                runner(tensors[who])
                took.append(time.perf_counter() - begun)
            spent = time.monotonic() - started
            *agreed, spent = self.group.native.slowest([*took, spent])
            turns += 1
            if turns > 1:  # the first warms up
                for who, seconds in zip(runners, agreed, strict=True):
                    found[who].append(seconds)
            if (turns > 5 and spent > self.request.seconds) or turns > 200:
                return found

    def _say(self, value: object) -> None:
        if self.rank == 0:
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(f"MPI cannot be used here ({error}); install mpi4py and openmpi, or leave mpi out") from error
    return MPI.COMM_WORLD


def _variables_from(mpi: Any) -> None:
    os.environ |= {"RANK": str(mpi.rank), "WORLD_SIZE": str(mpi.size), "LOCAL_RANK": str(mpi.rank)}


def main() -> None:
    """Measure what the request asks for."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    bench = Bench(BenchRequest(**json.loads(sys.argv[1])))
    rows = [asdict(row) for row in bench.rows()]
    bench._say({"rows": rows, "why": bench.why() if bench.request.explain else {}})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
