"""`mimatrix demo`: the figures on paper, then the real thing in short, ended early, and with bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_commands import ROOT, refused

from mimatrix.cli.train.demo.display import WARM_UP, Board, summarize
from mimatrix.cli.train.demo.progress import WorkerOutput, headline, render

SPEEDS = (1.0, 0.5, 0.25)
COMMAND = [sys.executable, "-m", "mimatrix.cli.main", "demo"]
PLAIN = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}


def line(rank: int, phase: str, event: str, **fields: object) -> bytes:
    return f"[{rank}] {json.dumps({'phase': phase, 'event': event, **fields})}\n".encode()


def heard(steps: int = WARM_UP + 10) -> Board:
    """Return a demo on paper: even steps take 0.4 s, planned ones 0.2 s; alone the workers do 3,500 samples/s."""
    board = Board(3)
    told = WorkerOutput(board, lambda: None)
    for rank, rate in enumerate((2000.0, 1000.0, 500.0)):
        told.write(line(rank, "alone", "ended", samples=rate * 4, seconds=4.0))
    for phase, seconds, batches in (("even", 0.4, [171, 171, 170]), ("planned", 0.2, [293, 146, 73])):
        for rank in range(3):
            told.write(line(rank, phase, "began", batches=batches, steps=steps, predicted_s=0.19))
        for step in range(steps):
            for rank, part in enumerate((0.25, 0.5, 1.0) if phase == "even" else (0.9, 0.9, 0.9)):
                # A slow beginning does not count.
                length = 9.0 if step < WARM_UP else seconds
                times = {"busy_s": part * length, "moving_s": 0.0, "waiting_s": (1 - part) * length}
                told.write(line(rank, phase, "step", step=step, seconds=length, **times))
        for rank in range(3):
            losses = [1.0, 0.5 if phase == "even" else 0.5001]
            told.write(line(rank, phase, "ended", accuracy=0.97, losses=losses, batches=batches))
    return board


def test_a_file_where_the_folder_of_the_picture_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    done = subprocess.run(COMMAND, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'mimatrix: the folder of "out/demo.png" is a file; make it first, or choose another\n'


def test_figures() -> None:
    found = summarize(heard(), SPEEDS, 60.0)
    assert found.ideal_samples_per_s == pytest.approx(3500)
    assert found.even.samples_per_s == pytest.approx(512 / 0.4)
    assert found.planned.samples_per_s == pytest.approx(512 / 0.2)
    assert found.speedup == pytest.approx(2)
    assert found.even.idle == pytest.approx((0.75 + 0.5 + 0) / 3)
    assert found.planned.fraction_of_ideal == pytest.approx(512 / 0.2 / 3500)
    assert found.largest_loss_difference == pytest.approx(1e-4)
    assert [worker.batch for worker in found.planned.workers] == [293, 146, 73]
    assert found.planned.predicted_step_s == 0.19


def test_what_is_shown_while_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    board = Board(3)
    assert headline(board) == "starting the workers"
    told = WorkerOutput(board, lambda: None)
    told.write(line(0, "planned", "measuring") + b"[1] something else\n[x] y\n")
    assert "measuring every worker" in headline(board)
    assert capsys.readouterr().err == "[1] something else\n[x] y\n"
    console = Console(width=80, file=sys.stdout)
    console.print(render(heard(), SPEEDS))
    shown = capsys.readouterr().out
    assert "step 13 of 13, 2560 samples/s, busy 90% / 90% / 90%" in shown
    assert "0 (1x)" in shown
    assert "█" in shown


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_real_thing_in_short(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    words = [*COMMAND, "--epochs", "3", "--json", "--picture", str(picture)]
    done = subprocess.run(words, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "evenly, as DDP does" in done.stderr
    found = json.loads(done.stdout)
    for way in (found["even"], found["planned"]):
        assert sum(worker["batch"] for worker in way["workers"]) == 512
        assert way["samples_per_s"] > 0
        assert 0 <= way["idle"] < 1
        assert all(0.9 < worker["busy"] + worker["moving"] + worker["waiting"] < 1.1 for worker in way["workers"])
    # Few steps and a machine with other work say little about speed; that both compute the same, they say.
    assert found["largest_loss_difference"] < 1e-3
    assert abs(found["even"]["accuracy"] - found["planned"]["accuracy"]) < 0.02
    assert picture.stat().st_size > 10_000


def test_when_it_is_ended_nobody_stays(tmp_path: Path) -> None:
    words = [*COMMAND, "--picture", str(tmp_path / "demo.png")]
    with subprocess.Popen(words, cwd=tmp_path, env=PLAIN, stderr=subprocess.PIPE, text=True) as demo:
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
        deadline = time.monotonic() + 60
        while len(workers := children.read_text().split()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=30) == 128 + signal.SIGINT
        assert demo.stderr is not None
        assert "mimatrix: ended by SIGINT" in demo.stderr.read()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not (tmp_path / "demo.png").exists()


def test_bad_input_is_one_sentence() -> None:
    assert "use .png or .svg" in refused("demo", "--picture", "demo.txt")
    assert "use --epochs 2 or more" in refused("demo", "--picture", "demo.png", "--epochs", "1")
    assert "unknown way to slow down" in refused("demo", "--picture", "demo.png", "--slow-by", "sleep")
