"""Who may import whom, kept over the syntax tree; and what starting the command may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From top to bottom, and in each storey from left to right.
STOREYS = {
    "doors": ("cli", "server", "launch", "lab"),
    "metal": ("worker", "hybrid", "engine", "profiler", "comm"),
    "paper": ("wire", "scheduler", "monitor", "planner", "netsim", "collectives", "cluster", "core"),
}
STOREY_OF = {package: storey for storey, packages in STOREYS.items() for package in packages}
WITHOUT_TORCH = {*STOREYS["paper"], *STOREYS["doors"]}
# The command opens all other doors; the server gives orders to launchers by their protocol; the launcher shares the
# lab's way to run processes together.
OPENS = {("cli", door) for door in STOREYS["doors"]} | {("server", "launch"), ("launch", "lab")}
HEAVY = ("torch", "numpy", "scipy", "matplotlib")


@dataclass(frozen=True)
class Import:
    """One name that a file imports, and whether that happens when the file itself is imported."""

    line: int
    name: str
    at_start: bool


def objections(sources: Mapping[str, str]) -> list[str]:
    """A sentence for every import that the storeys forbid, and for every package that is in none of them."""
    return [said for path, text in sources.items() for said in _objections(path, text)]


def _objections(path: str, text: str) -> Iterator[str]:
    package = _package_of(path)
    if package and package not in STOREY_OF:
        yield f"{path}: {package} is in no storey; give it a place in docs and in STOREYS of tests/test_storeys.py"
        return
    for found in _imports(path, ast.parse(text)):
        reason = _against_root(found) if not package else _against(package, found.name)
        if reason:
            yield f"{path} line {found.line}: {found.name} is imported, but {reason}"


def _package_of(path: str) -> str:
    """`cluster` for `mimatrix/cluster/picture/scene.py`; nothing for the files that make up `mimatrix` itself."""
    parts = Path(path).with_suffix("").parts[1:]
    return "" if parts in (("__init__",), ("__main__",)) else parts[0]


def _imports(path: str, tree: ast.AST, at_start: bool = True) -> Iterator[Import]:
    """Every import of a tree, the lazy ones and those by a function included."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name, at_start) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join([*_parents(path, level), *([module] if module else [])])
                # `from mimatrix import cluster` imports a package, `from mimatrix.cluster import Link` a name in one.
                whole = [f"{base}.{alias.name}" for alias in names] if base == "mimatrix" else [base]
                yield from (Import(node.lineno, name, at_start) for name in whole)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield Import(node.lineno, str(node.args[0].value), at_start)
        yield from _imports(path, node, at_start and not _is_put_off(node))


def _parents(path: str, level: int) -> tuple[str, ...]:
    return Path(path).parts[:-level] if level else ()


