"""Tests never import measurements: what both need is in `tests/support`, which `bench` imports."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def objections(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every import of `bench` in files under `tests/`."""
    return [
        f"{path} line {line}: {name} is imported; move what is needed to tests/support"
        for path, text in sources.items()
        for line, name in _imports(ast.parse(text))
        if name.split(".")[0] == "bench"
    ]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every imported module, also by functions that import and by lists of modules to preload."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if "import" in name or "preload" in name:
                constants = [
                    part.value
                    for argument in node.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant)
                ]
                yield from ((node.lineno, value) for value in constants if isinstance(value, str))


def read_sources() -> dict[str, str]:
    return {str(path.relative_to(TESTS.parent)): path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}


def test_tests_never_import_measurements() -> None:
    sources = read_sources()
    assert len(sources) > 50
    assert objections(sources) == []


SABOTAGE = [
    "import bench",
    "import os, bench.server.load as load",
    "from bench.server import postgresql",
    "def f():\n    from bench import markdown",
    "import importlib\nimportlib.import_module('bench.markdown')",
    "context.set_forkserver_preload(['torch', 'bench.hybrid'])",
    "pytest.importorskip('bench.server')",
]


@pytest.mark.parametrize("source", SABOTAGE)
def test_sabotage_of_a_test_is_seen(source: str) -> None:
    (objection,) = objections({"tests/server/x.py": source})
    assert objection.startswith("tests/server/x.py line ")


@pytest.mark.parametrize("source", ["import benchmark", "from support.models import adamw", "run('mimatrix bench')"])
def test_other_imports_are_allowed(source: str) -> None:
    assert objections({"tests/server/x.py": source}) == []
