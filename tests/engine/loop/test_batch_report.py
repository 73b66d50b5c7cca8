"""A batch report travels as JSON: every field survives, and only what differs from the defaults is sent."""

import json
from dataclasses import fields
from typing import Any

import pytest

from mimatrix.engine.checkpoint.save_calls import SaveCalls
from mimatrix.engine.loop.batch_report import BatchReport, LaunchOrders, PreemptionReport
from mimatrix.engine.planning.plan_follower import PaceReport

VALUES: dict[str, Any] = {
    "weight": 3.5,
    "grad_square": 0.1,
    "touched": [0, 2],
    "lr_scheduler_calls": [4],
    "has_bypassed_scheduler": True,
    "metrics": {"7": {"loss": [1.25, 5.0]}},
    "save_calls": SaveCalls(count=2, folder="checkpoints", keep=3, metric=0.5, best="min"),
    "hyperparams": {"0/lr": 0.01, "0/betas": [0.9, 0.999]},
    "was_in_body": [False, True],
    "busy_s": 0.75,
    "launch_order": "ggrgr",
    "pace": PaceReport(busy_s=0.25, head=[1, 3], offer={"plan": 1}),
    "preemption": PreemptionReport(is_requested=True, has_saved=False),
    "save_is_due": True,
}
"""For every field a value that is not the default."""


def round_trip(report: BatchReport) -> BatchReport:
    return BatchReport.from_json(json.loads(json.dumps(report.to_json())))


def test_every_field_is_tried() -> None:
    assert VALUES.keys() == {field.name for field in fields(BatchReport)}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_survives_json_and_travels_alone(name: str) -> None:
    report = BatchReport(**{name: VALUES[name]})
    assert report != BatchReport()
    assert list(report.to_json()) == [name]
    assert round_trip(report) == report


def test_all_fields_survive_json_together() -> None:
    report = BatchReport(**VALUES)
    assert round_trip(report) == report


def test_defaults_are_not_sent() -> None:
    assert BatchReport().to_json() == {}
    assert round_trip(BatchReport()) == BatchReport()


def test_floats_survive_json_bit_for_bit() -> None:
    report = BatchReport(weight=0.1 + 0.2, grad_square=1e-310)
    assert [round_trip(report).weight, round_trip(report).grad_square] == [0.1 + 0.2, 1e-310]


def meet(ranks: list[LaunchOrders], orders: list[str]) -> list[str]:
    """Let ranks that have launched in these orders tell each other what is new; return what each takes."""
    news = [rank.news(order) for rank, order in zip(ranks, orders, strict=True)]
    return [rank.agree(news) for rank in ranks]


def test_ranks_take_the_launch_order_of_the_first_rank_with_news() -> None:
    ranks = [LaunchOrders() for _ in range(3)]
    assert meet(ranks, ["", "grg", "ggr"]) == ["grg"] * 3


def test_launch_order_that_all_ranks_know_is_not_told_again() -> None:
    ranks = [LaunchOrders() for _ in range(2)]
    assert [rank.news("ggr") for rank in ranks] == ["ggr", "ggr"]
    meet(ranks, ["ggr", "ggr"])
    for _ in range(2):
        assert [rank.news("ggr") for rank in ranks] == ["", ""]
        assert meet(ranks, ["ggr", "ggr"]) == ["", ""], "it stays"


def test_launch_order_that_changes_on_one_rank_is_taken_by_all() -> None:
    ranks = [LaunchOrders() for _ in range(3)]
    meet(ranks, ["ggr"] * 3)
    assert meet(ranks, ["ggr", "ggr", "rgg"]) == ["rgg"] * 3
    assert [rank.news("rgg") for rank in ranks] == [""] * 3
    assert ranks[0].news("ggr") == "ggr", "what was agreed on before is news again"
