"""Every `MIMATRIX_*` environment variable: its name, what it is for, and how to read it.

No other module spells one of these names. `docs/environment.md` is generated from this list.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: who sets it, and what it means."""

    name: str
    set_by: str
    meaning: str
    example: str = ""

    def get(self, environ: Mapping[str, str] | None = None, default: str = "") -> str:
        """Return the value in `environ` (this process's environment if omitted), or `default` if unset or empty."""
        return (os.environ if environ is None else environ).get(self.name) or default


ADDRESS = Variable(
    "MIMATRIX_ADDRESS",
    "you, `mimatrix lab run`",
    "Address at which other hosts reach this rank. Default: the address of the interface that leads to `MASTER_ADDR`, "
    "or to a rank of another host if that is a loopback address.",
    "10.0.0.7",
)
ARENA = Variable(
    "MIMATRIX_ARENA",
    "you",
    "Size of the memory that each rank opens to its peers, per kind of device. "
    "Default: all host memory (used only as it is touched), or 512 MiB of a GPU.",
    "2GiB",
)
CACHE = Variable(
    "MIMATRIX_CACHE",
    "you",
    "Directory for tuning tables and device profiles that later runs reuse, in `mimatrix/` below it. "
    "Default: `XDG_CACHE_HOME`, or `~/.cache`.",
    "/scratch/cache",
)
CHECKPOINT_EVERY = Variable(
    "MIMATRIX_CHECKPOINT_EVERY",
    "you, job server",
    "How often a run saves by itself, if `mimatrix.init` is not given `checkpoint_every`: `15m`, `500 steps` or "
    "`never`. Default: never; the job server sets `15m`, unless a job is submitted with another value.",
    "15m",
)
CLUSTER = Variable(
    "MIMATRIX_CLUSTER",
    "you, `mimatrix lab run`",
    "TOML file that describes the cluster of this job; device i of the file is rank i, and the file of rank 0 counts. "
    'The tuner tries only algorithms that it predicts to be fast there, and `mode="auto"` uses its links instead of '
    "measuring them. Ignored unless it has one device per rank. Default: what an earlier job on these hosts measured.",
    "lab.toml",
)
CUT_OFF_S = Variable(
    "MIMATRIX_CUT_OFF_S",
    "you, where `ray start` runs",
    "Seconds without contact to the head after which a Ray node kills the jobs that it runs. Default: 60.",
    "30",
)
DATA = Variable(
    "MIMATRIX_DATA",
    "you",
    "Directory of the job server's database, logs and checkpoints; commands find address and token of a local server "
    "there. Default: `~/.local/share/mimatrix`.",
    "/srv/mimatrix",
)
FRESH = Variable(
    "MIMATRIX_FRESH",
    "you, `mimatrix profile --fresh`",
    "If set, measure devices again instead of using cached profiles.",
    "1",
)
HOST = Variable(
    "MIMATRIX_HOST",
    "you, `mimatrix lab run`, `mimatrix lab gpu`",
    "Name of this host. Ranks with the same name read each other's memory directly. "
    "Default: host name, boot id and network namespace.",
    "node3",
)
MEMORY = Variable(
    "MIMATRIX_MEMORY",
    "you, `mimatrix run --memory`",
    "Memory that a rank on a CPU may use, in bytes or with a unit; plans stay below it. "
    "The limit of its cgroup and its part of the free memory count anyway.",
    "512MB",
)
NODE_FOLDER = Variable(
    "MIMATRIX_NODE_FOLDER",
    "you, where `ray start` runs",
    "Directory on a Ray node for the files and the output of jobs. Default: `~/.local/share/mimatrix/nodes`.",
    "/scratch/jobs",
)
PROFILE = Variable(
    "MIMATRIX_PROFILE",
    "you, `mimatrix profile`",
    "Only measure: `run.prepare` writes the profiles of all ranks to this file and ends the script with exit code 0. "
    "Set it on all ranks; rank 0 writes.",
    "profile.json",
)
PROFILE_CLUSTER = Variable(
    "MIMATRIX_PROFILE_CLUSTER",
    "you, `mimatrix profile --cluster`",
    "With `MIMATRIX_PROFILE`: also measure the links between ranks, and write them to this file as a cluster.",
    "lab.toml",
)
RDMA = Variable(
    "MIMATRIX_RDMA",
    "you",
    "`1` or `0`: use RDMA between the groups of hybrid mode, or do not. "
    "Default: use it if the host has an RDMA device. It always needs NIXL.",
    "0",
)
SERVER = Variable(
    "MIMATRIX_SERVER",
    "you, job server",
    "URL of the job server. Default: the one that runs on this machine for the same user.",
    "http://lab:7700",
)
SILENCE_S = Variable(
    "MIMATRIX_SILENCE_S",
    "you",
    "Seconds after which a host whose kernel does not answer counts as lost, from 1 on. A busy or stopped process does "
    "not count, since its kernel answers, unless more waits for it than the socket buffers hold. Default: 8.",
    "20",
)
SLOWDOWN = Variable(
    "MIMATRIX_SLOWDOWN",
    "you",
    "How `--speeds` slows local workers down: `quota` (cgroups, needs root) or `signals` (stop and continue). "
    "Default: the first that works.",
    "signals",
)
TOKEN = Variable(
    "MIMATRIX_TOKEN",
    "you",
    "Token that the job server accepts, as printed by `mimatrix tokens add`. Default: the one in the data folder of "
    "the server on this machine. A worker removes it before it runs the script.",
)
TRANSPORT = Variable(
    "MIMATRIX_TRANSPORT",
    "you",
    "For debugging: the transport of all collectives (`windows`, `mixed`, `send_recv` or `c10d`), optionally followed "
    "by the algorithm of all-reduces. The value of rank 0 counts. Default: whatever was measured to be fastest.",
    "send_recv ring",
)

