"""Environment variables: how they are read, and that `core/environment.py` alone spells their names."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mimatrix.core import environment

PACKAGE = Path(__file__).parents[2] / "mimatrix"
OWNER = "core/environment.py"
# The beginning of a name counts, too: f"MIMATRIX_{name}" would hide which variables are read.
_NAME = re.compile(r"MIMATRIX_[A-Z_]*")


def spelled_names(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every string constant outside `OWNER` that is the name of a variable."""
    return [
        f"{path} line {node.lineno}: use mimatrix.core.environment instead of {node.value!r}"
        for path, text in sources.items()
        if path != OWNER
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value)
    ]


def read_sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_other_module_spells_the_name_of_a_variable() -> None:
    sources = read_sources()
    assert OWNER in sources
    assert spelled_names(sources) == []


@pytest.mark.parametrize(
    "text",
    [
        'import os\nos.environ.get("MIMATRIX_ARENA")',
        'def f(environ):\n    return environ["MIMATRIX_TOKEN"]',
        'told = {"MIMATRIX_JOB": "7"}',
        'f = lambda name: environ[f"MIMATRIX_{name}"]',
        'NAME = "MIMATRIX_NEVER_LISTED"',
    ],
)
def test_a_name_spelled_elsewhere_is_noticed(text: str) -> None:
    (sentence,) = spelled_names({"worker/x.py": text})
    assert sentence.startswith("worker/x.py line ")


def test_prose_may_mention_a_variable() -> None:
    text = '"""Reads MIMATRIX_ARENA."""\nraise ValueError("set MIMATRIX_ARENA to a larger size")'
    assert spelled_names({"worker/x.py": text, OWNER: 'ARENA = "MIMATRIX_ARENA"'}) == []


def test_every_listed_variable_is_used() -> None:
    """A name in the list that nothing reads would be a promise that nobody keeps."""
    code = "\n".join(text for path, text in read_sources().items() if path != OWNER)
    for variable in environment.variables():
        attribute = variable.name.removeprefix("MIMATRIX_")
        assert getattr(environment, attribute) is variable
        assert re.search(rf"\b{attribute}\.(get|name)\b", code), f"nothing uses {variable.name}"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ARENA.name, "")
    assert environment.ARENA.get() == ""
    assert environment.ARENA.get(default="1GiB") == "1GiB"
    monkeypatch.setenv(environment.ARENA.name, "2GiB")
    assert environment.ARENA.get(default="1GiB") == "2GiB"


def test_a_variable_can_be_read_from_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.JOB.name, "1")
    assert environment.JOB.get({"MIMATRIX_JOB": "7"}) == "7"
    assert environment.JOB.get({}) == ""


def test_variables_for_people_are_listed_first_and_each_once() -> None:
    listed = environment.variables()
    names = [variable.name for variable in listed]
    assert len(set(names)) == len(names) > 20
    is_own = [variable.set_by.startswith("you") for variable in listed]
    assert is_own == sorted(is_own, reverse=True)
    assert all(variable.meaning.endswith(".") for variable in listed)