def _is_put_off(node: ast.AST) -> bool:
    """A function, or what only type checkers read."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _against(package: str, name: str) -> str:
    """Why `package` may not import `name`; nothing where it may."""
    top, *rest = name.split(".")
    if top == "torch" and package in WITHOUT_TORCH:
        return f"{package} works without torch"
    if top != "mimatrix":
        return ""
    other = rest[0] if rest else ""
    if package == "core" and other != "core":
        return "core imports nothing of ours"
    if other == package or other == "__version__":
        return ""
    if other not in STOREY_OF:
        return f"{other or 'mimatrix itself'} is in no storey"
    return _against_direction(package, other, inside=len(rest) > 1)


def _against_direction(package: str, other: str, inside: bool) -> str:
    here, there = STOREY_OF[package], STOREY_OF[other]
    storeys = list(STOREYS)
    if storeys.index(here) > storeys.index(there):
        return f"{here} does not import {there}: imports point down"
    if here == there == "doors" and (inside or (package, other) not in OPENS):
        return "doors do not import one another's insides" if inside else "doors do not import one another"
    if here == there and STOREYS[here].index(package) > STOREYS[here].index(other):
        return f"{package} stands right of {other}: imports point to the right"
    return ""


def _against_root(found: Import) -> str:
    """`mimatrix` itself hands out metal, but only when asked: whoever imports any part of it imports this file."""
    top, _, other = found.name.partition(".")
    storey = STOREY_OF.get(other.partition(".")[0])
    if top == "torch":
        return "mimatrix itself works without torch"
    if top == "mimatrix" and found.at_start and storey == "metal":
        return "mimatrix itself starts without metal; import it in a function"
    return ""


def read_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted((ROOT / "mimatrix").rglob("*.py"))}


def test_the_storeys_hold() -> None:
    sources = read_sources()
    assert len(sources) > 20
    assert objections(sources) == []


def test_the_walk_sees_the_imports_that_are_there() -> None:
    """Else a walker that finds nothing would pass."""
    sources = read_sources()
    seen = {
        (_package_of(path), found.name) for path, text in sources.items() for found in _imports(path, ast.parse(text))
    }
    packages = {(package, name.split(".")[1]) for package, name in seen if name.startswith("mimatrix.")}
    assert {("cluster", "core"), ("collectives", "cluster"), ("netsim", "collectives"), ("cli", "netsim")} <= packages


SABOTAGE = [
    ("core/x.py", "import mimatrix.cluster", "core imports nothing of ours"),
    ("core/x.py", "from mimatrix import __version__", "core imports nothing of ours"),
    ("core/x.py", "import mimatrix", "core imports nothing of ours"),
    ("core/x.py", "from ..cluster import Link", "core imports nothing of ours"),
    ("cluster/x.py", "from mimatrix.collectives import Move", "cluster stands right of collectives"),
    ("cluster/x.py", "import mimatrix.collectives.ring as r", "cluster stands right of collectives"),
    ("cluster/x.py", "from mimatrix import core, netsim", "cluster stands right of netsim"),
    ("cluster/x.py", "from .. import netsim", "cluster stands right of netsim"),
    ("cluster/picture/x.py", "from ...netsim.traffic import Traffic", "cluster stands right of netsim"),
    ("cluster/x.py", "def f():\n    from mimatrix.netsim import run", "cluster stands right of netsim"),
    ("cluster/x.py", "class A:\n    def f(self):\n        import mimatrix.wire", "cluster stands right of wire"),
    ("cluster/x.py", "if TYPE_CHECKING:\n    from mimatrix.netsim import Costs", "cluster stands right of netsim"),
    ("cluster/x.py", "import importlib\nimportlib.import_module('mimatrix.wire')", "cluster stands right of wire"),
    ("planner/x.py", "from mimatrix.wire import Message", "planner stands right of wire"),
    ("netsim/x.py", "from mimatrix.comm import Window", "paper does not import metal"),
    ("wire/x.py", "from mimatrix.server import app", "paper does not import doors"),
    ("wire/x.py", "from mimatrix.cli import screen", "paper does not import doors"),
    ("comm/x.py", "from mimatrix.engine import Engine", "comm stands right of engine"),
    ("engine/x.py", "from mimatrix.worker import Worker", "engine stands right of worker"),
    ("worker/x.py", "from mimatrix.launch import Launcher", "metal does not import doors"),
    ("cli/x.py", "from mimatrix.server.app import app", "doors do not import one another's insides"),
    ("cli/x.py", "def f():\n    import mimatrix.lab.layout", "doors do not import one another's insides"),
    ("launch/x.py", "from mimatrix.lab.processes import run_together", "doors do not import one another's insides"),
    ("launch/x.py", "from mimatrix.server import app", "doors do not import one another"),
    ("launch/x.py", "import torch", "launch works without torch"),
    ("launch/x.py", "from mimatrix import cli", "doors do not import one another"),
    ("lab/x.py", "from ..server.store import Store", "doors do not import one another"),
    ("core/x.py", "import torch", "core works without torch"),
    ("netsim/x.py", "from torch import Tensor", "netsim works without torch"),
    ("planner/x.py", "def f():\n    import torch.nn as nn", "planner works without torch"),
    ("wire/x.py", "if TYPE_CHECKING:\n    import torch", "wire works without torch"),
    ("collectives/x.py", "try:\n    import torch\nexcept ImportError:\n    pass", "collectives works without torch"),
    ("cli/x.py", "async def f():\n    from torch.distributed import init", "cli works without torch"),
    ("cli/x.py", "import os, torch", "cli works without torch"),
    ("server/x.py", "from importlib import import_module\nx = import_module('torch.nn')", "server works without torch"),
    ("server/x.py", "f = lambda: __import__('torch')", "server works without torch"),
    ("netsim/x.py", "import mimatrix", "mimatrix itself is in no storey"),
    ("netsim/x.py", "from mimatrix import init", "init is in no storey"),
    ("netsim/x.py", "import mimatrix.brain", "brain is in no storey"),
    ("brain/x.py", "import os", "brain is in no storey; give it a place"),
    ("brain.py", "", "brain is in no storey; give it a place"),
    ("brain/__init__.py", "", "brain is in no storey; give it a place"),
    ("__init__.py", "import torch", "mimatrix itself works without torch"),
    ("__init__.py", "def init():\n    import torch", "mimatrix itself works without torch"),
    ("__init__.py", "from mimatrix.engine import prepare", "mimatrix itself starts without metal"),
    ("__init__.py", "from .engine import prepare", "mimatrix itself starts without metal"),
]


@pytest.mark.parametrize(("path", "text", "said"), SABOTAGE)
def test_sabotage_is_seen(path: str, text: str, said: str) -> None:
    found = objections({"mimatrix/core/errors.py": "import os", f"mimatrix/{path}": text})
    assert len(found) == 1
    assert found[0].startswith(f"mimatrix/{path}")
    assert said in found[0]


def test_sabotage_of_a_real_file_names_the_line() -> None:
    sources = read_sources()
    path = "mimatrix/cluster/routes.py"
    sources[path] += "\nimport mimatrix.netsim\n"
    line = sources[path].count("\n")
    assert objections(sources) == [
        f"{path} line {line}: mimatrix.netsim is imported, but cluster stands right of netsim: "
        f"imports point to the right"
    ]


ALLOWED = [
    ("core/x.py", "import os\nfrom mimatrix.core.errors import UserError\nfrom .units import parse_rate"),
    ("cluster/picture/x.py", "from mimatrix.core import errors\nfrom ..model import Link\nfrom . import scene"),
    ("wire/x.py", "from mimatrix import core, planner\nimport mimatrix.netsim"),
    ("netsim/x.py", "import torchless\nfrom mimatrix import __version__\nx = load('torch')"),
    ("comm/x.py", "import torch\nfrom mimatrix.collectives import Move"),
    ("worker/x.py", "import torch\nimport mimatrix.hybrid, mimatrix.engine, mimatrix.comm, mimatrix.wire"),
    ("cli/x.py", "from mimatrix import __version__\ndef f():\n    from mimatrix.worker import run"),
    ("cli/x.py", "def f():\n    from mimatrix import lab\n    from mimatrix.server import app"),
    ("launch/x.py", "from mimatrix.lab import Command, run_together"),
    ("__main__.py", "from mimatrix.cli.main import main"),
    ("__init__.py", "def __getattr__(name):\n    from mimatrix.engine import prepare"),
    ("__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mimatrix.engine import prepare"),
]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_is_allowed(path: str, text: str) -> None:
    assert objections({f"mimatrix/{path}": text}) == []


WATCH = """
import sys

