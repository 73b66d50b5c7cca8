"""The launcher of this machine: the contract, and what its supervisors and reapers promise on top of it."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.launcher_contract import (
    DEAF,
    FOREVER,
    TREE,
    Ground,
    LauncherContract,
    Make,
    codes,
    eventually,
    pack,
    runs,
)

from mimatrix.core.errors import UserError, WorldError
from mimatrix.launch.devices import DeviceInfo, find_devices
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.launch.local import launcher as local_launcher
from mimatrix.launch.local.launch_spec import build_spec
from mimatrix.launch.local.launcher import LocalLauncher
from mimatrix.launch.local.store import SupervisorState, TeamFolder, judge
from mimatrix.launch.start_failure import StartFailure, StartFailureKind
from mimatrix.processes.proc import ProcessId, identify, is_alive, send

ROOT = Path(__file__).resolve().parents[2]
DEVICES = (DeviceInfo("cpu", 1 << 30, {"SEES": "first"}), DeviceInfo("cpu", 2 << 30, {"SEES": "second"}))


def local(folder: Path) -> LocalLauncher:
    return LocalLauncher(folder / "place", node="here", devices=DEVICES)


class TestLocalLauncher(LauncherContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        return lambda: local(tmp_path)


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lambda: local(tmp_path), tmp_path)
    yield ground
    ground.clear()


def folder_of(ground: Ground, name: str = "job-1.g0") -> TeamFolder:
    return TeamFolder(ground.folder / "place" / "teams" / name)


def record_of(ground: Ground, name: str) -> SupervisorState:
    record = folder_of(ground, name).read_state()
    assert record
    return record


def supervisor_of(ground: Ground, name: str) -> int:
    supervisor = record_of(ground, name).supervisor
    assert supervisor
    return supervisor.pid


def reaper_of(ground: Ground, name: str, rank: int) -> int:
    reaper = record_of(ground, name).reapers[rank]
    assert reaper
    return reaper.pid


def test_a_supervisor_that_is_killed_takes_all_with_it(ground: Ground) -> None:
    name = ground.start(TREE + "os.write(1, b'me %d\\n' % os.getpid())\ntime.sleep(600)", ranks=2)
    for rank in range(2):
        eventually(lambda rank=rank: "me" in ground.output(name, rank), "both members")  # type: ignore[misc]
    pids = [*ground.pids(name, 0), *ground.pids(name, 1), reaper_of(ground, name, 0), reaper_of(ground, name, 1)]
    pids += [int(ground.output(name, rank).split("me ")[1].split()[0]) for rank in range(2)]
    supervisor = supervisor_of(ground, name)
    os.kill(supervisor, signal.SIGKILL)
    state = ground.ended(name)
    assert not any(map(runs, pids))
    assert [member.phase for member in state.members] == [Phase.LOST] * 2
    assert state.members[0].cause == ExitCause.lost(f"its supervisor (process {supervisor}) is gone")
    ground.launcher.end(name)
    ground.launcher.forget(name)
    assert ground.launcher.states() == {}


def test_a_reaper_that_is_killed_takes_its_tree_with_it(ground: Ground) -> None:
    name = ground.start(TREE + "time.sleep(600)", ranks=2, grace_s=0.2)
    ground.until_up(name, ranks=2)
    pids = [*ground.pids(name, 0), *ground.pids(name, 1)]
    os.kill(reaper_of(ground, name, 1), signal.SIGKILL)
    state = ground.ended(name)
    assert not any(map(runs, pids))
    assert state.first_failure == 1
    assert state.members[1] == MemberState(Phase.LOST, ExitCause.lost("its reaper was killed"))
    assert state.members[0].code == -signal.SIGTERM


def the_kernel_kills_the_member(ground: Ground, name: str) -> None:
    """When its reaper is killed and the supervisor cannot see to it."""
    supervisor, reaper = supervisor_of(ground, name), reaper_of(ground, name, 0)
    member = int(subprocess.check_output(["pgrep", "-P", str(reaper)], timeout=10))
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(reaper, signal.SIGKILL)
        eventually(lambda: not runs(member), "the end of the member")
    finally:
        os.kill(supervisor, signal.SIGCONT)


def test_a_member_does_not_outlive_its_guard(ground: Ground) -> None:
    name = ground.start(DEAF)
    ground.until_up(name)
    the_kernel_kills_the_member(ground, name)
    assert ground.ended(name).members[0].phase == Phase.LOST


def test_a_supervisor_has_nothing_of_who_started_it(ground: Ground) -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    name = ground.start(FOREVER)
    supervisor, reaper = supervisor_of(ground, name), reaper_of(ground, name, 0)
    os.close(theirs)
    assert os.read(ours, 1) == b"", "somebody else still has the other end"
    os.close(ours)
    assert os.getsid(supervisor) != os.getsid(0)
    for pid in (supervisor, reaper):
        standard = {number: str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)}
        log = str(folder_of(ground, name).supervisor_log)
        assert standard == {0: "/dev/null", 1: log, 2: log}


def test_no_supervisor_stays_when_its_team_has_ended(ground: Ground) -> None:
    name = ground.start("")
    ground.ended(name)
    eventually(lambda: not runs(supervisor_of(ground, name)), "the end of the supervisor")
    assert folder_of(ground, name).supervisor_log.read_bytes() == b""


def test_a_number_that_came_back_is_not_signalled(ground: Ground) -> None:
    name = ground.start(FOREVER)
    os.kill(supervisor_of(ground, name), signal.SIGKILL)
    ground.ended(name)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        who = identify(stranger.pid)
        assert who
        stale = ProcessId(who.pid, who.start_ticks - 1)
        folder_of(ground, name).save(replace(record_of(ground, name), supervisor=stale))
        ground.launcher.end(name, now=True)
        ground.launcher.end(name)
        assert [member.phase for member in ground.state(name).members] == [Phase.LOST]
        assert not send(stale, signal.SIGKILL)
        time.sleep(0.1)
        assert stranger.poll() is None
        assert send(who, signal.SIGKILL)
        stranger.wait(timeout=10)
        assert not is_alive(who)
        assert not send(who, signal.SIGKILL)


SERVER = """
import os, signal, sys
from pathlib import Path
from support.launcher_contract import Ground
from test_local_launcher import local
folder = Path(sys.argv[1])
ground = Ground(lambda: local(folder), folder)
ground.start("import time\\nprint('up', flush=True)\\ntime.sleep(0.4)\\nprint('done')", ranks=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def serve(folder: Path) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    return subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], env=os.environ | {"PYTHONPATH": path})


