"""The record of losses: it holds every configuration, and a comparison sees a difference in the last bit."""

import copy
import json
from typing import Any

from bench.markdown import MEASUREMENTS
from bench.recorded_losses.__main__ import compare, dump
from bench.recorded_losses.configurations import PRECISIONS, STAGES, configurations

RECORD: dict[str, Any] = json.loads((MEASUREMENTS / "recorded_losses.json").read_text())
NAME = "tied, 3 ranks, batch 4,3,1, stage 2, fp32"


def test_the_record_has_every_configuration() -> None:
    assert list(RECORD["runs"]) == [config.name for config in configurations()]
    page = (MEASUREMENTS / "recorded_losses.md").read_text()
    assert f"was made with commit {RECORD['commit'][:7]}" in page
    assert RECORD["machine"]["torch"]


def test_configurations_cover_ranks_stages_and_precisions_in_both_modes() -> None:
    for is_hybrid in (False, True):
        chosen = [config for config in configurations() if bool(config.groups) == is_hybrid]
        assert {config.ranks for config in chosen} == {1, 2, 3, 4}
        assert {(config.stage, config.precision) for config in chosen} == {(s, p) for s in STAGES for p in PRECISIONS}
    assert any(0 in group for config in configurations() for group in config.batches)


def test_a_record_is_identical_to_itself_after_writing_and_reading() -> None:
    report, is_same = compare(RECORD, json.loads(dump(RECORD)))
    assert is_same, report


def test_one_bit_of_a_loss_is_seen() -> None:
    changed = copy.deepcopy(RECORD)
    loss = changed["runs"][NAME]["losses"][0]
    loss[4] = loss[4].replace("p", "1p")
    report, is_same = compare(RECORD, changed)
    assert not is_same
    assert f"{NAME}: losses of group 0 differ from step 4 on" in report


def test_other_parameters_missing_steps_and_missing_runs_are_seen() -> None:
    changed = copy.deepcopy(RECORD)
    changed["runs"][NAME]["parameters"] = ["0"]
    assert "the same losses, but other parameters at the end" in compare(RECORD, changed)[0]
    changed["runs"][NAME]["losses"][0].pop()
    assert "group 0 has 10 and 9 steps" in compare(RECORD, changed)[0]
    del changed["runs"][NAME]
    assert f"{NAME}: only in one of the records" in compare(RECORD, changed)[0]


def test_a_comparison_of_nothing_is_not_identical() -> None:
    assert not compare(RECORD, RECORD, only="no such name")[1]


def test_another_machine_is_named_as_a_possible_cause() -> None:
    changed = copy.deepcopy(RECORD)
    changed["machine"]["torch"] = "9.9"
    assert compare(RECORD, changed)[1]
    changed["runs"][NAME]["parameters"] = ["0"]
    assert "recorded on different machines (torch: " in compare(RECORD, changed)[0]
