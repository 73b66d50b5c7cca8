"""What every launcher promises, tried with plain scripts as members. A launcher's own test file runs it.

A subclass gives `make`, a fixture: a function that makes a launcher of the same place, each time anew.
"""

import io
import os
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import Launcher, Member, MemberState, Phase, Team, TeamState
from mimatrix.launch.start_failure import StartError

DEADLINE_S = 30.0
DONE = MemberState(Phase.EXITED, ExitCause.from_returncode(0))
Make = Callable[[], Launcher]

FOREVER = "import time\nprint('up')\ntime.sleep(600)"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)"
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("told"), sys.exit(5)))
print("up")
time.sleep(600)
"""
# A child, and a daemon that leaves its session and loses its parent. Neither minds SIGTERM.
TREE = """
import os, signal, sys, time
ready, say = os.pipe()
def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"pid %d\\n" % os.getpid())  # at once, as several print here
    os.write(say, b"x")
    os.close(1), os.close(2)
    time.sleep(600)
    os._exit(0)
if not os.fork():
    stay()
if not os.fork():
    os.setsid()
    if not os.fork():
        stay()
    os._exit(0)
os.wait(), os.read(ready, 1), os.read(ready, 1)
os.write(1, b"up\\n")
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-u", "-c", code)


def pack(path: Path, files: Mapping[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))
    return path


