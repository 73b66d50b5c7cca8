"""No module has more than 400 lines: a longer one has more than one idea, and is split by them."""

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_LINES = 400


def count_lines() -> dict[str, int]:
    paths = [path for folder in ("mimatrix", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}


def objections(lines: Mapping[str, int]) -> list[str]:
    """Return a sentence for each module that is too long."""
    longer = sorted(path for path, count in lines.items() if count > MAX_LINES)
    return [f"{path} has {lines[path]} lines, more than {MAX_LINES}; split it" for path in longer]


def test_no_module_has_more_than_400_lines() -> None:
    lines = count_lines()
    assert {path.partition("/")[0] for path in lines} == {"mimatrix", "bench"}
    assert objections(lines) == []


def test_the_limit_is_exact() -> None:
    assert objections({"bench/a.py": 400}) == []
    assert objections({"bench/a.py": 401}) == ["bench/a.py has 401 lines, more than 400; split it"]
