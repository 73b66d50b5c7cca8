"""Runs without a plan: one line says how long ranks wait and what a plan would gain; after it nothing is measured."""

import copy
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.collectives.shares import Shares
from mimatrix.engine.planning.wait_monitor import Imbalance, WaitMonitor
from mimatrix.engine.run import Run
from mimatrix.planner.model.split import Split

BATCH, STEPS = 12, 30
MODEL = Perceptron().double()


def observe(
    busy_of: Callable[[int], Sequence[float]], batches: Sequence[int], *, rest_s: float = 0.0
) -> tuple[int, Imbalance | None]:
    """Let a monitor observe steps until it is done; return how many there were, and what it found."""
    now, steps = [0.0], 0
    split = Split.of(batches)
    monitor = WaitMonitor(split, 0, Shares.equal(len(batches)), clock=lambda: now[0])
    while not monitor.is_done:
        busy_s = busy_of(steps)
        now[0] += max(busy_s) + rest_s
        monitor.observe(split, busy_s)
        steps += 1
    return steps, monitor.find_imbalance()


def test_a_slow_rank_is_found_with_the_gain_that_the_planner_predicts() -> None:
    steps, found = observe(lambda _: (0.1, 0.4), (32, 32))
    assert found
    assert (found.waiting_rank, found.slow_rank) == (0, 1)
    assert found.waiting == pytest.approx(0.75)
    # Four times as fast a rank takes 51 of 64 samples: in two micro-batches, since memory is not measured.
    assert found.speedup == pytest.approx(0.4 / 0.16, rel=0.06)
    assert 20 <= steps <= 25


def test_what_every_split_pays_lowers_the_gain() -> None:
    _, found = observe(lambda _: (0.1, 0.4), (32, 32), rest_s=0.4)
    assert found
    assert found.waiting == pytest.approx(0.375)
    assert found.speedup == pytest.approx(0.8 / 0.56, rel=0.06)


def test_short_steps_are_observed_for_seconds() -> None:
    steps, found = observe(lambda _: (0.002, 0.005), (32, 32))
    assert found
    assert 400 <= steps <= 410


def test_ranks_of_nearly_the_same_speed_are_left_in_peace() -> None:
    assert observe(lambda _: (0.1, 0.105), (32, 32))[1] is None


def test_batches_that_fit_the_speeds_are_left_in_peace() -> None:
    assert observe(lambda _: (0.1, 0.1, 0.1), (40, 16, 8))[1] is None


def test_slow_steps_now_and_then_are_no_imbalance() -> None:
    assert observe(lambda step: (0.1, 1.0 if step % 4 == 0 else 0.1), (32, 32))[1] is None


def test_a_rank_without_samples_has_no_speed() -> None:
    assert observe(lambda _: (0.1, 0.4, 0.0), (32, 32, 0))[1] is None


def test_smaller_batches_and_the_first_steps_do_not_count() -> None:
    """An epoch of nine global batches and a half; the first steps are slow on one rank."""
    now, whole, half = [0.0], Split.of((32, 32)), Split.of((16, 16))
    monitor = WaitMonitor(whole, 0, Shares.equal(2), clock=lambda: now[0])
    for step in range(40):
        now[0] += 1.0
        is_half = step % 10 == 9
        monitor.observe(half if is_half else whole, (5.0, 0.1) if is_half or step < 3 else (0.1, 0.1))
    assert monitor.is_done
    assert monitor.find_imbalance() is None


def train_with(busy_s: Sequence[float], calls: Counter[int], *, has_loss: bool = True) -> Callable[[Run], None]:
    """Return a loop whose ranks are busy for the given seconds, as their timers say."""

    def on_rank(run: Run) -> None:
        def busy() -> float:
            calls[run.rank] += 1
            return busy_s[run.rank]

        run._world.timer.busy_s = busy  # type: ignore[method-assign]
        model = copy.deepcopy(MODEL)
        loss = cross_entropy if has_loss else None
        model, optimizer, loader = run.prepare(model, adamw(model), vectors(BATCH * STEPS), loss=loss)
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                optimizer.step()

    return on_rank


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "of each step" in record.message]


@pytest.mark.parametrize(
    ("given", "has_loss", "advice"),
    [
        ({"global_batch": BATCH}, True, 'plan="profile"'),
        ({"global_batch": BATCH}, False, 'plan="online"'),
        ({"batch": [6, 6]}, True, 'global_batch=12, plan="profile" in place of batch'),
    ],
)
def test_a_run_without_a_plan_says_once_how_long_ranks_wait(
    given: dict[str, Any], has_loss: bool, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mimatrix")
    calls = Counter[int]()
    in_runs(2, train_with((0.1, 0.3), calls, has_loss=has_loss), quiet=False, **given)
    assert lines(caplog) == [
        f"rank 0 waits 67 % of each step for rank 1; {advice} would make a step about 1.9 times as short"
    ]
    assert calls == {0: 23, 1: 23}  # of 60 steps: nothing is measured or exchanged after the line


@pytest.mark.parametrize(
    ("ranks", "given", "busy_s", "asked"),
    [
        pytest.param(2, {}, (0.1, 0.105), 23, id="alike"),
        pytest.param(1, {}, (0.1,), 0, id="alone"),
        pytest.param(2, {"quiet": True}, (0.1, 0.3), 1, id="quiet"),
        pytest.param(2, {"plan": "online", "rebalance": False}, (0.1, 0.3), 0, id="planned"),
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_say(
    ranks: int, given: dict[str, Any], busy_s: Sequence[float], asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mimatrix")
    calls = Counter[int]()
    in_runs(ranks, train_with(busy_s, calls), **{"global_batch": BATCH, "quiet": False, **given})
    assert not lines(caplog)
    assert max(calls.values(), default=0) == asked


def test_ranks_need_not_be_quiet_together(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 logs; whether the other one is quiet does not matter, and if it is quiet itself both stop."""
    caplog.set_level(logging.INFO, "mimatrix")
    for own, said in ((lambda rank: {"quiet": rank == 0}, 0), (lambda rank: {"quiet": rank == 1}, 1)):
        calls = Counter[int]()
        in_runs(2, train_with((0.1, 0.3), calls), own=own, global_batch=BATCH)
        assert len(lines(caplog)) == said


SCRIPT = """
import mimatrix, torch
run = mimatrix.init(global_batch=64)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
torch.manual_seed(0)
dataset = [(torch.randn(600), torch.randn(600)) for _ in range(64)]
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), dataset)
for epoch in run.epochs(120):
    for inputs, targets in loader:
        for _ in range(6):
            loss = (model(inputs) - targets).square().mean()
        run.backward(loss)
        optimizer.step()
"""


@pytest.mark.long
def test_a_slow_worker_is_named_under_mimatrix_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", "2", "--speeds", "1,0.4", "train.py"]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False, env=settings)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    (line,) = [line for line in output.splitlines() if "of each step" in line]
    assert 'for rank 1; plan="online" would make a step about' in line