def eventually(happens: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happens():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@dataclass
class Ground:
    """A place for teams, and what tests ask of it."""

    make: Make
    folder: Path
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.launcher = self.make()
        self.archive = pack(self.folder / "job.tar.gz", {"data/hello.txt": "hello\n"})

    def team(self, code: str, ranks: int = 1, name: str = "job-1.g0", grace_s: float = 10.0) -> Team:
        node = self.launcher.nodes()[0]
        members = tuple(Member(node.name, rank % len(node.devices), {"RANK": str(rank)}) for rank in range(ranks))
        return Team(
            name=name,
            command=python(code),
            members=members,
            archive=self.archive,
            environment={"PATH": os.defpath},
            grace_s=grace_s,
        )

    def start(self, code: str, ranks: int = 1, name: str = "job-1.g0", grace_s: float = 10.0) -> str:
        self.launcher.start(self.team(code, ranks, name, grace_s))
        return name

    def state(self, name: str) -> TeamState:
        return self.launcher.states()[name]

    def ended(self, name: str) -> TeamState:
        eventually(lambda: self.state(name).has_ended, f"the end of {name}")
        return self.state(name)

    def output(self, name: str, rank: int = 0) -> str:
        return self.launcher.read_log(name, rank, 0, 1 << 24).data.decode()

    def until_up(self, name: str, ranks: int = 1) -> None:
        for rank in range(ranks):
            eventually(lambda rank=rank: "up" in self.output(name, rank), f"rank {rank} of {name} is up")  # type: ignore[misc]

    def pids(self, name: str, rank: int = 0) -> list[int]:
        """Of a `TREE`: those that its member has left."""
        eventually(lambda: self.output(name, rank).count("pid") == 2, f"the tree of rank {rank}")
        return [int(line.split()[1]) for line in self.output(name, rank).splitlines() if line.startswith("pid")]

    def clear(self) -> None:
        for name, state in self.launcher.states().items():
            if not state.has_ended:
                self.launcher.end(name, now=True)
                self.ended(name)
        self.launcher.close()


def codes(state: TeamState) -> list[int | None]:
    return [member.code for member in state.members]


class LauncherContract:
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        raise NotImplementedError

    @pytest.fixture
    def ground(self, make: Make, tmp_path: Path) -> Iterator[Ground]:
        ground = Ground(make, tmp_path)
        yield ground
        ground.clear()

    def test_a_team_runs_and_ends(self, ground: Ground, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        wait = f"import os, time\nprint('up')\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        name = ground.start(wait, ranks=3)
        ground.until_up(name, ranks=3)
        assert ground.state(name) == TeamState((MemberState(Phase.RUNNING),) * 3)
        assert not ground.state(name).has_ended
        gate.touch()
        assert ground.ended(name) == TeamState((DONE,) * 3)

    def test_both_streams_are_read_from_any_offset(self, ground: Ground) -> None:
        name = ground.start("import os\nfor n in range(2000): os.write(1 + n % 2, b'line %d\\n' % n)")
        ground.ended(name)
        whole = "".join(f"line {number}\n" for number in range(2000)).encode()
        data, offset = b"", 0
        while (part := ground.launcher.read_log(name, 0, offset, most=1000)).data:
            assert len(part.data) <= 1000
            assert part.next_offset == offset + len(part.data)
            data, offset = data + part.data, part.next_offset
        assert data == whole
        assert ground.launcher.read_log(name, 0, 700, 50).data == whole[700:750]
        assert ground.launcher.read_log(name, 0, len(whole)).next_offset == len(whole)
        assert ground.launcher.read_log(name, 0, -10).data == whole[-10:]

    def test_output_is_there_while_the_member_runs(self, ground: Ground) -> None:
        name = ground.start("import time\nprint('a line\\nand a half up', end='', flush=True)\ntime.sleep(600)")
        ground.until_up(name)
        assert ground.output(name) == "a line\nand a half up"

    def test_one_that_fails_ends_the_others(self, ground: Ground) -> None:
        code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)"
        state = ground.ended(ground.start(code, ranks=3))
        assert state.first_failure == 1
        assert codes(state) == [-signal.SIGTERM, 3, -signal.SIGTERM]
        peer = ExitCause(kind=ExitKind.SIGNALED, signal=signal.SIGTERM, ended_for=EndedFor.PEER, because_of=1)
        assert [member.cause for member in state.members] == [peer, ExitCause.from_returncode(3), peer]

    def test_one_that_is_killed_has_failed(self, ground: Ground) -> None:
        state = ground.ended(ground.start("import os\nos.kill(os.getpid(), 9)"))
        assert (state.first_failure, codes(state)) == (0, [-signal.SIGKILL])
        assert state.members[0].cause == ExitCause.from_returncode(-signal.SIGKILL)

    def test_one_that_is_done_ends_nobody(self, ground: Ground) -> None:
        name = ground.start("import os, time\nprint('up')\nif os.environ['RANK'] == '0': time.sleep(600)", ranks=2)
        ground.until_up(name, ranks=2)
        eventually(lambda: ground.state(name).members[1].phase == Phase.EXITED, "the end of rank 1")
        time.sleep(0.1)
        assert ground.state(name).members == (MemberState(Phase.RUNNING), DONE)
        assert ground.state(name).first_failure is None

    def test_a_lost_group_is_started_again_once_all_have_met(self, ground: Ground, tmp_path: Path) -> None:
        gate, word = tmp_path / "gate", tmp_path / "word"
        code = (
            "import os, sys, time\n"
            "lives = 'life ' + os.environ.get('MIMATRIX_REJOINS', '0')\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
            "print(lives)\n"
            "if os.environ['RANK'] == '1' and lives < 'life 2': sys.exit(3)\n"
            f"while not os.path.exists({str(gate)!r} + lives[5]): time.sleep(0.01)\n"
        )
        team = ground.team(code, ranks=2)
        ground.launcher.start(replace(team, groups=((0,), (1,)), restarts=2, restart_after=str(word)))
        word.touch()
        gate.touch()
        eventually(lambda: "life 2\n" in ground.output(team.name, 1), "the second return of rank 1")
        assert ground.output(team.name, 1) == "life 0\nlife 1\nlife 2\n"
        assert ground.output(team.name, 0) == "life 0\n"
        back = MemberState(Phase.RUNNING, ExitCause.from_returncode(3), 2)
        eventually(lambda: ground.state(team.name) == TeamState((MemberState(Phase.RUNNING), back)), "it runs")
        (tmp_path / "gate2").touch()
        (tmp_path / "gate0").touch()
        state = ground.ended(team.name)
        assert (state.first_failure, codes(state)) == (None, [0, 0])

    def test_who_is_told_to_end_may_say_good_bye(self, ground: Ground) -> None:
        name = ground.start(POLITE, ranks=2)
        ground.until_up(name, ranks=2)
        ground.launcher.end(name)
        state = ground.ended(name)
        assert codes(state) == [5, 5]
        assert state.first_failure is None
        asked = ExitCause(kind=ExitKind.EXITED, code=5, ended_for=EndedFor.REQUEST)
        assert [member.cause for member in state.members] == [asked, asked]
        assert ground.output(name) == "up\ntold\n"

    def test_who_does_not_listen_is_killed_after_the_grace(self, ground: Ground) -> None:
        name = ground.start(DEAF, grace_s=0.4)
        ground.until_up(name)
        began_s = time.monotonic()
        ground.launcher.end(name)
        assert codes(ground.ended(name)) == [-signal.SIGKILL]
        assert 0.4 <= time.monotonic() - began_s < 5

    def test_now_means_at_once_also_within_the_grace(self, ground: Ground) -> None:
        name = ground.start(DEAF, ranks=2)
        ground.until_up(name, ranks=2)
        ground.launcher.end(name)
        time.sleep(0.1)
        assert not ground.state(name).has_ended
        ground.launcher.end(name, now=True)
        assert codes(ground.ended(name)) == [-signal.SIGKILL] * 2

    def test_now_tells_nobody(self, ground: Ground) -> None:
        name = ground.start(POLITE)
        ground.until_up(name)
        ground.launcher.end(name, now=True)
        assert codes(ground.ended(name)) == [-signal.SIGKILL]
        assert ground.output(name) == "up\n"

    def test_to_end_what_has_ended_changes_nothing(self, ground: Ground) -> None:
        name = ground.start("")
        before = ground.ended(name)
        ground.launcher.end(name)
        ground.launcher.end(name, now=True)
        assert ground.state(name) == before

    @pytest.mark.parametrize("now", [True, False])
    def test_whole_trees_end(self, ground: Ground, now: bool) -> None:
        name = ground.start(TREE + "time.sleep(600)", grace_s=0.3)
        pids = ground.pids(name)
        ground.until_up(name)
        assert all(map(runs, pids))
        ground.launcher.end(name, now=now)
        ground.ended(name)
        assert not any(map(runs, pids))

    def test_what_a_member_leaves_is_ended_and_other_trees_are_not(self, ground: Ground) -> None:
        name = ground.start(TREE + "if os.environ['RANK'] == '1': time.sleep(600)", ranks=2, grace_s=0.2)
        left, others = ground.pids(name, rank=0), ground.pids(name, rank=1)
        eventually(lambda: ground.state(name).members[0] == DONE, "the end of rank 0")
        assert not any(map(runs, left))
        assert all(map(runs, others))
        assert ground.state(name).members[1] == MemberState(Phase.RUNNING)

    def test_what_is_left_has_the_grace_too(self, ground: Ground) -> None:
        """A shell dies of the signal at once, while what it runs may want to save its work."""
        name = ground.start(
            "import os, signal, sys, time\n"
            "if os.fork(): time.sleep(600)\n"
            "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('saved'), sys.exit()))\n"
            "print('up')\ntime.sleep(600)"
        )
        ground.until_up(name)
        ground.launcher.end(name)
        ground.ended(name)
        assert ground.output(name) == "up\nsaved\n"

    def test_a_launcher_that_is_made_anew_knows_its_teams(self, ground: Ground) -> None:
        done, going = ground.start("print('done')", name="a"), ground.start(POLITE, ranks=2, name="b")
        ground.ended(done)
        ground.until_up(going, ranks=2)
        ground.launcher.close()
        ground.launcher = ground.make()
        assert set(ground.launcher.states()) == {"a", "b"}
        assert ground.state(done) == TeamState((DONE,))
        assert ground.output(done) == "done\n"
        assert ground.state(going).members == (MemberState(Phase.RUNNING),) * 2
        ground.launcher.end(going)
        assert codes(ground.ended(going)) == [5, 5]

    def test_the_environment_is_what_was_given(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OURS", "not theirs")
        team = ground.team("")
        member = replace(team.members[0], environment={"BOTH": "member's", "OWN": "a=b\nc", "RANK": "0"})
        given = {"PATH": os.defpath, "BOTH": "team's", "EMPTY": "", "WORD": "größe"}
        variables = ground.launcher.nodes()[0].devices[0].variables
        words = ("cat", "/proc/self/environ")
        ground.launcher.start(replace(team, command=words, environment=given, members=(member,)))
        ground.ended(team.name)
        told = dict(line.split("=", 1) for line in ground.output(team.name).split("\0")[:-1])
        assert told == {**given, **variables, **member.environment}

    def test_every_team_has_a_copy_of_the_archive(self, ground: Ground) -> None:
        code = "import os\nprint(open('data/hello.txt').read(), os.listdir())\nopen('mine', 'w').write('x')"
        first, second = ground.start(code, name="a"), ground.start(code, name="b")
        for name in (first, second):
            assert codes(ground.ended(name)) == [0]
            assert ground.output(name) == "hello\n ['data']\n"

    def test_members_of_a_team_share_their_folder(self, ground: Ground) -> None:
        code = """
import os, time
open(os.environ["RANK"], "w").close()
while not (os.path.exists("0") and os.path.exists("1")): time.sleep(0.01)
"""
        assert codes(ground.ended(ground.start(code, ranks=2))) == [0, 0]

    def test_what_has_ended_is_forgotten_when_asked(self, ground: Ground) -> None:
        name = ground.start(FOREVER)
        with pytest.raises(UserError, match="has not ended"):
            ground.launcher.forget(name)
        ground.launcher.end(name, now=True)
        ground.ended(name)
        ground.launcher.forget(name)
        assert ground.launcher.states() == {}
        ground.launcher.forget(name)
        with pytest.raises(UserError, match="no team"):
            ground.launcher.read_log(name, 0, 0)
        assert codes(ground.ended(ground.start("", name=name))) == [0]

    def test_a_team_starts_once(self, ground: Ground) -> None:
        name = ground.start("print('first up')")
        ground.start("print('second')", ranks=2)
        assert len(ground.ended(name).members) == 1
        ground.start("print('third')")
        assert ground.output(name) == "first up\n"

    def test_what_cannot_be_started_leaves_nothing(self, ground: Ground) -> None:
        team = ground.team("", ranks=2)
        for bad, said in [
            (replace(team, command=("/no/such/program",)), "/no/such/program"),
            (replace(team, archive=ground.folder / "none.tar.gz"), "no archive"),
            (replace(team, name="a/b"), "cannot name a team"),
            (replace(team, name=".."), "cannot name a team"),
            (replace(team, members=(Member("elsewhere", 0),)), "elsewhere"),
            (replace(team, members=(replace(team.members[0], device=999),)), "999"),
            (replace(team, members=()), "nothing to start"),
        ]:
            # Where nodes come and go, one that is not there may be back in a moment: that is no fault of the team.
            with pytest.raises((UserError, StartError), match=said):
                ground.launcher.start(bad)
        assert ground.launcher.states() == {}

    def test_teams_and_ranks_that_are_not_there(self, ground: Ground) -> None:
        name = ground.start("")
        with pytest.raises(UserError, match="job-1"):
            ground.launcher.end("job-2.g0")
        with pytest.raises(UserError, match="no rank 1"):
            ground.launcher.read_log(name, 1, 0)

    def test_nodes_have_names_and_devices(self, ground: Ground) -> None:
        nodes = ground.launcher.nodes()
        assert len({node.name for node in nodes}) == len(nodes) > 0
        assert all(node.address and node.devices for node in nodes)
        assert all(device.kind and device.memory_bytes > 0 for node in nodes for device in node.devices)
