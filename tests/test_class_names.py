"""A class name exists once in `mimatrix` and `bench`, so that a name leads to one place.

All classes count, also private and nested ones: a reader who searches for a name finds them all.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "comm", "hybrid", "worker", "profiler", "netsim", "collectives", "cluster")
CLEAN = (*(f"mimatrix/{package}/" for package in PACKAGES), "bench/")
"""Folders that have no name twice, neither in one of them nor between them."""
REMAINING = frozenset(
    {
        "Answer",
        "Attempt",
        "Change",
        "Choice",
        "Device",
        "Ending",
        "History",
        "Log",
        "Message",
        "Node",
        "Outcome",
        "Part",
        "Phase",
        "Place",
        "Point",
        "Policy",
        "Problem",
        "Progress",
        "Report",
        "Role",
        "Seat",
        "Settings",
        "Span",
        "Told",
        "Traffic",
        "Wait",
        "Work",
        "_Entry",
        "_Lines",
    }
)
"""Names that other packages still define a second time. This set may only shrink."""


def doubles(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every class name that is defined more than once."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path} line {node.lineno}")
    return [f"class {name} is defined in {' and in '.join(where)}" for name, where in places.items() if len(where) > 1]


def read_sources() -> dict[str, str]:
    paths = [path for folder in ("mimatrix", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def repeated_names() -> dict[str, str]:
    """Return the sentence about each repeated class of the repository, by name."""
    return {sentence.split()[1]: sentence for sentence in doubles(read_sources())}


def test_a_class_name_exists_once_in_the_repository() -> None:
    assert [sentence for name, sentence in repeated_names().items() if name not in REMAINING] == []


def test_a_class_name_exists_once_in_clean_packages() -> None:
    sources = {path: text for path, text in read_sources().items() if path.startswith(CLEAN)}
    assert {folder for folder in CLEAN if any(path.startswith(folder) for path in sources)} == set(CLEAN)
    assert doubles(sources) == []


def test_remaining_names_are_still_repeated() -> None:
    unique = REMAINING - repeated_names().keys()
    assert not unique, f"now defined once, so remove from REMAINING: {', '.join(sorted(unique))}"


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
