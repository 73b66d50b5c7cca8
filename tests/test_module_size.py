"""No module has more than 400 lines: a longer one has more than one idea, and is split by them."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
STILL_LONGER = frozenset(
    {
        "mimatrix/server/controller/reconcile.py",
        "mimatrix/api/models.py",
    }
)
"""Modules that were longer when the limit came. This set may only shrink."""


def count_lines() -> dict[str, int]:
    paths = [path for folder in ("mimatrix", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}


def objections(lines: Mapping[str, int], allowed: frozenset[str]) -> list[str]:
    """Return a sentence for each module that is too long, and for each exception that is no longer needed."""
    longer = {path for path, count in lines.items() if count > MAX_LINES}
    return [
        *(f"{path} has {lines[path]} lines, more than {MAX_LINES}; split it" for path in sorted(longer - allowed)),
        *(
            f"{path} is not longer than {MAX_LINES} lines; remove it from STILL_LONGER"
            for path in sorted(allowed - longer)
        ),
    ]


def test_no_module_has_more_than_400_lines() -> None:
    lines = count_lines()
    assert {path.partition("/")[0] for path in lines} == {"mimatrix", "bench"}
    assert objections(lines, STILL_LONGER) == []


def test_the_limit_is_exact_and_exceptions_must_be_needed() -> None:
    assert objections({"bench/a.py": 400}, frozenset()) == []
    assert objections({"bench/a.py": 401}, frozenset()) == ["bench/a.py has 401 lines, more than 400; split it"]
    assert objections({"bench/a.py": 401}, frozenset({"bench/a.py"})) == []
    (sentence,) = objections({"bench/a.py": 400}, frozenset({"bench/a.py"}))
    assert sentence == "bench/a.py is not longer than 400 lines; remove it from STILL_LONGER"
    (sentence,) = objections({}, frozenset({"bench/gone.py"}))
    assert "remove it from STILL_LONGER" in sentence