def test_a_team_outlives_a_server_that_is_killed(ground: Ground) -> None:
    with serve(ground.folder) as server:
        assert server.wait(timeout=30) == -signal.SIGKILL
    state = ground.state("job-1.g0")
    assert state.members == (MemberState(Phase.RUNNING),) * 2
    assert codes(ground.ended("job-1.g0")) == [0, 0]
    assert ground.output("job-1.g0", 1) == "up\ndone\n"


def test_a_server_that_is_killed_while_it_starts_a_team(ground: Ground) -> None:
    with serve(ground.folder) as server:
        eventually(lambda: "mimatrix.launch.local.supervisor" in commands(str(folder_of(ground).path)), "a supervisor")
        server.kill()
    assert ground.state("job-1.g0").members[0].phase in (Phase.STARTING, Phase.RUNNING)
    assert codes(ground.ended("job-1.g0")) == [0, 0]


def commands(word: str) -> str:
    """Return the command lines of all processes that have this word in theirs."""
    found = subprocess.run(["pgrep", "-af", word], capture_output=True, text=True, check=False, timeout=10)
    return found.stdout


def leave_an_order(ground: Ground, code: str = "print('late')") -> TeamFolder:
    """As a launcher does that is killed before it starts a supervisor."""
    folder = folder_of(ground)
    local_launcher._write(folder, build_spec(ground.team(code), ground.launcher.nodes()[0]))
    return folder


