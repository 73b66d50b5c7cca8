"""The keeper of one node: a Ray actor that has the node's parts of teams started, each by a local launcher.

It lives as long as Ray does on its node, without any server. When it ends, however that happens, a process that waits
for it kills all that it kept: whoever is told that a node is gone may count on nothing running there for long.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimatrix.core.environment import NODE_FOLDER
from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.launch.devices import find_devices
from mimatrix.launch.launcher import LogPart, NodeFacts, Phase
from mimatrix.launch.local.launch_spec import check_name
from mimatrix.launch.local.launcher import LocalLauncher
from mimatrix.launch.ray.fencing import fence
from mimatrix.launch.ray.nodes import Raylet, node_facts
from mimatrix.launch.ray.split import Cause, Part, PartState, find_local_cause

_CODE = Path(__file__).parents[3]
_FOLLOWED_S = 0.1
_DROPPED_S = 5.0
# How long one look waits for the other nodes, and for how long they are told of a failure again and again.
_HEARD_S, _TOLD_S = 1.0, 60.0
_SWEPT_S = 7 * 86_400.0
_SCORE = Path("/proc/self/oom_score_adj")
# A local launcher counts the members of its own.
_RANK = re.compile(r"^rank (\d+)\b")


def actor_name(node: str) -> str:
    """Of the keeper on the node of this id."""
    return f"keeper-{node}"


class NodeKeeper:
    """All parts of teams on one node. Calls may come at once."""

    def __init__(self, raylet: Raylet, place: str) -> None:
        self._facts = node_facts(raylet, find_devices())
        self._folder = _base() / place / raylet.id
        self._place = place
        self._parts: dict[str, Part] = {}
        self._followed: dict[str, Part] = {}
        self._causes: dict[str, Cause] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._dropped: set[str] = set()
        self._watch: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(self._folder)
        _be_ordinary()
        self._keep_watch()
        fence(raylet.id).begin()
        threading.Thread(target=self._follow, name="mimatrix-follow", daemon=True).start()

    def hello(self) -> NodeFacts:
        """The node, as it calls itself."""
        return self._facts

    def start(self, part: Part, archive: bytes) -> None:
        """Start the members of this node, or none."""
        name = part.team.name
        check_name(name)
        with self._turn_of(name):
            self._take(part)
            file = self._folder / f"{name}.tar.gz"
            try:
                file.write_bytes(archive)
                self._launcher(name).start(replace(part.team, archive=file))
            except UserError as error:
                raise UserError(_RANK.sub(lambda found: f"rank {part.ranks[int(found[1])]}", str(error))) from None
            except OSError as error:
                raise WorldError(f'team "{name}" cannot be started on {self._facts.name} ({error})') from None
            finally:
                # Unpacked by now, or refused.
                file.unlink(missing_ok=True)

    def states(self, teams: tuple[str, ...]) -> dict[str, PartState | None]:
        """How its parts of these teams are; None of those that it does not know."""
        return {team: self._state(team) for team in teams}

    def end(self, team: str, now: bool, cause: Cause | None = None) -> None:
        """End its part; because of a failure elsewhere, if there is a cause. That may come before the part does."""
        check_name(team)
        if cause:
            with self._lock:
                self._causes.setdefault(team, cause)
                if team in self._followed:
                    # It is ended at the next look, or as soon as it has started.
                    return
        if self._knows(team):
            self._launcher(team).end(team, now=now)

    def read_log(self, team: str, rank: int, offset: int, most: int) -> LogPart:
        """Output of a member, by its rank in the part."""
        check_name(team)
        if not self._knows(team):
            raise UserError(f'there is no team "{team}" on {self._facts.name}; none of this name was started there')
        return self._launcher(team).read_log(team, rank, offset, most)

    def drop(self, team: str, order: str) -> None:
        """Kill what is left of its part, and forget it; nothing where it is not known. It never starts after that."""
        check_name(team)
        with self._lock:
            self._dropped.add(order)
        with self._turn_of(team):
            self._end_at_last(team)
            self._launcher(team).forget(team)
            shutil.rmtree(self._folder / "parts" / team, ignore_errors=True)
        with self._lock:
            for known in (self._parts, self._followed, self._causes):
                known.pop(team, None)

    def _take(self, part: Part) -> None:
        """Note what is about to be started, unless that was given up before it came."""
        with self._lock:
            if part.order in self._dropped:
                raise WorldError(f'team "{part.team.name}" was given up before it came to {self._facts.name}')
            self._keep_watch()
            self._parts[part.team.name] = self._followed[part.team.name] = part

    def _end_at_last(self, team: str) -> None:
        deadline = time.monotonic() + _DROPPED_S
        while (state := self._state(team)) and not state.team.has_ended:
            if time.monotonic() > deadline:
                raise WorldError(f'team "{team}" does not end on {self._facts.name}')
            self._launcher(team).end(team, now=True)
            time.sleep(_FOLLOWED_S)

    def _turn_of(self, team: str) -> threading.Lock:
        """Whoever starts or drops a team waits for the other to be through."""
        with self._lock:
            return self._turns.setdefault(team, threading.Lock())

    def _launcher(self, team: str) -> LocalLauncher:
        """One for each team, so that a look at one does not read the files of all."""
        return LocalLauncher(self._folder / "parts" / team, self._facts.name, self._facts.devices)

    def _knows(self, team: str) -> bool:
        return (self._folder / "parts" / team / "teams" / team).is_dir()

    def _state(self, team: str) -> PartState | None:
        state = self._launcher(team).states().get(team)
        if state is None:
            return None
        part = self._parts.get(team)
        found = find_local_cause(state, part, time.time()) if part else None
        with self._lock:
            if found and team in self._parts:
                self._causes.setdefault(team, found)
            return PartState(state, self._causes.get(team))

    def _follow(self) -> None:
        """Tell the other nodes of a failure here at once, also while no server looks."""
        while True:
            time.sleep(_FOLLOWED_S)
            with suppress(OSError):
                os.utime(self._folder)
            with self._lock:
                followed = list(self._followed.values())
            for part in followed:
                with suppress(Exception):  # also whatever Ray raises: the next look is soon
                    self._look_at(part)

    def _look_at(self, part: Part) -> None:
        """Follow a part no longer when there is nothing more to tell of it."""
        name, state = part.team.name, self._state(part.team.name)
        if state is None or not (state.team.has_ended or state.cause):
            return
        if state.cause and state.cause.rank in part.ranks:
            is_done = self._tell(part, state.cause) or time.time() - state.cause.at_s > _TOLD_S
        else:
            is_done = state.team.has_ended
            if not (is_done or any(member.phase is Phase.STARTING for member in state.team.members)):
                # One that ends while it starts would be taken for one that cannot be started.
                self._launcher(name).end(name)
        with self._lock:
            if is_done and self._followed.get(name) is part:
                del self._followed[name]

    def _tell(self, part: Part, cause: Cause) -> bool:
        """Whether all other nodes have heard of it, or are gone. A server that looks tells them as well."""
        import ray

        under_way: list[tuple[Any, Any]] = []
        for peer in part.peers:
            with suppress(ValueError):  # there is no such keeper any more
                keeper = ray.get_actor(actor_name(peer), namespace=self._place)
                under_way.append((keeper, keeper.end.remote(part.team.name, False, cause)))
        calls = [call for _, call in under_way]
        heard, _ = ray.wait(calls, num_returns=len(calls), timeout=_HEARD_S) if calls else ([], [])
        return len(heard) == len(calls) and all(map(_is_settled, heard))

    def _keep_watch(self) -> None:
        """Have a process that ends all teams of this node when we are gone; another one if that was killed."""
        if self._watch and self._watch.stdin:
            with suppress(BrokenPipeError):
                self._watch.stdin.write(b".")
                self._watch.stdin.flush()
                return
        words = [sys.executable, "-m", "mimatrix.launch.ray.watchdog", str(self._folder)]
        self._watch = subprocess.Popen(  # noqa: S603 (the words are ours)
            words, cwd=_CODE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        # It forks and ends at once: what Ray finds among our children, it kills with us.
        self._watch.wait(timeout=30)


def parts_in(folder: Path) -> Iterator[tuple[str, LocalLauncher]]:
    """The teams that a node's folder holds, with the launcher of each."""
    parts = folder / "parts"
    for path in sorted(parts.iterdir()) if parts.is_dir() else []:
        yield path.name, LocalLauncher(path, "", ())


def _is_settled(call: Any) -> bool:
    """Whether a keeper did what it was asked, or will never do anything again."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    try:
        ray.get(call, timeout=0)
    except ActorDiedError:
        return True
    except (RayError, MiMatrixError, OSError):
        return False
    return True


def _sweep(mine: Path) -> None:
    """Remove what keepers left here that have been gone for long; one that lives touches its folder all the time."""
    for path in mine.parent.iterdir():
        with suppress(OSError):
            if path != mine and time.time() - path.stat().st_mtime > _SWEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def _base() -> Path:
    return Path(NODE_FOLDER.get() or Path.home() / ".local" / "share" / "mimatrix" / "nodes").absolute()


def _be_ordinary() -> None:
    """Ray has its workers run last, and killed first when memory is short. Only root may undo that for members."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError):
        _SCORE.write_text("0", encoding="ascii")
