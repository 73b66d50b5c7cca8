"""Parts of a GPU as ranks: what each is told, and that the MPS daemon ends with them. A fake stands in for NVIDIA's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.exit_codes import TIMED_OUT
from mimatrix.lab import GpuPart, collect_gpu, gpu_environment, mps_daemon, parse_parts, run_gpu

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/bin/sh
# A fake of NVIDIA's program for machines without a GPU: its daemon is a process that sleeps.
pid_file="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    [ -z "$FAKE_BROKEN" ] || { echo 'no device is here'; exit 1; }
    setsid sleep 300 &
    echo $! > "$pid_file"
    echo "started $CUDA_MPS_PIPE_DIRECTORY $!" >> "$FAKE_LOG"
else
    read -r order
    [ -z "$FAKE_HANGS" ] || sleep 300
    [ -e "$pid_file" ] || exit 1
    kill "$(cat "$pid_file")"
    echo "$order" >> "$FAKE_LOG"
fi
"""
PRINT_SECRET = "import os; print(os.environ['MIMATRIX_JOB_SECRET'])"
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


class FakeMps:
    """What the fake daemons wrote down."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.touch()

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def is_running(self) -> bool:
        _, folder, pid = self.lines[0].split()
        return Path(folder).exists() or is_alive(int(pid))

    def assert_stopped(self, daemons: int = 1) -> None:
        assert [line.split()[0] for line in self.lines] == ["started", "quit"] * daemons
        for line in self.lines[::2]:
            _, folder, pid = line.split()
            assert not Path(folder).exists()
            assert not is_alive(int(pid))


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return FakeMps(tmp_path / "log")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def eventually(happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happens()


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def mimatrix(*words: str) -> list[str]:
    return [sys.executable, "-m", "mimatrix.cli.main", "lab", "gpu", *words]


def environments(text: str, hosts: str = "") -> list[dict[str, str]]:
    parts = parse_parts(text, hosts)
    return [gpu_environment(parts, rank, port=5000) for rank in range(len(parts))]


def told(text: str, hosts: str, *names: str) -> list[tuple[str, ...]]:
    return [tuple(environment[name] for name in names) for environment in environments(text, hosts)]


def test_parts_are_read() -> None:
    assert parse_parts("60:40GiB, 25 ,cpu", "a, a,b") == (
        GpuPart(60, 40 << 30, "a"),
        GpuPart(25, None, "a"),
        GpuPart(None, None, "b"),
    )
    assert [part.is_cpu for part in parse_parts("100:512MB,CPU")] == [False, True]
    assert len({part.host for part in parse_parts("60,25,10")}) == 1


@pytest.mark.parametrize(
    ("parts", "hosts", "sentence"),
    [
        ("0", "", '"0" is not a part of a GPU; write a whole percentage from 1 to 100, .* or cpu'),
        ("60,101", "", '"101" is not a part of a GPU'),
        ("-5", "", '"-5" is not a part'),
        ("12.5", "", '"12.5" is not a part'),
        ("", "", '"" is not a part'),
        ("60,,10", "", '"" is not a part'),
        ("tpu", "", '"tpu" is not a part'),
        ("cpu:4GB", "", '"cpu:4GB" is not a part'),
        ("60:much", "", '"much" is not a size; write for example'),
        ("60:", "", '"" is not a size'),
        ("60:4", "", 'the memory limit of part "60:4" is below 1MiB; write for example 60:8GB'),
        ("60,25,10", "a,b", '"a,b" gives 2 names of hosts, and there are 3 parts; name one for each part, as in '),
        ("60,25", "a,", '"a," gives 1 names of hosts, and there are 2 parts'),
    ],
)
def test_bad_parts_are_refused_with_the_fix(parts: str, hosts: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_parts(parts, hosts)


PLACE = ("MIMATRIX_HOST", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def test_three_ranks_on_one_host() -> None:
    assert told("60,25,10", "a,a,a", *PLACE) == [
        ("a", "0", "0", "3", "0", "1"),
        ("a", "1", "1", "3", "0", "1"),
        ("a", "2", "2", "3", "0", "1"),
    ]


def test_two_ranks_on_a_host_and_one_on_another() -> None:
    assert told("60,25,10", "a,a,b", *PLACE) == [
        ("a", "0", "0", "2", "0", "2"),
        ("a", "1", "1", "2", "0", "2"),
        ("b", "2", "0", "1", "1", "2"),
    ]


def test_ranks_of_a_host_need_not_be_neighbours() -> None:
    assert told("60,25,10", "b,a,b", "LOCAL_RANK", "GROUP_RANK") == [("0", "0"), ("0", "1"), ("1", "0")]


def test_three_ranks_on_three_hosts() -> None:
    assert told("60,25,10", "a,b,c", *PLACE) == [
        ("a", "0", "0", "1", "0", "3"),
        ("b", "1", "0", "1", "1", "3"),
        ("c", "2", "0", "1", "2", "3"),
    ]


@pytest.mark.parametrize("hosts", ["", "a,a,b", "a,b,c"])
def test_every_rank_is_a_host_of_its_own_for_nccl(hosts: str) -> None:
    found = environments("60,25,10", hosts)
    assert len({environment["NCCL_HOSTID"] for environment in found}) == 3
    common = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5000",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    for environment in found:
        assert {name: environment[name] for name in common} == common


def test_a_cpu_next_to_a_gpu() -> None:
    gpu, cpu = environments("60:40GiB,cpu", "a,b")
    assert gpu["CUDA_VISIBLE_DEVICES"] == "0"
    assert gpu["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert not any(name.startswith("CUDA_MPS_") for name in cpu)


@pytest.mark.parametrize(
    ("memory", "limit"), [("40GiB", "0=40G"), ("40GB", "0=38146M"), ("1.5GiB", "0=1536M"), ("64MiB", "0=64M")]
)
def test_memory_limits_are_in_the_units_of_mps(memory: str, limit: str) -> None:
    (environment,) = environments(f"60:{memory}")
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == limit


def test_a_part_without_memory_has_no_limit() -> None:
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in environments("60")[0]


def test_several_gpus_are_shared_and_the_limit_counts_on_each() -> None:
    environment = gpu_environment(parse_parts("60:8GiB"), 0, port=5000, gpus=2)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8G,1=8G"


@pytest.mark.parametrize(("outside", "inside"), [("2,3", "0"), ("GPU-7f,GPU-2a", "GPU-7f"), ("", "0")])
def test_numbers_of_gpus_are_those_that_the_daemon_gives(outside: str, inside: str) -> None:
    environment = gpu_environment(parse_parts("60"), 0, port=5000, outside={"CUDA_VISIBLE_DEVICES": outside})
    assert environment["CUDA_VISIBLE_DEVICES"] == inside


def test_ranks_get_their_variables_and_the_daemon_is_stopped(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/another/daemon")
    parts = parse_parts("60:40GiB,25,cpu", "a,a,b")
    ranks = collect_gpu(parts, python(PRINT_ENVIRONMENT), env={"EXTRA": "1"}, timeout_s=60)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], ranks[0].stderr
    found = [json.loads(rank.stdout) for rank in ranks]
    mps.assert_stopped()
    _, folder, _ = mps.lines[0].split()
    port = int(found[0]["MASTER_PORT"])
    for rank, environment in enumerate(found):
        expected = gpu_environment(parts, rank, port=port) | {
            "EXTRA": "1",
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
        }
        assert {name: environment.get(name) for name in expected} == expected
    limits = [environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") for environment in found]
    assert limits == ["0=40G", None, None]


def test_ranks_share_a_secret() -> None:
    parts = parse_parts("cpu,cpu,cpu")
    runs = [collect_gpu(parts, python(PRINT_SECRET), timeout_s=60) for _ in range(2)]
    first, second = ({rank.stdout for rank in ranks} for ranks in runs)
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)


def test_the_daemon_runs_while_ranks_do(mps: FakeMps) -> None:
    code = "import os; print(os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY']))"
    (rank,) = collect_gpu(parse_parts("60"), python(code), timeout_s=60)
    assert rank.stdout == "True\n"
    mps.assert_stopped()


def test_one_daemon_serves_several_runs(mps: FakeMps) -> None:
    with mps_daemon() as daemon:
        for _ in range(2):
            ranks = collect_gpu(parse_parts("60,25"), ["true"], daemon=daemon, timeout_s=60)
            assert [rank.returncode for rank in ranks] == [0, 0]
            assert mps.is_running
    mps.assert_stopped()


def test_cpu_ranks_alone_need_no_daemon(mps: FakeMps) -> None:
    ranks = collect_gpu(parse_parts("cpu,cpu"), ["sh", "-c", "echo $RANK; echo e$RANK >&2"], timeout_s=60)
    assert [(rank.stdout, rank.stderr) for rank in ranks] == [("0\n", "e0\n"), ("1\n", "e1\n")]
    assert mps.lines == []


def test_a_rank_that_fails_ends_the_others_and_the_daemon(mps: FakeMps) -> None:
    script = "[ $RANK = 0 ] || exit 3; sleep 300"
    ending = run_gpu(parse_parts("60,25", "a,b"), ["sh", "-c", script], grace_s=0.1, timeout_s=60)
    assert (ending.code, ending.describe()) == (3, "[1 b] ended with exit code 3")
    mps.assert_stopped()


def test_a_collected_rank_that_fails_leaves_the_others_running(mps: FakeMps) -> None:
    script = "[ $RANK = 0 ] || kill -s KILL $$; sleep 0.5; echo survived"
    first, second = collect_gpu(parse_parts("60,25"), ["sh", "-c", script], timeout_s=60)
    assert (first.returncode, first.stdout) == (0, "survived\n")
    assert second.returncode == -signal.SIGKILL
    mps.assert_stopped()


def test_collected_ranks_are_killed_at_the_deadline_with_what_they_started(mps: FakeMps, tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/$RANK; [ $RANK = 0 ] && exit 5; echo waits; wait"
    first, second = collect_gpu(parse_parts("60,25"), ["sh", "-c", script], timeout_s=1)
    assert first.returncode == 5
    assert (second.returncode, second.stdout) == (TIMED_OUT, "waits\n")
    children = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert eventually(lambda: not any(map(is_alive, children)))
    mps.assert_stopped()


def test_the_daemon_is_stopped_when_its_user_raises(mps: FakeMps) -> None:
    def interrupt() -> None:
        with mps_daemon():
            assert mps.is_running
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    mps.assert_stopped()


def test_a_daemon_that_does_not_quit_is_killed(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANGS", "1")
    with mps_daemon(quit_s=0.3):
        assert mps.is_running
    assert not mps.is_running


def test_a_daemon_that_does_not_start_is_an_error_in_its_words(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    with pytest.raises(WorldError, match=r"CUDA MPS did not start \(no device is here\); see whether"), mps_daemon():
        pytest.fail("it started")
    assert mps.lines == []


def test_a_machine_without_mps_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"this machine has no CUDA MPS .*; run it on a machine with an NVIDIA GPU"):
        collect_gpu(parse_parts("60"), [sys.executable], timeout_s=10)


def test_an_empty_list_of_gpus_is_refused(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is empty, so that ranks see no GPU; unset it"):
        collect_gpu(parse_parts("60"), ["true"], timeout_s=10)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--parts", "60", "--", "no-such-command"), 'there is no command "no-such-command"; write it as'),
        (("--parts", "600", "--", "true"), '"600" is not a part of a GPU'),
        (("--parts", "60", "--hosts", "a,b", "--", "true"), '"a,b" gives 2 names of hosts, and there are 1 parts'),
    ],
)
def test_the_command_refuses_bad_input_in_one_line(mps: FakeMps, words: tuple[str, ...], sentence: str) -> None:
    done = subprocess.run(mimatrix(*words), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mimatrix: {sentence}")
    assert done.stderr.count("\n") == 1
    assert mps.lines == []


def test_the_command_runs_ranks_with_labels(mps: FakeMps) -> None:
    words = ("--parts", "60:40GB,25,cpu", "--hosts", "a,a,b", "--", "sh", "-c", "echo $LOCAL_RANK")
    done = subprocess.run(mimatrix(*words), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0 a] 0", "[1 a] 1", "[2 b] 0"]
    mps.assert_stopped()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_ranks_and_daemon_when_interrupted(mps: FakeMps, number: signal.Signals) -> None:
    words = mimatrix("--parts", "60,25", "--", "sh", "-c", "echo ready; sleep 300")
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as command:
        assert command.stdout
        assert b"ready" in command.stdout.readline()
        command.send_signal(number)
        assert command.wait(timeout=30) == 128 + number
    mps.assert_stopped()


def test_ranks_and_daemon_end_when_their_starter_is_killed(mps: FakeMps, tmp_path: Path) -> None:
    code = (
        "from mimatrix.lab import collect_gpu, parse_parts\n"
        f"collect_gpu(parse_parts('60'), ['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 300'], timeout_s=200)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as starter:
        assert eventually((tmp_path / "pid").exists)
        assert eventually(lambda: (tmp_path / "pid").read_text().endswith("\n"))
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        assert eventually(lambda: len(children.read_text().split()) == 3), "a rank, its guard and the daemon's"
        starter.kill()
    rank = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not is_alive(rank) and not mps.is_running)
