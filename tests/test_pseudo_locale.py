"""The pseudo-locale replaces what people read, in processes that tests start too, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pseudo_locale import IN_CHILDREN, RENDERING, pseudo, pseudo_pattern

CHILD = """
from mimatrix.api.models import EventKind
from mimatrix.core.errors import UserError
from mimatrix.launch import ExitCause
from mimatrix.scheduler.reasons import WaitKind, WaitReason
from mimatrix.server.errors import problem
from mimatrix.server.jobs.events import submitted

print(WaitReason(kind=WaitKind.IN_ORDER, ahead=7).describe())
print(ExitCause.lost("its node is gone").describe())
print(submitted("ben").sentence)
print(UserError("rank 1 is lost; restart it"))
print(problem(404, "there is no job 7").body.decode())
print(WaitKind.IN_ORDER.value, submitted("ben").data, EventKind.SUBMITTED.value)
"""


def test_sentences_of_children_are_replaced_and_values_are_not() -> None:
    paths = [IN_CHILDREN, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=env, check=True, capture_output=True, text=True, timeout=60
    )
    *sentences, answer, values = done.stdout.splitlines()
    assert len(sentences) == 4
    for sentence in sentences:
        assert not re.search("[a-zA-Z0-9]", sentence), sentence
    assert pseudo("there is no job 7") in answer
    assert values == "in_order {'user': 'ben'} submitted"


def test_all_modules_that_render_are_replaced() -> None:
    for name in RENDERING:
        __import__(name)


@pytest.mark.parametrize(
    "pattern", [r"rank 1 .* lost", r"\d{1,3} ranks\.", "(?P<who>rank|host) [0-9] (?:is|was) lost", "a|b"]
)
def test_patterns_match_the_same_in_other_letters(pattern: str) -> None:
    for text in ("rank 1 was lost", "12 ranks.", "host 3 is lost", "b", "12 ranksx", "c"):
        assert bool(re.search(pattern, text)) == bool(re.search(pseudo_pattern(pattern), pseudo(text))), text