def grow_old(folder: TeamFolder) -> None:
    long_ago = time.time() - 1000
    os.utime(folder.path / "order.json", (long_ago, long_ago))


def test_an_order_that_nobody_took_is_lost_after_a_while(ground: Ground) -> None:
    folder = leave_an_order(ground)
    assert ground.state("job-1.g0") == TeamState((MemberState(Phase.STARTING),))
    grow_old(folder)
    state = ground.state("job-1.g0")
    assert state.members[0].phase == Phase.LOST
    assert state.members[0].cause == ExitCause.lost("its launcher was gone before a supervisor claimed it")
    local_launcher._start_supervisor(folder)
    assert ground.state("job-1.g0") == state, "a supervisor that comes late changes nothing"
    assert not folder.work.exists()
    ground.launcher.forget("job-1.g0")
    assert ground.launcher.states() == {}


def test_an_order_that_nobody_took_can_be_started(ground: Ground) -> None:
    grow_old(leave_an_order(ground))
    ground.start("print('now')")
    assert codes(ground.ended("job-1.g0")) == [0]
    assert ground.output("job-1.g0") == "late\n"


def test_an_order_that_nobody_took_can_be_ended(ground: Ground) -> None:
    leave_an_order(ground)
    ground.launcher.end("job-1.g0")
    assert ground.state("job-1.g0").members[0].phase == Phase.LOST


def test_a_team_is_ended_while_its_archive_is_unpacked(ground: Ground) -> None:
    pipe = ground.folder / "pipe"
    os.mkfifo(pipe)
    folder = folder_of(ground)
    order = build_spec(ground.team("", ranks=2), ground.launcher.nodes()[0])
    local_launcher._write(folder, replace(order, archive=str(pipe)))
    starter = threading.Thread(target=local_launcher._start_supervisor, args=(folder,))
    starter.start()
    eventually(folder.read_state, "a supervisor")
    assert ground.state("job-1.g0").members == (MemberState(Phase.STARTING),) * 2
    ground.launcher.end("job-1.g0")
    state = ground.ended("job-1.g0")
    starter.join(timeout=10)
    assert codes(state) == [-signal.SIGTERM] * 2
    cancelled = ExitCause(kind=ExitKind.CANCELLED, ended_for=EndedFor.REQUEST)
    assert [member.cause for member in state.members] == [cancelled] * 2


