"""The agent of one node: a Ray actor that starts the node's parts of teams, each by a local launcher.

It runs as long as Ray does on its node, without any server. When it ends, however that happens, a watchdog process
kills all that it started: if a node is reported as gone, nothing runs there for long.
"""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimatrix.core.environment import NODE_FOLDER
from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.launch.devices import find_devices
from mimatrix.launch.launcher import LogPart, Phase
from mimatrix.launch.local.launch_spec import validate_name
from mimatrix.launch.local.launcher import LocalLauncher
from mimatrix.launch.ray.fencing import fence
from mimatrix.launch.ray.messages import (
    decode_failure,
    decode_part,
    decode_raylet,
    decode_reply,
    decode_request,
    encode_answer,
    encode_error,
    encode_failure,
    encode_log_part,
    encode_part_state,
    encode_request,
)
from mimatrix.launch.ray.nodes import node_info
from mimatrix.launch.ray.split import FirstFailure, NodePart, PartState, find_local_failure
from mimatrix.launch.start_failure import StartError, StartFailure, TeamRefusedError, is_transient
from mimatrix.launch.team_json import DECODE_ERRORS, encode_node

_CODE = Path(__file__).parents[3]
_FOLLOW_S = 0.1
_DROP_S = 5.0
# How long one look waits for the other nodes, and for how long they are told of a failure again and again.
_REPLY_S, _REPORT_S = 1.0, 60.0
_SWEEP_S = 7 * 86_400.0
_OOM_SCORE = Path("/proc/self/oom_score_adj")

logger = logging.getLogger(__name__)


def actor_name(node: str) -> str:
    """Return the name of the agent on the node of this id."""
    return f"agent-{node}"


