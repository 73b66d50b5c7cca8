"""Plans as rows and as trace_step: what is drawn adds up to what is promised."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, Measurements, ModelSize, Profile
from mimatrix.planner.planner import make_plan
from mimatrix.planner.present.drawing import draw_measurements, draw_plan
from mimatrix.planner.present.rows import format_micro_steps, plan_rows, profile_rows, size_rows, trace_step

MB = 10**6
MODEL = ModelSize("m", "small", MB, 4 * MB, 4 * MB, 8 * MB, MB)
SIZES = (1, 2, 4, 8, 16, 32)


def profile(rate: float) -> Profile:
    seconds = Curve.of((size, 0.01 + size / rate) for size in SIZES)
    memory = Curve.of((size, size * MB) for size in SIZES)
    return Profile("cpu", "m", seconds, memory, 1000 * MB, 0.02 * 1000 / rate, (0.0, 0.0, 0.001, 0.002))


PROFILES = (profile(1000), profile(400), profile(150))


def problem(stage: int, equal_counts: bool) -> Problem:
    paid = Communication.of(0.02, 0.01, 0.01)
    names = ("a", "b", "c")
    return Problem(
        global_batch=200,
        model=MODEL,
        profiles=PROFILES,
        names=names,
        communication=FixedCommunication(paid),
        stages=(stage,),
        equal_counts=equal_counts,
    )


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lanes_are_the_step_that_was_promised(stage: int, equal_counts: bool) -> None:
    plan = make_plan(problem(stage, equal_counts))
    found = trace_step(plan, PROFILES, equal_counts)
    for part, spans in zip(plan.parts, found, strict=True):
        assert spans[0].began_s == 0
        assert all(one.ended_s == other.began_s for one, other in pairwise(spans))
        assert spans[-1].ended_s == pytest.approx(plan.step_s)
        time = {
            doing: sum(each.ended_s - each.began_s for each in spans if each.doing == doing)
            for doing in ("computing", "optimizer", "communication", "waiting")
        }
        assert time["computing"] + time["optimizer"] == pytest.approx(part.busy_s)
        assert time["communication"] == pytest.approx(plan.communication_s)
        assert time["waiting"] == pytest.approx(part.idle_s, abs=1e-12)
    micro_steps = [sum(span.doing == "computing" for span in spans) for spans in found]
    assert micro_steps == [len(sizes) for sizes in plan.split.micro]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [((32,) * 4, "4 x 32"), ((32, 32, 31), "2 x 32 + 31"), ((7,), "7"), ((), "-"), ((3, 2, 2), "3 + 2 x 2")],
)
def test_micro_steps_as_text(sizes: tuple[int, ...], text: str) -> None:
    assert format_micro_steps(sizes) == text


def test_rows_and_pictures() -> None:
    plan = make_plan(problem(0, False))
    rows = plan_rows(plan)
    assert sum(row.batch for row in rows) == 200
    assert {row.share for row in rows} == {1.0}, "in stage 0 everyone holds everything"
    assert sum(row.share for row in plan_rows(make_plan(problem(1, False)))) == pytest.approx(1)
    assert "stage 0" in draw_plan(plan, PROFILES).axes[0].get_title(loc="left")
    found = Measurements(MODEL, PROFILES)
    assert [row.largest_batch for row in profile_rows(found)] == [32] * 3
    assert profile_rows(found)[0].samples_per_s == pytest.approx(32 / (0.01 + 0.032))
    assert len(size_rows(found)) == 3 * len(SIZES)


def test_the_picture_of_measurements_tells_alike_ranks_apart() -> None:
    times, rates, memory = draw_measurements(Measurements(MODEL, PROFILES), (1.0, 0.5, 0.25)).axes
    assert len(times.lines) == len(rates.lines) == len(memory.lines) == 6
    _, names = rates.get_legend_handles_labels()
    assert names == ["rank 0: cpu, speed 1", "rank 1: cpu, speed 0.5", "rank 2: cpu, speed 0.25"]
    assert memory.get_ylabel().endswith("[MB]")
    assert np.asarray(memory.lines[1].get_ydata()).tolist() == pytest.approx(SIZES)


def test_memory_that_was_not_measured_is_not_drawn() -> None:
    blank = tuple(replace(each, memory=Curve.of([(1, 0.0), (4, 0.0)])) for each in PROFILES)
    _, rates = draw_measurements(Measurements(MODEL, blank)).axes
    assert rates.get_legend_handles_labels()[1][0] == "rank 0: cpu"