def test_two_who_start_a_team_start_it_once(ground: Ground) -> None:
    threads = [threading.Thread(target=ground.start, args=(f"print({n})", 2)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert codes(ground.ended("job-1.g0")) == [0, 0]
    assert ground.output("job-1.g0", 0) == ground.output("job-1.g0", 1) in ("0\n", "1\n", "2\n")
    assert [path.name for path in folder_of(ground).path.parent.iterdir()] == ["job-1.g0"]


def test_a_supervisor_that_cannot_start_is_an_error(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorldError, match="its supervisor ended at once"):
        ground.start("")
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(WorldError, match="/no/python"):
        ground.start("")
    assert ground.launcher.states() == {}


def test_a_supervisor_that_hangs_is_given_up(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ground.folder / "lazy"
    lazy.write_text("#!/bin/sh\nexec sleep 60\n")
    lazy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lazy))
    monkeypatch.setattr(local_launcher, "_CLAIM_S", 0.2)
    with pytest.raises(WorldError, match=r"within 0\.2 s"):
        ground.start("")
    assert ground.launcher.states() == {}


def test_only_the_last_of_much_output_is_kept(ground: Ground) -> None:
    """Each line says where it begins."""
    lines = 2 << 16
    name = ground.start(
        f"import os\nfor k in range(32):\n os.write(1, b''.join(b'%0159d\\n' % (n * 160) for n in "
        f"range(k * {lines // 32}, (k + 1) * {lines // 32})))"
    )
    ground.ended(name)
    total = lines * 160
    first = ground.launcher.read_log(name, 0, 0, 160 * 3)
    begins = first.next_offset - len(first.data)
    assert 0 < begins <= total - (8 << 20)
    assert begins >= total - 2 * ((8 << 20) + (1 << 16))
    aligned = -(-begins // 160) * 160
    assert int(ground.launcher.read_log(name, 0, aligned, 160).data) == aligned
    kept = ground.launcher.read_log(name, 0, aligned, total).data
    assert [int(line) for line in kept.split()] == list(range(aligned, total, 160))
    size = sum(path.stat().st_size for path in folder_of(ground, name).log(0).iterdir())
    assert size == total - begins


def archive_with(path: Path, entry: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        packed.addfile(entry, io.BytesIO(b"x" * entry.size))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def test_an_archive_that_reaches_outside_is_refused(ground: Ground) -> None:
    outside = tarfile.TarInfo("../../outside")
    outside.size = 1
    device = tarfile.TarInfo("null")
    device.type = tarfile.CHRTYPE
    bad = [outside, link("a", "/etc/passwd", tarfile.SYMTYPE), link("a", "../../order.json", tarfile.SYMTYPE), device]
    bad.append(link("a", "../state.json", tarfile.LNKTYPE))
    for entry in bad:
        archive = archive_with(ground.folder / "bad.tar.gz", entry)
        with pytest.raises(UserError, match="must not be unpacked"):
            ground.launcher.start(replace(ground.team(""), archive=archive))
        assert ground.launcher.states() == {}
    assert not list(ground.folder.rglob("outside"))


def test_what_is_no_archive_is_refused(ground: Ground) -> None:
    whole = pack(ground.folder / "whole.tar.gz", {"a": os.urandom(5000).hex()}).read_bytes()
    for data in (b"", b"no archive", whole[: len(whole) // 2]):
        archive = ground.folder / "bad.tar.gz"
        archive.write_bytes(data)
        with pytest.raises(UserError, match=r"cannot be unpacked \("):
            ground.launcher.start(replace(ground.team(""), archive=archive))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_members_run_as_another_user(ground: Ground) -> None:
    command = (
        "sh",
        "-c",
        "id -u; id -g; id -G; stat -c %u:%g . data data/hello.txt; cat data/hello.txt; sleep 60",
    )
    team = replace(ground.team(""), command=command, run_as="nobody")
    ground.launcher.start(team)
    eventually(lambda: "hello" in ground.output(team.name), "its output")
    assert ground.output(team.name).split() == ["65534"] * 3 + ["65534:65534"] * 3 + ["hello"]
    the_kernel_kills_the_member(ground, team.name)
    ground.ended(team.name)
    with pytest.raises(UserError, match="no user"):
        ground.launcher.start(replace(team, name="b", run_as="no-such-user"))


def test_a_token_reaches_its_member_and_is_in_no_environment(ground: Ground) -> None:
    """It comes through a pipe: /proc shows environments to every process of the same user."""
    code = """
import os, pathlib
token = os.read(int(os.environ["MIMATRIX_TOKEN_FD"]), 100).decode()
shown = [pathlib.Path(f"/proc/{pid}/environ").read_text() for pid in (os.getpid(), os.getppid())]
print(token, [token in text for text in shown])
"""
    team = ground.team(code)
    ground.launcher.start(replace(team, environment={**team.environment, "MIMATRIX_TOKEN": "told-to-nobody"}))
    ground.ended(team.name)
    assert ground.output(team.name) == "told-to-nobody [False, False]\n"


def test_only_root_runs_members_as_others(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="only root"):
        ground.launcher.start(replace(ground.team(""), run_as="nobody"))


def test_orders_are_for_their_owner(ground: Ground) -> None:
    name = ground.start("")
    assert (folder_of(ground, name).path / "order.json").stat().st_mode & 0o777 == 0o600


def test_signals_are_as_in_a_fresh_process(ground: Ground) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        team = replace(ground.team(""), command=("grep", "^Sig[BI]", "/proc/self/status"))
        ground.launcher.start(team)
    finally:
        signal.signal(signal.SIGCHLD, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ground.ended(team.name)
    # Two signals are the C library's own, and it blocks them as it likes.
    own = 0b11 << 31
    assert {int(line.split()[1], 16) & ~own for line in ground.output(team.name).splitlines()} == {0}


def test_remains_of_killed_launchers_are_swept(ground: Ground) -> None:
    teams = folder_of(ground).path.parent
    for name, age_s in ((".draft-old", 10_000), (".gone-new", 0)):
        (teams / name).mkdir(parents=True)
        os.utime(teams / name, (time.time() - age_s,) * 2)
    ground.start("")
    assert {path.name for path in teams.iterdir()} == {".gone-new", "job-1.g0"}
    assert set(ground.launcher.states()) == {"job-1.g0"}


def test_what_cannot_be_read_is_lost(ground: Ground) -> None:
    name = ground.start("")
    ground.ended(name)
    (folder_of(ground, name).path / "state.json").write_text("{")
    assert ground.state(name).members[0].phase == Phase.LOST
    ground.launcher.forget(name)


def test_members_are_lost_when_their_guards_are_gone_too() -> None:
    supervisor, alive, gone = ProcessId(1, 1), ProcessId(2, 2), ProcessId(3, 3)
    running, done = MemberState(Phase.RUNNING), MemberState(Phase.EXITED, ExitCause.from_returncode(0))
    record = SupervisorState(TeamState((running, running, done, running), 2), supervisor, (alive, gone, gone))
    lost = MemberState(Phase.LOST, ExitCause.lost("its supervisor (process 1) is gone"))
    assert judge(record, {alive}.__contains__) == TeamState((running, lost, done, lost), 2)


def test_records_survive_the_disk(tmp_path: Path) -> None:
    folder = TeamFolder(tmp_path)
    failed = MemberState(Phase.EXITED, ExitCause.from_returncode(3))
    record = SupervisorState(TeamState((failed,), 0), ProcessId(1, 2), (None, ProcessId(3, 4)))
    assert folder.read_state() is None
    assert folder.claim(record)
    assert not folder.claim(replace(record, supervisor=None))
    assert folder.read_state() == record
    failure = StartFailure(kind=StartFailureKind.COMMAND, rank=0, detail="no", is_transient=True)
    later = replace(record, team=replace(record.team, start_failure=failure, is_restarting=True))
    folder.save(later)
    assert folder.read_state() == later
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_cores_are_devices_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    devices = find_devices()
    assert len(devices) == len(os.sched_getaffinity(0))
    assert {(device.kind, dict(device.variables) == {}) for device in devices} == {("cpu", True)}
    assert all(device.memory_bytes > 1 << 20 for device in devices)


class NoDriverError(Exception):
    pass


def fake_nvml(count: int, works: bool = True) -> SimpleNamespace:
    def start() -> None:
        if not works:
            raise NoDriverError

    def memory(index: int) -> SimpleNamespace:
        if index == 2:
            raise NoDriverError
        return SimpleNamespace(total=(index + 1) << 30)

    return SimpleNamespace(
        NVMLError=NoDriverError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: b"NVIDIA A40" if index else "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
    )


def test_gpus_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(2))
    assert find_devices() == (
        DeviceInfo("NVIDIA H200", 1 << 30, {"CUDA_VISIBLE_DEVICES": "GPU-0"}),
        DeviceInfo("NVIDIA A40", 2 << 30, {"CUDA_VISIBLE_DEVICES": "GPU-1"}),
    )
    for none in (fake_nvml(0), fake_nvml(2, works=False)):
        monkeypatch.setitem(sys.modules, "pynvml", none)
        assert find_devices()[0].kind == "cpu"
