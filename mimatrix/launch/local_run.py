"""Run workers on this machine: all start together, end together, and are restarted together when one is lost.

If there are groups that do not wait for each other, each of them does so by itself.
"""

import json
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from mimatrix.core.environment import GROUPS, JOB_SECRET, RENDEZVOUS
from mimatrix.core.exit_codes import BAD_INPUT
from mimatrix.hybrid.groups import Groups, locate_rank
from mimatrix.launch.environment import RunAttempt, build_environment, emulated_device, omp_num_threads
from mimatrix.launch.throttle import Slowdown, slow_down
from mimatrix.launch.throttle.cpu_quota import remove_leftovers
from mimatrix.launch.throttle.memory_limit import limit_memory, wrap_command
from mimatrix.processes.group import Command, run_process_group
from mimatrix.processes.group_exit import GroupExit, GroupExitKind
from mimatrix.processes.ports import free_port
from mimatrix.processes.signals import Terminated, raise_on_termination

_LOG_PREFIX = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ (?=mimatrix: )")
"""Time and level of a line that was logged."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What to run, once for each rank. `speeds` and `memory` have a number for each rank, or none at all."""

    command: tuple[str, ...]
    ranks: int = 1
    speeds: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()
    """Bytes."""
    slow_by: str = ""
    threads: int | None = None
    max_restarts: int = 0
    grace_s: float = 5.0
    timeout_s: float | None = None
    groups: Groups = ()
    """Ranks that end together; a lost group leaves the others running. If empty, all ranks end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended: the first worker that failed in the last attempt, and how."""

    exit: GroupExit
    restarts: int
    seconds: float
    ranks: int
    slowed_by: str

    @property
    def code(self) -> int:
        """The exit code to pass on."""
        return self.exit.code

    def describe(self) -> str:
        """Return why the run ended, in one sentence; nothing if all workers exited with 0."""
        if self.exit.kind is not GroupExitKind.FAILED:
            return self.exit.describe()
        restarts = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
        return describe_failure(self.exit) + (f" after {restarts}" if self.restarts else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the value, and the sentence for people."""
        return {
            "code": self.code,
            "kind": self.exit.kind.value,
            "rank": int(self.exit.label) if self.exit.label else None,
            "signal": self.exit.signal,
            "reason": self.describe(),
            "restarts": self.restarts,
            "seconds": self.seconds,
            "ranks": self.ranks,
            "slowed_by": self.slowed_by,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """All ranks are started again, or those of a group."""

    failure: GroupExit
    number: int
    limit: int
    who: str

    def describe(self) -> str:
        """Return what happened and what follows, in one sentence."""
        again = f"{self.who} will be started again (restart {self.number} of {self.limit})"
        return f"{describe_failure(self.failure)}; {again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """There is no further attempt, of all ranks or of a group."""

    exit: GroupExit
    group: str = ""

    def describe(self) -> str:
        """Return what happened to the group, in one sentence."""
        return f"{self.group} was lost, the others keep training: {describe_failure(self.exit)}"


def run_local(
    spec: RunSpec, outside: Mapping[str, str], out: BinaryIO, err: BinaryIO, say: Callable[[str], None]
) -> RunResult:
    """Run all workers until they have ended. Whatever happens, no worker and no control group is left over.

    Args:
        spec: What to run.
        outside: The environment that the workers inherit.
        out: Gets their standard output.
        err: Gets their standard error.
        say: Gets a sentence for each restart.
    """
    began_s = time.monotonic()
    attempts = _Attempts(spec, outside, (out, err), say)
    remove_leftovers()
    try:
        with (
            raise_on_termination(),
            TemporaryDirectory(prefix="mimatrix-") if spec.groups else nullcontext("") as attempts.folder,
            slow_down(spec.speeds, _cpus_per_worker(spec, outside), spec.slow_by) as attempts.slowdown,
            limit_memory(spec.memory, say) as attempts.limits,
        ):
            ended = attempts.run()
    except Terminated as terminated:
        ended = GroupExit.interrupted(terminated.number)
    return RunResult(
        exit=ended,
        restarts=attempts.restarts,
        seconds=time.monotonic() - began_s,
        ranks=spec.ranks,
        slowed_by=attempts.slowdown.method,
    )


def decide(ended: GroupExit, spec: RunSpec, restarts: int) -> Restart | Finish:
    """Decide whether to restart all ranks: if a worker was lost, its input was not bad, and a restart is left."""
    if ended.kind is GroupExitKind.TIMED_OUT and spec.timeout_s is not None:
        # The group knew what was left of the limit.
        return Finish(exit=replace(ended, timeout_s=spec.timeout_s))
    if ended.kind is not GroupExitKind.FAILED or ended.code == BAD_INPUT or restarts >= spec.max_restarts:
        return Finish(exit=ended)
    who = f"all {spec.ranks} ranks" if spec.ranks > 1 else "it"
    return Restart(failure=ended, number=restarts + 1, limit=spec.max_restarts, who=who)


def decide_group(failure: GroupExit, spec: RunSpec, group: str, restarts: int) -> Restart | Finish:
    """Decide whether to restart a group that was lost while others run."""
    if failure.code == BAD_INPUT or restarts >= spec.max_restarts:
        return Finish(exit=failure, group=group)
    return Restart(failure=failure, number=restarts + 1, limit=spec.max_restarts, who=group)


def describe_failure(failure: GroupExit) -> str:
    """Return which rank failed, and its last line; how it ended, if it was killed or wrote none."""
    if failure.last_line and failure.signal is None:
        return f"rank {failure.label} failed: {_without_prefixes(failure)}"
    return f"rank {failure.label} {failure.describe_end()}"


def _without_prefixes(failure: GroupExit) -> str:
    """Return the last line without what our log and torch put in front of it."""
    line = _LOG_PREFIX.sub("", failure.last_line)
    return line.removeprefix("mimatrix: ").removeprefix(f"[rank{failure.label}]: ")


class _Attempts:
    """The attempts of one run: how many there were, and which ports are used up."""

    def __init__(
        self, spec: RunSpec, outside: Mapping[str, str], sinks: tuple[BinaryIO, BinaryIO], say: Callable[[str], None]
    ) -> None:
        self.restarts = 0
        self.slowdown = Slowdown()
        self.limits: Mapping[int, Path] = {}
        self.folder = ""
        """Where groups write how a restarted group finds them."""
        self._spec = spec
        self._outside = outside
        self._sinks = sinks
        self._say = say
        self._run_id = uuid.uuid4().hex
        self._secret = secrets.token_hex(32)
        self._ports: set[int] = set()

    def run(self) -> GroupExit:
        """Start all workers, and again when one is lost, until an attempt is the last."""
        timeout_s = self._spec.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            decision = decide(self._run_once(deadline), self._spec, self.restarts)
            if isinstance(decision, Finish):
                return decision.exit
            self._say(decision.describe())
            self.restarts += 1

    def _run_once(self, deadline: float | None) -> GroupExit:
        attempt = self._next_attempt()
        rendezvous = str(Path(self.folder) / f"meeting-{self.restarts}")
        return run_process_group(
            [self._command(attempt, rank, rendezvous) for rank in range(self._spec.ranks)],
            *self._sinks,
            grace_s=self._spec.grace_s,
            timeout_s=None if deadline is None else max(0.0, deadline - time.monotonic()),
            around=self.slowdown.beside,
            restart=lambda group, failure: self._restart_group(attempt, rendezvous, group, failure),
        )

    def _next_attempt(self) -> RunAttempt:
        spec = self._spec
        threads = omp_num_threads(spec.threads, self._outside)
        port = free_port(taken=self._ports)
        return RunAttempt(spec.ranks, port, self._run_id, self.restarts, spec.max_restarts, threads)

    def _restart_group(self, attempt: RunAttempt, rendezvous: str, group: str, failure: GroupExit) -> Sequence[Command]:
        """Return the commands of a group that was lost, if it is to be restarted."""
        decision = decide_group(failure, self._spec, group, self.restarts)
        self._say(decision.describe())
        if isinstance(decision, Finish):
            return ()
        self.restarts += 1
        attempt = replace(attempt, restarts=self.restarts)
        commands = [self._command(attempt, rank, rendezvous) for rank in range(self._spec.ranks)]
        return [command for command in commands if command.subgroup == group]

    def _command(self, attempt: RunAttempt, rank: int, rendezvous: str) -> Command:
        spec = self._spec
        speed = spec.speeds[rank] if spec.speeds else 1.0
        own = emulated_device(speed, spec.memory[rank] if spec.memory else None)
        group = ""
        if spec.groups:
            own |= {GROUPS.name: json.dumps(spec.groups), RENDEZVOUS.name: rendezvous}
            group = f"group {locate_rank(spec.groups, rank)[0]}"
        environment = build_environment(attempt, rank, self._outside, own | {JOB_SECRET.name: self._secret})
        argv = wrap_command(self.limits.get(rank), spec.command)
        return Command(str(rank), argv, environment, self.slowdown.joins.get(rank), group)


def _cpus_per_worker(spec: RunSpec, outside: Mapping[str, str]) -> int:
    """Return how many CPUs a worker of full speed uses: one for each of its threads."""
    threads = re.match(r"\s*([1-9]\d*)", omp_num_threads(spec.threads, outside))
    return int(threads[1]) if threads else 1
