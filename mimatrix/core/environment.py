"""Every `MIMATRIX_*` environment variable: its name, what it is for, and how to read it.

No other module spells one of these names. `docs/environment.md` is generated from this list.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SetBy = Literal["you", "a launcher"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: who sets it, and what it means."""

    name: str
    set_by: SetBy
    meaning: str
    example: str = ""

    def get(self, environ: Mapping[str, str] | None = None, default: str = "") -> str:
        """Return the value in `environ` (this process's environment if omitted), or `default` if unset or empty."""
        return (os.environ if environ is None else environ).get(self.name) or default


ADDRESS = Variable("MIMATRIX_ADDRESS", "you", "Address at which other hosts reach this rank.", "10.0.0.7")
ARENA = Variable(
    "MIMATRIX_ARENA", "you", "Size of the memory of each rank and device that peers can read directly.", "2GiB"
)
CACHE = Variable("MIMATRIX_CACHE", "you", "Directory for measured tuning tables and profiles.", "/scratch/cache")
CLUSTER = Variable("MIMATRIX_CLUSTER", "you", "TOML file that describes the cluster of this job.", "lab.toml")
DATA = Variable("MIMATRIX_DATA", "you", "Directory in which the job server keeps its state.", "/srv/mimatrix")
FRESH = Variable("MIMATRIX_FRESH", "you", "If set, measure devices again instead of using cached profiles.", "1")
HOST = Variable("MIMATRIX_HOST", "you", "Name of this host; ranks with the same name share memory.", "node3")
MEMORY = Variable("MIMATRIX_MEMORY", "you", "Memory that a CPU rank may use.", "512MB")
NODE_FOLDER = Variable(
    "MIMATRIX_NODE_FOLDER", "you", "Directory on each Ray node for jobs and their output; set it where Ray starts.", ""
)
CUT_OFF_S = Variable(
    "MIMATRIX_CUT_OFF_S", "you", "Seconds after which a Ray node that lost its head kills its jobs (default 60).", "60"
)
PROFILE = Variable("MIMATRIX_PROFILE", "you", "Measure, write the profiles to this file, and exit.", "profile.json")
PROFILE_CLUSTER = Variable(
    "MIMATRIX_PROFILE_CLUSTER", "you", "With MIMATRIX_PROFILE: write the measured cluster to this file.", "lab.toml"
)
RDMA = Variable("MIMATRIX_RDMA", "you", "1 or 0: use RDMA between groups of hybrid mode, or do not.", "0")
SERVER = Variable("MIMATRIX_SERVER", "you", "URL of the job server.", "https://lab:7860")
SLOWDOWN = Variable(
    "MIMATRIX_SLOWDOWN", "you", "How local workers are slowed down by `mimatrix run --speeds`.", "quota"
)
TOKEN = Variable("MIMATRIX_TOKEN", "you", "Access token for the job server.", "")
TRANSPORT = Variable(
    "MIMATRIX_TRANSPORT", "you", "Carry all collectives by this transport, or by this transport and algorithm.", "c10d"
)

CHECKPOINTS = Variable("MIMATRIX_CHECKPOINTS", "a launcher", "Directory for the checkpoints of this job.")
GENERATION = Variable("MIMATRIX_GENERATION", "a launcher", "How many times the job has been started.")
GROUPS = Variable("MIMATRIX_GROUPS", "a launcher", "JSON list of the ranks of each group in hybrid mode.")
JOB = Variable("MIMATRIX_JOB", "a launcher", "Number of the job that this worker belongs to.")
RANK = Variable("MIMATRIX_RANK", "a launcher", "Rank of this worker in its job.")
REJOINS = Variable(
    "MIMATRIX_REJOINS", "a launcher", "How many times this group was restarted while others kept running."
)
RENDEZVOUS = Variable("MIMATRIX_RENDEZVOUS", "a launcher", "File through which a restarted group finds the others.")
SPEED = Variable("MIMATRIX_SPEED", "a launcher", "Speed that this worker is slowed down to; profiles depend on it.")


def variables() -> tuple[Variable, ...]:
    """Return every variable, those that people set first."""
    known = [value for value in globals().values() if isinstance(value, Variable)]
    return tuple(sorted(known, key=lambda variable: (variable.set_by != "you", variable.name)))