class Watch:
    asked = set()

    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])

sys.meta_path.insert(0, Watch())
for module in sys.argv[1:]:
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        # What is not installed here was asked for all the same.
        assert not error.name.startswith("mimatrix"), error
print(*sorted(Watch.asked))
"""


def heavy_imports(*modules: str) -> list[str]:
    """What of the heavy packages a fresh Python is asked for when it imports `modules`."""
    done = subprocess.run([sys.executable, "-c", WATCH, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.split() if name in HEAVY]


def test_the_watch_sees() -> None:
    assert heavy_imports("json", "mimatrix.core.config") == []
    assert heavy_imports("json", "numpy") == ["numpy"]
    assert "torch" in heavy_imports("torch.nn")


def test_starting_the_command_loads_nothing_heavy() -> None:
    assert heavy_imports("mimatrix.cli.main") == []


def test_neither_paper_nor_the_command_nor_the_server_loads_torch() -> None:
    # Migrations are run by Alembic, and only by it.
    ours = [path for path in read_sources() if _package_of(path) in WITHOUT_TORCH and "/migrations/" not in path]
    paths = [path.removesuffix(".py") for path in ours]
    modules = [path.removesuffix("/__init__").replace("/", ".") for path in paths if not path.endswith("/__main__")]
    loaded = heavy_imports(*modules)
    assert "torch" not in loaded
    assert "numpy" in loaded
