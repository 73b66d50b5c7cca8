"""What every worker is told: the variables of torchrun, so that a script for torchrun runs unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass

from mimatrix.api.torchrun_env import Place, torchrun_variables
from mimatrix.core.environment import MEMORY, RENDEZVOUS, SPEED

ADDRESS = "127.0.0.1"
# Of a launcher that we ourselves may run under: its error file, its worker's speed and the word that its groups leave
# are not our workers'.
_FOREIGN = ("TORCHELASTIC_ERROR_FILE", SPEED.name, RENDEZVOUS.name)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all workers: what all of them are told alike."""

    ranks: int
    port: int
    run_id: str
    restarts: int
    max_restarts: int
    threads: str


def emulated(speed: float, memory_bytes: int | None) -> dict[str, str]:
    """What a worker is told of the device that it plays: what was measured at one speed does not hold at another."""
    told = {} if speed == 1 else {SPEED.name: f"{speed:g}"}
    return told if memory_bytes is None else told | {MEMORY.name: str(memory_bytes)}


def environment(
    attempt: Attempt, rank: int, outside: Mapping[str, str], own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment of one worker: the one outside, torchrun's variables for a single machine, its own."""
    kept = {name: value for name, value in outside.items() if name not in _FOREIGN}
    place = Place(rank, attempt.ranks, rank, attempt.ranks, ADDRESS, attempt.port)
    return {
        **kept,
        **torchrun_variables(place, attempt.run_id, attempt.restarts, attempt.max_restarts),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": outside.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": attempt.threads,
        **(own or {}),
    }


def threads_text(threads: int | None, outside: Mapping[str, str]) -> str:
    """The value of OMP_NUM_THREADS: what is asked for, what is set outside, or one."""
    return str(threads) if threads is not None else outside.get("OMP_NUM_THREADS", "") or "1"