CHECKPOINTS = Variable(
    "MIMATRIX_CHECKPOINTS",
    "job server",
    "Directory for the checkpoints of this job; a preempted job saves there. Save to it and load from it in scripts.",
    "/srv/mimatrix/checkpoints/job-7",
)
GENERATION = Variable("MIMATRIX_GENERATION", "job server", "How many times this job has been started, from 1.", "2")
GROUPS = Variable(
    "MIMATRIX_GROUPS",
    "`mimatrix run --groups`, `mimatrix submit --groups`",
    "The ranks of each group of hybrid mode, as JSON.",
    "[[0, 1], [2, 3]]",
)
JOB = Variable("MIMATRIX_JOB", "job server", "Number of the job that this worker belongs to.", "7")
JOB_SECRET = Variable(
    "MIMATRIX_JOB_SECRET",
    "`mimatrix run`, `mimatrix lab`, job server, you",
    "Secret that all ranks of a job share, and from which the token of its coordinator is made. Default: a random one "
    "that ranks exchange through the store of torch.distributed, which everyone who reaches its port can read.",
)
RANK = Variable("MIMATRIX_RANK", "job server", "Rank of this worker in its job.", "0")
REJOINS = Variable(
    "MIMATRIX_REJOINS",
    "job server",
    "How many times the group of this worker was restarted while other groups of hybrid mode kept running.",
    "1",
)
RENDEZVOUS = Variable(
    "MIMATRIX_RENDEZVOUS",
    "`mimatrix run --groups`, job server",
    "File through which a restarted group of hybrid mode finds the groups that kept running. All hosts must see it.",
    "/srv/mimatrix/checkpoints/job-7/.meeting-1",
)
TOKEN_FD = Variable(
    "MIMATRIX_TOKEN_FD",
    "job server",
    "File descriptor from which a worker reads its token, once: `/proc` shows the environment in which a process was "
    "started for as long as it lives.",
    "3",
)
SPEED = Variable(
    "MIMATRIX_SPEED",
    "`mimatrix run --speeds`",
    "Fraction of full speed that this worker is slowed down to; profiles measured at one speed are not used at "
    "another.",
    "0.5",
)


def variables() -> tuple[Variable, ...]:
    """Return every variable: first those that people set, then those that only launchers set, each by name."""
    listed = [value for value in globals().values() if isinstance(value, Variable)]
    return tuple(sorted(listed, key=lambda variable: (not variable.set_by.startswith("you"), variable.name)))
