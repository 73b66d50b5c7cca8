"""What comes of the turns of a comparison, with ranks that are invent_records; and one real turn of a small model."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from bench.drift import drop_index, recovery_index
from bench.heterogeneous.pictures import fraction_bars
from bench.heterogeneous.rounds import IDEAL, NAMES, OURS, Comparison, Rows, compare, rows_of
from bench.heterogeneous.tasks import Meter, RankRecord, RanksFailedError, TrainingTask, losses, train
from bench.uneven_memory import cases, problem_of
from mimatrix.launch.throttle.cpu_quota import quotas

BASE = TrainingTask("", (1.0, 0.25), global_batch=100, warm_up=2)
STEPS_S = {"ddp": 0.4, "hand-tuned ddp": 0.2, OURS: 0.125}
PLAN = {"step_s": 0.12, "split": [[80], [10, 10]]}


def invent_records(task: TrainingTask) -> list[RankRecord]:
    """Return invent_records records: the ideal is 1000 samples a second; FSDP2 dies."""
    if task.who == IDEAL:
        return [RankRecord(0.0, rate=800.0), RankRecord(0.0, rate=200.0)]
    if task.who == "fsdp2":
        raise RanksFailedError("rank 1 ended with exit code 1")
    step_s = STEPS_S[task.who]
    ends = [5.0 + step_s * number for number in range(6)]
    plan = PLAN if task.who == OURS else {}
    return [RankRecord(1.0, ends, [80.0] * 6, 2, plan=plan), RankRecord(1.0, ends, [20.0] * 6, 2)]


def run_comparison(rounds: int, names: tuple[str, ...]) -> tuple[Comparison, list[str]]:
    asked: list[str] = []

    def start(task: TrainingTask) -> list[RankRecord]:
        asked.append(task.who)
        return invent_records(task)

    return compare(BASE, rounds, names, lambda _: None, start), asked


def new_row(rows: Rows, who: str) -> dict[str, object]:
    return next(row for row in rows if row["who"] == who)


def test_rows_say_how_much_of_the_ideal_each_reached() -> None:
    names = ("ddp", "hand-tuned ddp", OURS)
    rows = rows_of(run_comparison(2, names)[0], names)
    assert [row["who"] for row in rows] == [IDEAL, *names]
    assert new_row(rows, IDEAL)["samples_per_s"] == 1000
    assert new_row(rows, IDEAL)["fraction_of_ideal"] == 1
    ours = new_row(rows, OURS)
    assert ours["samples_per_s"] == pytest.approx(800)
    assert ours["fraction_of_ideal"] == pytest.approx(0.8)
    assert ours["speedup_over_ddp"] == pytest.approx(3.2)
    assert (ours["predicted_step_s"], ours["measured_step_s"]) == (0.12, pytest.approx(0.125))
    assert ours["planning_s"] == pytest.approx(5 - 1 - 0.125)
    assert ours["batches"] == [[80, 20], [80, 20]]
    assert ours["loss_apart"] == 0
    assert new_row(rows, "ddp")["planning_s"] is None
    json.dumps(rows, allow_nan=False)


def test_every_round_has_each_once_in_another_order() -> None:
    _, asked = run_comparison(3, ("ddp", OURS))
    assert asked == [IDEAL, "ddp", OURS, "ddp", OURS, IDEAL, OURS, IDEAL, "ddp"]


def test_who_fails_is_a_row_with_a_note_and_not_asked_again() -> None:
    names = ("ddp", "fsdp2")
    found, asked = run_comparison(3, names)
    assert asked.count("fsdp2") == 1
    row = new_row(rows_of(found, names), "fsdp2")
    assert row["note"] == "failed: rank 1 ended with exit code 1"
    assert row["samples_per_s"] is row["fraction_of_ideal"] is row["spread"] is None


def test_who_is_not_installed_is_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.heterogeneous.rounds.find_spec", lambda _: None)
    found, asked = run_comparison(1, ("ddp", "deepspeed"))
    assert "deepspeed" not in asked
    assert new_row(rows_of(found, NAMES), "deepspeed")["note"] == "not installed"


def test_the_picture_leaves_out_who_has_no_figure() -> None:
    names = ("ddp", "fsdp2", OURS)
    (panel,) = fraction_bars(rows_of(run_comparison(1, names)[0], names)).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["ddp", OURS]


def test_rank_0_tells_the_others_which_step_is_the_last(tmp_path: Path) -> None:
    task = replace(BASE, warm_up=3, most=8, seconds=7.0)
    clocks = [count(), count()]
    first, second = (
        Meter(task, tmp_path, rank, lambda rank=rank: next(clocks[rank]), RankRecord(0.0)) for rank in (0, 1)
    )
    steps = next(number for number in count(1) if not (first.ends_step(1.0), second.ends_step(2.0))[0])
    assert steps == 3 + 7
    assert second.is_over(10)
    assert not second.is_over(9)
    assert losses([first.record, second.record], 100) == [0.03] * 10


def test_a_drop_is_over_when_several_steps_are_fast_again() -> None:
    assert drop_index([1.0, 2.0, 3.0, 4.0], 2.5) == 1
    rates = [100.0] * 5 + [30.0, 95.0, 30.0, 30.0, 30.0] + [92.0] * 6
    assert recovery_index(rates, 5, 90.0) == 10
    assert recovery_index(rates[:13], 5, 90.0) is None


def test_a_small_worker_with_the_larger_part_is_a_problem() -> None:
    case, stages = cases()
    row = {"died": "", "stage": 2, "micro": [[8], [4, 4]], "shares": [0.6, 0.4], "fraction_of_ideal": 0.9}
    assert not problem_of(case, row)
    assert not problem_of(stages, row)
    assert "stage 0 was chosen" in problem_of(stages, row | {"stage": 0})
    assert "micro-batches of 8" in problem_of(case, row | {"micro": [[8], [8]]})
    assert "shares are" in problem_of(case, row | {"shares": [0.4, 0.6]})
    assert "0.84 of the ideal" in problem_of(case, row | {"fraction_of_ideal": 0.84})


@pytest.mark.long
def test_ddp_and_mimatrix_train_the_same_under_real_quotas() -> None:
    try:
        with quotas({0: 0.5}):
            pass
    except Exception as error:  # noqa: BLE001 (whatever it is, there are no quotas here)
        pytest.skip(f"no quotas: {error}")
    task = TrainingTask("", (1.0, 0.9), global_batch=24, width=48, depth=2, batches=3, warm_up=2, seconds=0.1, most=6)
    curves = [losses(train(replace(task, who=who), timeout_s=100), 24) for who in ("hand-tuned ddp", "mimatrix even")]
    assert len(curves[0]) == len(curves[1]) == 8
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert curves[0][-1] < curves[0][0]