class NodeAgent:
    """All parts of teams on one node. Calls may come at once."""

    def __init__(self, raylet: Mapping[str, Any], namespace: str) -> None:
        described = decode_raylet(raylet)
        self._node = node_info(described, find_devices())
        self._folder = _base() / namespace / described.id
        self._namespace = namespace
        self._parts: dict[str, NodePart] = {}
        self._followed: dict[str, NodePart] = {}
        self._failures: dict[str, FirstFailure] = {}
        self._team_locks: dict[str, threading.Lock] = {}
        self._dropped: set[str] = set()
        self._complaints: dict[str, str] = {}
        """By team: what went wrong when it was last followed."""
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(self._folder)
        _reset_priority()
        self._start_watchdog()
        fence(described.id).begin()
        threading.Thread(target=self._follow, name="mimatrix-follow", daemon=True).start()

    def handle(self, request: str, archive: bytes = b"") -> str:
        """Handle one message; errors are replies, too."""
        methods: dict[str, Callable[..., Any]] = {
            "describe": lambda: encode_node(self._node),
            "start": lambda part: self._start(decode_part(part), archive),
            "states": lambda teams: {team: encode_part_state(self._state(team)) for team in teams},
            "end": lambda team, now, failure=None: self._end(team, now, decode_failure(failure)),
            "read_log": lambda team, rank, offset, most: encode_log_part(self._read_log(team, rank, offset, most)),
            "drop": self._drop,
        }
        try:
            method, arguments = decode_request(request)
            if method not in methods:
                raise WorldError(f"{self._node.name} does not know the call {method}; install one version everywhere")
            return encode_answer(methods[method](**arguments))
        except MiMatrixError as error:
            return encode_error(error)
        except DECODE_ERRORS as error:
            return encode_error(WorldError(f"{self._node.name} cannot handle a message ({error!r})"))

    def _start(self, part: NodePart, archive: bytes) -> None:
        """Start the members of this node, or none."""
        name = part.team.name
        validate_name(name)
        with self._team_lock(name):
            self._take(part)
            file = self._folder / f"{name}.tar.gz"
            try:
                file.write_bytes(archive)
                self._launcher(name).start(replace(part.team, archive=file))
            except (StartError, TeamRefusedError) as error:
                raise _renumbered(error, part) from None
            except OSError as error:
                sentence = f'team "{name}" cannot be started on {self._node.name} ({error})'
                raise StartError(sentence, is_transient=is_transient(error)) from None

    def _end(self, team: str, now: bool, failure: FirstFailure | None) -> None:
        """End the part of a team; a failure elsewhere that ends it may be reported before the part is there."""
        validate_name(team)
        if failure:
            with self._lock:
                self._failures.setdefault(team, failure)
                if team in self._followed:
                    # It is ended at the next look, or as soon as it has started.
                    return
        if self._knows(team):
            self._launcher(team).end(team, now=now)

    def _read_log(self, team: str, rank: int, offset: int, most: int) -> LogPart:
        """Return output of a member, by its rank in the part."""
        validate_name(team)
        if not self._knows(team):
            raise UserError(f'there is no team "{team}" on {self._node.name}; none of this name was started there')
        return self._launcher(team).read_log(team, rank, offset, most)

    def _drop(self, team: str, start_id: str) -> None:
        """Kill what is left of the part of a team, and forget it. It never starts after that."""
        validate_name(team)
        with self._lock:
            self._dropped.add(start_id)
        with self._team_lock(team):
            self._kill(team)
            self._launcher(team).forget(team)
            shutil.rmtree(self._folder / "parts" / team, ignore_errors=True)
            (self._folder / f"{team}.tar.gz").unlink(missing_ok=True)
        with self._lock:
            for known in (self._parts, self._followed, self._failures, self._complaints):
                known.pop(team, None)

    def _take(self, part: NodePart) -> None:
        """Note what is about to be started, unless that was abandoned before it came."""
        with self._lock:
            if part.start_id in self._dropped:
                raise WorldError(f'team "{part.team.name}" was abandoned before it came to {self._node.name}')
            self._start_watchdog()
            self._parts[part.team.name] = self._followed[part.team.name] = part

    def _kill(self, team: str) -> None:
        deadline = time.monotonic() + _DROP_S
        while (state := self._state(team)) and not state.team.has_ended:
            if time.monotonic() > deadline:
                raise WorldError(f'team "{team}" does not end on {self._node.name}')
            self._launcher(team).end(team, now=True)
            time.sleep(_FOLLOW_S)

    def _team_lock(self, team: str) -> threading.Lock:
        """Return the lock of a team: it is not started and dropped at once."""
        with self._lock:
            return self._team_locks.setdefault(team, threading.Lock())

    def _launcher(self, team: str) -> LocalLauncher:
        """Return a launcher for this team alone, so that a look at it does not read the files of all."""
        return LocalLauncher(self._folder / "parts" / team, self._node.name, self._node.devices)

    def _knows(self, team: str) -> bool:
        return (self._folder / "parts" / team / "teams" / team).is_dir()

    def _state(self, team: str) -> PartState | None:
        state = self._launcher(team).states().get(team)
        if state is None:
            return None
        part = self._parts.get(team)
        failure = find_local_failure(state, part, time.time()) if part else None
        with self._lock:
            if failure and team in self._parts:
                self._failures.setdefault(team, failure)
            return PartState(state, self._failures.get(team))

    def _follow(self) -> None:
        """Report failures here to the other nodes at once, also while no server looks."""
        while True:
            time.sleep(_FOLLOW_S)
            with suppress(OSError):
                os.utime(self._folder)
            with self._lock:
                followed = list(self._followed.values())
            for part in followed:
                self._follow_part(part)

    def _follow_part(self, part: NodePart) -> None:
        """Look at a part, and log what goes wrong once: the next look is soon."""
        name = part.team.name
        try:
            self._look_at(part)
            self._complaints.pop(name, None)
        except Exception as error:  # noqa: BLE001 (whatever Ray raises, other parts must be followed)
            complaint = f"{type(error).__name__}: {error}"
            if self._complaints.get(name) != complaint:
                self._complaints[name] = complaint
                logger.warning("team %s cannot be followed, and is tried again: %s", name, complaint)

    def _look_at(self, part: NodePart) -> None:
        """Look at a part, and stop following it when there is nothing more to report."""
        name, state = part.team.name, self._state(part.team.name)
        if state is None or not (state.team.has_ended or state.failure):
            return
        if state.failure and state.failure.rank in part.ranks:
            is_done = self._report(part, state.failure) or time.time() - state.failure.at_s > _REPORT_S
        else:
            is_done = state.team.has_ended
            if not (is_done or any(member.phase is Phase.STARTING for member in state.team.members)):
                # A part that ends while it starts would look like one that cannot be started.
                self._launcher(name).end(name)
        with self._lock:
            if is_done and self._followed.get(name) is part:
                del self._followed[name]

    def _report(self, part: NodePart, failure: FirstFailure) -> bool:
        """Report a failure to the other nodes; return whether all know it or are gone. A server reports it as well."""
        import ray

        arguments = {"team": part.team.name, "now": False, "failure": encode_failure(failure)}
        request = encode_request("end", arguments)
        pending: list[tuple[Any, Any]] = []
        for peer in part.peers:
            with suppress(ValueError):  # that agent is gone
                agent = ray.get_actor(actor_name(peer), namespace=self._namespace)
                pending.append((agent, agent.handle.remote(request)))
        calls = [call for _, call in pending]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_REPLY_S) if calls else ([], [])
        return len(answered) == len(calls) and all(map(_is_settled, answered))

    def _start_watchdog(self) -> None:
        """Start a process that ends all teams of this node when we are gone, unless there is one already."""
        if self._watchdog and self._watchdog.stdin:
            with suppress(BrokenPipeError):
                self._watchdog.stdin.write(b".")
                self._watchdog.stdin.flush()
                return
        command = [sys.executable, "-m", "mimatrix.launch.ray.watchdog", str(self._folder)]
        self._watchdog = subprocess.Popen(  # noqa: S603 (the command is ours)
            command, cwd=_CODE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        # It forks and ends at once: Ray kills our children with us.
        self._watchdog.wait(timeout=30)


def _renumbered(error: StartError | TeamRefusedError, part: NodePart) -> StartError | TeamRefusedError:
    """Return the error with the rank of the whole team: a local launcher counts its own members."""
    failure: StartFailure | None = error.failure
    if failure is None or failure.rank is None:
        return error
    return replace(failure, rank=part.ranks[failure.rank]).to_error()


def parts_in(folder: Path) -> Iterator[tuple[str, LocalLauncher]]:
    """Yield the teams in a node's directory, with the launcher of each."""
    parts = folder / "parts"
    for path in sorted(parts.iterdir()) if parts.is_dir() else []:
        yield path.name, LocalLauncher(path, "", ())


def _is_settled(call: Any) -> bool:
    """Return whether an agent did what it was asked, or never will."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    try:
        return not isinstance(decode_reply(ray.get(call, timeout=0)), MiMatrixError)
    except ActorDiedError:
        return True
    except (RayError, OSError):
        return False


def _sweep(mine: Path) -> None:
    """Remove what agents left here that have been gone for long; one that runs touches its directory all the time."""
    for path in mine.parent.iterdir():
        with suppress(OSError):
            if path != mine and time.time() - path.stat().st_mtime > _SWEEP_S:
                shutil.rmtree(path, ignore_errors=True)


def _base() -> Path:
    return Path(NODE_FOLDER.get() or Path.home() / ".local" / "share" / "mimatrix" / "nodes").absolute()


def _reset_priority() -> None:
    """Run like any other process. Ray makes its workers run last and be killed first; only root may undo that."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError):
        _OOM_SCORE.write_text("0", encoding="ascii")
