"""A class name exists once in the repository, so that a name leads to one place.

All classes count, also private and nested ones: a reader who searches for a name finds them all.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("mimatrix", "bench", "tests", "docs", "examples")


def doubles(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every class name that is defined more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path} line {node.lineno}")
    return [f"class {name} is defined in {' and in '.join(where)}" for name, where in places.items() if len(where) > 1]


def read_sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def test_a_class_name_exists_once_in_the_repository() -> None:
    sources = read_sources()
    assert len(sources) > 800
    assert doubles(sources) == []


def test_a_second_class_of_a_name_is_seen_wherever_it_is() -> None:
    sources = read_sources()
    name = "mimatrix/engine/world.py"
    assert "class World" in sources[name]
    for text in (
        "class World:\n    pass",
        "def f():\n    class World:\n        pass",
        "class _A:\n    class World: ...",
    ):
        (sentence,) = doubles({name: sources[name], "mimatrix/comm/other.py": text})
        assert "class World is defined in mimatrix/engine/world.py line " in sentence
        assert "and in mimatrix/comm/other.py line " in sentence
    (sentence,) = doubles({"mimatrix/comm/a.py": "class _Push: ...", "mimatrix/hybrid/b.py": "class _Push: ..."})
    assert "class _Push" in sentence
