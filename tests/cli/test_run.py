"""`mimatrix run` as people use it: real processes, signals, scripts for torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mimatrix.processes.cgroups import cpu_cgroups

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "mimatrix.cli.main", "run"]
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("MIMATRIX_SLOWDOWN", "OMP_NUM_THREADS")}
OUTSIDE |= {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
WAYS = ["signals", pytest.param("quota", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))]


def mimatrix(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=cwd, env=OUTSIDE, capture_output=True, text=True, timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "echo.py").write_text("import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("echo.py", "--lr", "0.1"), "--lr 0.1"),
        (("echo.py", "--", "--lr", "0.1"), "--lr 0.1"),
        (("echo.py", "-n", "7", "--json", "-h"), "-n 7 --json -h"),
        (("-m", "echo", "--lr", "0.1"), "--lr 0.1"),
        (("--", "echo.py", "--lr", "--", "x"), "--lr -- x"),
        (("echo.py",), ""),
    ],
)
def test_arguments_are_the_scripts(folder: Path, words: tuple[str, ...], told: str) -> None:
    done = mimatrix("-n", "2", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} {told}".rstrip() for rank in range(2)]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nope.py",), "there is no script"),
        (("-m", "nope"), "there is no module"),
        (("-n", "0", "echo.py"), "use -n 1"),
        (("-n", "3", "--speeds", "1,0.5", "echo.py"), "--speeds has 2 numbers for 3 ranks"),
        (("-n", "2", "--speeds", "1,2", "echo.py"), "a speed of 2 is out of range"),
        (("--speeds", "fast", "echo.py"), "is not a list of speeds"),
        (("--slow-by", "sleep", "echo.py"), "unknown way to slow down"),
        (("--timeout", "soon", "echo.py"), "is not a time"),
        (("--max-restarts", "-1", "echo.py"), "use --max-restarts 0"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, words: tuple[str, ...], said: str) -> None:
    done = mimatrix(*words, cwd=folder)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mimatrix: ")
    assert said in line


def test_a_failure_is_named_and_json_is_the_last_line(folder: Path) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('lost my way')\ntime.sleep(60)\n"
    (folder / "fail.py").write_text(script)
    words = ("-n", "2", "--grace", "0.1", "--max-restarts", "1", "--timeout", "60", "--json", "fail.py")
    done = mimatrix(*words, cwd=folder)
    assert done.returncode == 1
    again, why = [line for line in done.stderr.splitlines() if line.startswith("mimatrix: ")]
    assert again == "mimatrix: rank 1 failed: lost my way; all 2 ranks will be started again (restart 1 of 1)"
    assert why == "mimatrix: rank 1 failed: lost my way after 1 restart"
    assert done.stderr.count("[1] lost my way") == 2
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found.pop("seconds") < 60
    assert found == {
        "code": 1,
        "kind": "failed",
        "rank": 1,
        "signal": None,
        "reason": "rank 1 failed: lost my way after 1 restart",
        "restarts": 1,
        "ranks": 2,
        "slowed_by": "",
    }


MISTAKEN = """
import mimatrix, torch
run = mimatrix.init(8)
model = torch.nn.Linear(2, 2)
_, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 16)
for batch in loader:
    run.backward(model(batch))
"""


def test_a_mistake_in_a_script_is_a_sentence_with_its_place(folder: Path) -> None:
    (folder / "mistaken.py").write_text(MISTAKEN)
    done = mimatrix("-n", "2", "--max-restarts", "1", "mistaken.py", cwd=folder)
    assert done.returncode == 2, done
    said = "the loss has the shape [4, 2]; give run.backward a scalar, such as loss.mean() (mistaken.py, line 7)"
    rank, over = sorted(done.stderr.splitlines())  # what all ranks raise alike is shown once
    assert rank in (f"[0] mimatrix: {said}", f"[1] mimatrix: {said}")
    assert over in (f"mimatrix: rank 0 failed: {said}", f"mimatrix: rank 1 failed: {said}")


ONE_RANK_FAILS = """
import sys, mimatrix, torch
run = mimatrix.init(global_batch=8 * int(sys.argv[2]))
model = torch.nn.Linear(2, 1)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 256)
for number, batch in enumerate(loader):
    run.backward(model(batch).mean())
    optimizer.step()
    if number == 1 and run.rank == 1:
        if sys.argv[1] == "raise":
            raise ValueError("no such file")
        run.evaluate(model, [torch.ones(2)] * 8, lambda model, batch: {"mean": float(model(batch).mean())})
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.long)])
def test_error_of_one_rank_is_the_last_line_and_each_peer_says_one(folder: Path, ranks: int) -> None:
    (folder / "fails.py").write_text(ONE_RANK_FAILS)
    done = mimatrix("-n", str(ranks), "fails.py", "raise", str(ranks), cwd=folder)
    assert done.returncode == 1, done
    *lines, over = done.stderr.splitlines()
    assert over == "mimatrix: rank 1 failed: ValueError: no such file"
    peers = [line for line in lines if not line.startswith("[1] ")]
    assert sorted(line[:3] for line in peers) == [f"[{rank}]" for rank in range(ranks) if rank != 1]
    for line in peers:
        assert f"mimatrix: rank {line[1]} stopped, because rank 1 on " in line
        assert " was lost in " in line
        assert "(fails.py, line " in line
    assert len(lines) - len(peers) <= 5, "one traceback, of the rank that failed"


