"""Workers on this machine: all are started together, all end together, and all are started again when one is lost.

Where there are groups that do not wait for each other, each of them does so by itself.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from mimatrix.core.environment import GROUPS, RENDEZVOUS
from mimatrix.core.exit_codes import BAD_INPUT, TIMED_OUT
from mimatrix.hybrid.groups import Groups, locate_rank
from mimatrix.launch.environment import Attempt, emulated, environment, threads_text
from mimatrix.launch.throttle import Slowdown, slow_down
from mimatrix.launch.throttle.cpu_quota import remove_remains
from mimatrix.launch.throttle.memory_limit import joining, limit_memory
from mimatrix.processes.group import Command, Ending, run_together
from mimatrix.processes.ports import free_port
from mimatrix.processes.signals import Told, raised

_LOG_PREFIX = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ (?=mimatrix: )")
"""Time and level of a line that was logged."""
_KILLED = 128
"""From here on, exit codes are those of signals."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, once for each rank. `speeds` and `memory` have a number for each rank, or none at all."""

    words: tuple[str, ...]
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
    """Ranks that go together; a group that is lost leaves the others running. None: all go together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: the exit code of the first worker that failed in the last attempt, and why."""

    code: int
    reason: str
    restarts: int
    seconds: float
    ranks: int
    slowed_by: str


@dataclass(frozen=True, slots=True)
class Again:
    """All ranks are to be started once more, or those of a group."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """No attempt follows."""

    code: int
    reason: str


def run_local(
    launch: Launch, outside: Mapping[str, str], out: BinaryIO, err: BinaryIO, say: Callable[[str], None]
) -> Outcome:
    """Run all workers in the environment `outside` until they have ended; `say` gets a sentence for each restart.

    Whatever happens, no worker and no control group stays behind.
    """
    began_s = time.monotonic()
    attempts = _Attempts(launch, outside, (out, err), say)
    remove_remains()
    try:
        with (
            raised(),
            TemporaryDirectory(prefix="mimatrix-") if launch.groups else nullcontext("") as attempts.folder,
            slow_down(launch.speeds, _processors(launch, outside), launch.slow_by) as attempts.slowdown,
            limit_memory(launch.memory, say) as attempts.limits,
        ):
            over = attempts.run()
    except Told as told:
        over = Over(128 + told.number, f"ended by {told}")
    seconds = time.monotonic() - began_s
    return Outcome(over.code, over.reason, attempts.restarts, seconds, launch.ranks, attempts.slowdown.way)


def decide(ending: Ending, launch: Launch, restarts: int) -> Again | Over:
    """Whether to start again after `restarts` restarts: when a worker was lost that bad input is not to blame for."""
    if not ending.label:
        late = ending.code == TIMED_OUT
        return Over(ending.code, f"not done after {launch.timeout_s:g} s" if late else ending.reason)
    reason = _describe(ending)
    if ending.code == BAD_INPUT or restarts >= launch.max_restarts:
        return Over(ending.code, reason + (f" after {_times(restarts)}" if restarts else ""))
    every = f"all {launch.ranks} ranks" if launch.ranks > 1 else "it"
    return Again(f"{reason}; {every} will be started again (restart {restarts + 1} of {launch.max_restarts})")


def decide_group(ending: Ending, launch: Launch, group: str, restarts: int) -> Again | Over:
    """The same for a group that is lost while others go on."""
    reason = _describe(ending)
    if ending.code == BAD_INPUT or restarts >= launch.max_restarts:
        return Over(ending.code, f"{group} was lost, the others go on: {reason}")
    return Again(f"{reason}; {group} will be started again (restart {restarts + 1} of {launch.max_restarts})")


def _describe(ending: Ending) -> str:
    """Who failed and what it said last; if it said nothing or was killed, how it ended."""
    if ending.last_line and ending.code < _KILLED:
        return f"rank {ending.label} failed: {_last_words(ending)}"
    return f"rank {ending.label}{ending.reason.removeprefix(f'[{ending.label}]')}"


def _last_words(ending: Ending) -> str:
    """The last line without what we, our log and torch put in front."""
    return _LOG_PREFIX.sub("", ending.last_line).removeprefix("mimatrix: ").removeprefix(f"[rank{ending.label}]: ")


class _Attempts:
    """The attempts of one launch: how many there were, and which ports are used up."""

    def __init__(
        self,
        launch: Launch,
        outside: Mapping[str, str],
        sinks: tuple[BinaryIO, BinaryIO],
        say: Callable[[str], None],
    ) -> None:
        self.restarts = 0
        self.slowdown = Slowdown()
        self.limits: Mapping[int, Path] = {}
        self.folder = ""
        """Where groups leave word for those of them that come again."""
        self._launch = launch
        self._outside = outside
        self._sinks = sinks
        self._say = say
        self._run_id = uuid.uuid4().hex
        self._ports: set[int] = set()

    def run(self) -> Over:
        """Start all, and again when one is lost, until an attempt is the last."""
        timeout_s = self._launch.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            decision = decide(self._once(deadline), self._launch, self.restarts)
            if isinstance(decision, Over):
                return decision
            self._say(decision.reason)
            self.restarts += 1

    def _once(self, deadline: float | None) -> Ending:
        attempt = self._attempt()
        meeting = str(Path(self.folder) / f"meeting-{self.restarts}")
        return run_together(
            [self._command(attempt, rank, meeting) for rank in range(self._launch.ranks)],
            *self._sinks,
            grace_s=self._launch.grace_s,
            timeout_s=None if deadline is None else max(0.0, deadline - time.monotonic()),
            beside=self.slowdown.beside,
            again=lambda team, ending: self._group_again(attempt, meeting, team, ending),
        )

    def _attempt(self) -> Attempt:
        launch = self._launch
        threads = threads_text(launch.threads, self._outside)
        port = free_port(taken=self._ports)
        return Attempt(launch.ranks, port, self._run_id, self.restarts, launch.max_restarts, threads)

    def _group_again(self, attempt: Attempt, meeting: str, team: str, ending: Ending) -> Sequence[Command]:
        """The commands of a group that is lost, if it is to be started again."""
        decision = decide_group(ending, self._launch, team, self.restarts)
        self._say(decision.reason)
        if isinstance(decision, Over):
            return ()
        self.restarts += 1
        known = replace(attempt, restarts=self.restarts)
        every = [self._command(known, rank, meeting) for rank in range(self._launch.ranks)]
        return [command for command in every if command.team == team]

    def _command(self, attempt: Attempt, rank: int, meeting: str) -> Command:
        launch = self._launch
        own = emulated(launch.speeds[rank] if launch.speeds else 1.0, launch.memory[rank] if launch.memory else None)
        words = joining(self.limits.get(rank), launch.words)
        team = ""
        if launch.groups:
            own |= {GROUPS.name: json.dumps(launch.groups), RENDEZVOUS.name: meeting}
            team = f"group {locate_rank(launch.groups, rank)[0]}"
        known = environment(attempt, rank, self._outside, own)
        return Command(str(rank), words, known, self.slowdown.joins.get(rank), team)


def _processors(launch: Launch, outside: Mapping[str, str]) -> int:
    """How many a worker of full speed uses: one for each of its threads."""
    found = re.match(r"\s*([1-9]\d*)", threads_text(launch.threads, outside))
    return int(found[1]) if found else 1


def _times(restarts: int) -> str:
    return "1 restart" if restarts == 1 else f"{restarts} restarts"
