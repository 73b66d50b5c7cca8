"""The environment of a worker: the variables of torchrun, so that a script for torchrun runs unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass

from mimatrix.api.torchrun_env import Place, torchrun_variables
from mimatrix.core.environment import MEMORY, RENDEZVOUS, SPEED

ADDRESS = "127.0.0.1"
# Of a launcher that we may run under: its error file, the speed of its worker and the rendezvous of its groups are not
# those of our workers.
_NOT_INHERITED = ("TORCHELASTIC_ERROR_FILE", SPEED.name, RENDEZVOUS.name)


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """One start of all workers: what is the same for all of them."""

    ranks: int
    port: int
    run_id: str
    restarts: int
    max_restarts: int
    threads: str


def emulated_device(speed: float, memory_bytes: int | None) -> dict[str, str]:
    """Return the variables for the device that a worker emulates: measurements at one speed do not hold at another."""
    variables = {} if speed == 1 else {SPEED.name: f"{speed:g}"}
    return variables if memory_bytes is None else variables | {MEMORY.name: str(memory_bytes)}


def build_environment(
    attempt: RunAttempt, rank: int, outside: Mapping[str, str], own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment of a worker: `outside`, torchrun's variables for a single machine, its own."""
    kept = {name: value for name, value in outside.items() if name not in _NOT_INHERITED}
    place = Place(rank, attempt.ranks, rank, attempt.ranks, ADDRESS, attempt.port)
    return {
        **kept,
        **torchrun_variables(place, attempt.run_id, attempt.restarts, attempt.max_restarts),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": outside.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": attempt.threads,
        **(own or {}),
    }


def omp_num_threads(threads: int | None, outside: Mapping[str, str]) -> str:
    """Return the value of OMP_NUM_THREADS: `threads`, what is set outside, or one."""
    return str(threads) if threads is not None else outside.get("OMP_NUM_THREADS", "") or "1"