def test_call_that_one_rank_makes_is_one_sentence_with_both_lines(folder: Path) -> None:
    (folder / "fails.py").write_text(ONE_RANK_FAILS)
    done = mimatrix("-n", "2", "fails.py", "evaluate", "2", cwd=folder)
    assert done.returncode == 2, done
    line, _ = done.stderr.splitlines()
    assert line[4:] in [
        f"mimatrix: rank 1 called run.evaluate (fails.py, line 12) where rank 0 called {call}; "
        "call run.evaluate on all ranks"
        for call in ("run.backward (fails.py, line 7)", "optimizer.step (fails.py, line 8)")
    ]


ONE_RANK_IS_LAST = """
import sys, mimatrix, torch
run = mimatrix.init(global_batch=8)
model = torch.nn.Linear(2, 1)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2)] * 16)
if run.rank == 1:
    sys.exit(int(sys.argv[1]))
run.evaluate(model, [torch.ones(2)] * 8, lambda model, batch: {"mean": float(model(batch).mean())})
"""


@pytest.mark.long
def test_call_after_the_other_rank_ended_well_is_not_started_again(folder: Path) -> None:
    (folder / "last.py").write_text(ONE_RANK_IS_LAST)
    done = mimatrix("-n", "2", "--max-restarts", "1", "last.py", "0", cwd=folder)
    assert done.returncode == 2, done
    said = "rank 1 has ended, and rank 0 waits for it in run.evaluate (last.py, line 8); call run.evaluate on all ranks"
    assert done.stderr.splitlines() == [f"[0] mimatrix: {said}", f"mimatrix: rank 0 failed: {said}"]


@pytest.mark.long
def test_exit_code_of_a_rank_that_failed_first_counts(folder: Path) -> None:
    (folder / "last.py").write_text(ONE_RANK_IS_LAST)
    done = mimatrix("-n", "2", "last.py", "3", cwd=folder)
    assert done.returncode == 3, done
    assert done.stderr.splitlines()[-1] == "mimatrix: rank 1 ended with exit code 3"


def test_the_timeout(folder: Path) -> None:
    (folder / "sleep.py").write_text("import time\ntime.sleep(60)\n")
    done = mimatrix("-n", "2", "--timeout", "0.5", "sleep.py", cwd=folder)
    assert (done.returncode, done.stderr) == (124, "mimatrix: not done after 0.5 s\n")


LONG = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def groups_of(pid: int) -> list[Path]:
    groups = cpu_cgroups()
    return groups.find(f"mimatrix-run-{pid}-") if groups else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("way", WAYS)
def test_when_it_is_ended_all_are(folder: Path, way: str, number: signal.Signals) -> None:
    (folder / "long.py").write_text(LONG)
    words = [*COMMAND, "-n", "2", "--speeds", "1,0.3", "--slow-by", way, "long.py"]
    with subprocess.Popen(words, cwd=folder, env=OUTSIDE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()[1:]]
        assert len(pids) == 4
        assert len(groups_of(launcher.pid)) == (way == "quota")
        launcher.send_signal(number)
        code = launcher.wait(timeout=20)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(lives, pids))
    if number == signal.SIGKILL:
        assert len(groups_of(launcher.pid)) == (way == "quota")
        assert mimatrix("echo.py", cwd=folder).returncode == 0
    assert groups_of(launcher.pid) == []


GLOO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.full((1000,), dist.get_rank() + 1.0)
for _ in range(20):
    total = mine.clone()
    dist.all_reduce(total)
print("sum", total[0].item(), torch.get_num_threads(), dist.is_torchelastic_launched())
dist.destroy_process_group()
"""


def test_a_script_for_torchrun_runs_on_slow_workers(folder: Path) -> None:
    """Stopping and continuing must not upset the waiting calls of Gloo."""
    (folder / "gloo.py").write_text(GLOO)
    done = mimatrix("-n", "2", "--speeds", "1,0.5", "--slow-by", "signals", "--timeout", "90s", "gloo.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] sum 3.0 1 True" for rank in range(2)]
