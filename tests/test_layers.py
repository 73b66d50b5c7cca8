"""Which package and sub-package may import which, checked on the syntax tree; and what starting the command loads."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From top to bottom, and in each layer from left to right: imports point down, or to the right.
LAYERS = {
    "interfaces": ("cli", "server", "launch", "lab"),
    "runtime": ("worker", "hybrid", "engine", "profiler", "comm"),
    "system": ("processes",),
    "pure": ("api", "scheduler", "monitor", "planner", "netsim", "collectives", "cluster", "core"),
}
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
WITHOUT_TORCH = {*LAYERS["pure"], *LAYERS["system"], *LAYERS["interfaces"]}
# The command starts all other interfaces; the server controls launchers through their protocol.
OPENS = {("cli", package) for package in LAYERS["interfaces"]} | {("server", "launch")}
# The worker has a script that trains as users' scripts do; `init` needs hybrid and engine, which are below the worker.
USES_ROOT = {("worker", "init")}
HEAVY = ("torch", "numpy", "scipy", "matplotlib")


# Parts of a package (its sub-packages, and single modules) from the lowest to the highest. A part imports those before
# it and its neighbours in the same tuple, never one after it. Parts that are not named are free, but close no cycle.
PARTS = {
    "engine": (
        ("settings", "rank_exchange", "step_timer"),
        ("zero",),
        ("modules",),
        ("data",),
        ("checkpoint",),
        ("outer_optimizer",),
        ("planning",),
        ("world",),
        ("loop",),
        ("prepare",),
        ("run_properties", "run_saving"),
        ("run",),
    ),
    "comm": (
        ("calls",),
        ("control",),
        ("memory",),
        ("sync",),
        ("execution",),
        ("tuning",),
        ("window_calls",),
        ("dispatch",),
        ("queued_calls", "launched_calls"),
        ("group",),
        ("device_backends",),
        ("backend",),
        ("registration",),
    ),
    "hybrid": (
        ("stream",),
        ("net",),
        ("policy",),
        ("server",),
        ("client",),
        ("rendezvous",),
        ("mode",),
        ("auto_mode",),
    ),
}


@dataclass(frozen=True)
class Import:
    """One name that a file imports, and whether that happens when the file itself is imported."""

    line: int
    name: str
    at_start: bool


def objections(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every import that the layers forbid, and for every package that is in none of them."""
    return [said for path, text in sources.items() for said in _objections(path, text)]


def _objections(path: str, text: str) -> Iterator[str]:
    package = _package_of(path)
    if package and package not in LAYER_OF and not _is_private(package):
        yield f"{path}: {package} is in no layer; give it a place in docs and in LAYERS of tests/test_layers.py"
        return
    for found in _imports(path, ast.parse(text)):
        reason = _against_root(path, found) if not package or _is_private(package) else _against(package, found.name)
        if reason:
            yield f"{path} line {found.line}: {found.name} is imported, but {reason}"


def _package_of(path: str) -> str:
    """`cluster` for `mimatrix/cluster/layout/scene.py`; nothing for the files that make up `mimatrix` itself."""
    parts = Path(path).with_suffix("").parts[1:]
    return "" if parts in (("__init__",), ("__main__",)) else parts[0]


def _imports(
    path: str, tree: ast.AST, at_start: bool = True, whole: Collection[str] = ("mimatrix",)
) -> Iterator[Import]:
    """Every import of a tree, the lazy ones and those by a function included."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name, at_start) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join([*_parents(path, level), *([module] if module else [])])
                # `from mimatrix import cluster` imports a package, `from mimatrix.cluster import Link` a name in one.
                modules = [f"{base}.{alias.name}" for alias in names] if base in whole else [base]
                yield from (Import(node.lineno, name, at_start) for name in modules)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield Import(node.lineno, str(node.args[0].value), at_start)
        yield from _imports(path, node, at_start and not _is_put_off(node), whole)


def _parents(path: str, level: int) -> tuple[str, ...]:
    return Path(path).parts[:-level] if level else ()


def _is_put_off(node: ast.AST) -> bool:
    """Return whether this is a function, or what only type checkers read."""
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
    if other == package or other == "__version__" or (package, other) in USES_ROOT:
        return ""
    if other not in LAYER_OF:
        return f"{other or 'mimatrix itself'} is in no layer"
    reason = _against_direction(package, other, inside=len(rest) > 1)
    return reason or ("api imports core only" if package == "api" and other != "core" else "")


def _against_direction(package: str, other: str, inside: bool) -> str:
    here, there = LAYER_OF[package], LAYER_OF[other]
    layers = list(LAYERS)
    if layers.index(here) > layers.index(there):
        return f"{here} does not import {there}: imports point down"
    if here == there == "interfaces" and (inside or (package, other) not in OPENS):
        return "interfaces do not import one another's insides" if inside else "interfaces do not import one another"
    if here == there and LAYERS[here].index(package) > LAYERS[here].index(other):
        return f"{package} stands right of {other}: imports point to the right"
    return ""


def _is_private(package: str) -> bool:
    """Return whether this is a module such as `mimatrix/_init.py`.

    It has what `mimatrix` itself exports, and is apart from it because it needs torch.
    """
    return package.startswith("_") and not package.startswith("__")


def _against_root(path: str, found: Import) -> str:
    """`mimatrix` itself exports the runtime, but lazily: importing any part of it imports `mimatrix/__init__.py`."""
    top, _, other = found.name.partition(".")
    package = other.partition(".")[0]
    layer = LAYER_OF.get(package)
    if _is_private(_package_of(path)):
        is_interface = top == "mimatrix" and layer == "interfaces"
        return "what mimatrix itself exports does not import interfaces: imports point down" if is_interface else ""
    if top == "torch":
        return "mimatrix itself works without torch"
    if top == "mimatrix" and found.at_start and (layer == "runtime" or _is_private(package)):
        return "mimatrix itself starts without the runtime; import it in a function"
    return ""


@dataclass(frozen=True)
class PartImport:
    """An import of one part of a package by another."""

    package: str
    here: str
    there: str
    where: str
    at_start: bool


def part_imports(sources: Mapping[str, str]) -> Iterator[PartImport]:
    """Yield every import between two parts of a package in `PARTS`."""
    for path, text in sources.items():
        package = _package_of(path)
        here = Path(path).with_suffix("").parts[2:]
        if package not in PARTS or here in ((), ("__init__",)):
            continue
        for found in _imports(path, ast.parse(text), whole={f"mimatrix.{package}"}):
            top, other, *rest = [*found.name.split("."), ""]
            if (top, other) == ("mimatrix", package) and rest[0] not in ("", here[0]):
                yield PartImport(package, here[0], rest[0], f"{path} line {found.line}", found.at_start)


def part_objections(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every import within a package that points up in `PARTS`."""
    level = {(package, part): n for package, order in PARTS.items() for n, parts in enumerate(order) for part in parts}
    return [
        f"{found.where}: {found.package}.{found.here} imports {found.package}.{found.there}, which is above it in PARTS"
        for found in part_imports(sources)
        if level.get((found.package, found.here), len(level)) < level.get((found.package, found.there), -1)
    ]


def part_cycles(sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for every set of parts that import each other when they are loaded, named in `PARTS` or not."""
    below: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for found in part_imports(sources):
        if found.at_start:
            below.setdefault((found.package, found.here), set()).add((found.package, found.there))

    def reached(start: tuple[str, str]) -> set[tuple[str, str]]:
        seen: set[tuple[str, str]] = set()
        waiting = [start]
        while waiting:
            new = below.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {part: reached(part) for part in below}
    cycles = {
        tuple(sorted(o for o in seen if part in reach.get(o, ()))) for part, seen in reach.items() if part in seen
    }
    return [f"{cycle[0][0]}: {', '.join(part for _, part in cycle)} import each other" for cycle in sorted(cycles)]


def read_sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted((ROOT / "mimatrix").rglob("*.py"))}


def test_the_layers_hold() -> None:
    sources = read_sources()
    assert len(sources) > 20
    assert objections(sources) == []


def test_parts_of_a_package_import_only_those_below() -> None:
    assert part_objections(read_sources()) == []


def test_parts_of_a_package_do_not_import_each_other() -> None:
    assert part_cycles(read_sources()) == []


def test_parts_that_are_ordered_exist() -> None:
    missing = [
        f"{package}.{part}"
        for package, order in PARTS.items()
        for parts in order
        for part in parts
        if not (ROOT / "mimatrix" / package / part).is_dir()
        and not (ROOT / "mimatrix" / package / f"{part}.py").is_file()
    ]
    assert missing == []


PART_SABOTAGE = [
    ("engine/zero/x.py", "from mimatrix.engine.loop.loader import MicroBatchLoader", "engine.zero imports engine.loop"),
    ("engine/zero/x.py", "from mimatrix.engine import loop", "engine.zero imports engine.loop"),
    ("engine/zero/x.py", "from ..loop import loader", "engine.zero imports engine.loop"),
    ("engine/zero/x.py", "def f():\n    import mimatrix.engine.run as r", "engine.zero imports engine.run"),
    (
        "engine/loop/x.py",
        "if TYPE_CHECKING:\n    from mimatrix.engine.run import Run",
        "engine.loop imports engine.run",
    ),
    ("engine/settings.py", "from mimatrix.engine.zero.units import Unit", "engine.settings imports engine.zero"),
    ("comm/memory/x.py", "from mimatrix.comm.execution.program import Program", "comm.memory imports comm.execution"),
    ("comm/execution/x.py", "from mimatrix.comm.tuning import tuner", "comm.execution imports comm.tuning"),
    (
        "hybrid/server/x.py",
        "from mimatrix.hybrid.client.client import ShardsClient",
        "hybrid.server imports hybrid.client",
    ),
]


@pytest.mark.parametrize(("path", "text", "sentence"), PART_SABOTAGE)
def test_an_import_that_points_up_is_seen(path: str, text: str, sentence: str) -> None:
    (objection,) = part_objections({f"mimatrix/{path}": text})
    assert objection.startswith(f"mimatrix/{path} line ")
    assert sentence in objection


PARTS_ALLOWED = [
    ("engine/loop/x.py", "from mimatrix.engine.zero.units import Unit\nfrom mimatrix.engine.loop import loader"),
    ("engine/run.py", "from mimatrix.engine import prepare, settings\nfrom mimatrix.engine.loop.loader import X"),
    ("engine/new.py", "from mimatrix.engine.run import Run"),
    ("engine/zero/x.py", "from mimatrix.engine.new import X\nfrom mimatrix.comm.group import Group"),
    ("profiler/x.py", "from mimatrix.profiler.cache import X"),
]


@pytest.mark.parametrize(("path", "text"), PARTS_ALLOWED)
def test_imports_that_point_down_are_allowed(path: str, text: str) -> None:
    assert part_objections({f"mimatrix/{path}": text}) == []


def test_a_cycle_through_a_part_that_is_not_named_is_seen() -> None:
    sources = {
        "mimatrix/engine/zero/x.py": "from mimatrix.engine.helper import a",
        "mimatrix/engine/helper.py": "from mimatrix.engine.other import b",
        "mimatrix/engine/other.py": "from mimatrix.engine.zero.x import c",
        "mimatrix/engine/data/y.py": "from mimatrix.engine.zero.x import d",
    }
    assert part_objections(sources) == []
    assert part_cycles(sources) == ["engine: helper, other, zero import each other"]
    sources["mimatrix/engine/other.py"] = "def f():\n    from mimatrix.engine.zero.x import c"
    assert part_cycles(sources) == []


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
    ("cluster/layout/x.py", "from ...netsim.traffic import Traffic", "cluster stands right of netsim"),
    ("cluster/x.py", "def f():\n    from mimatrix.netsim import run", "cluster stands right of netsim"),
    ("cluster/x.py", "class A:\n    def f(self):\n        import mimatrix.api", "cluster stands right of api"),
    ("cluster/x.py", "if TYPE_CHECKING:\n    from mimatrix.netsim import Costs", "cluster stands right of netsim"),
    ("cluster/x.py", "import importlib\nimportlib.import_module('mimatrix.api')", "cluster stands right of api"),
    ("planner/x.py", "from mimatrix.api import Message", "planner stands right of api"),
    ("api/x.py", "from mimatrix.scheduler import Wish", "api imports core only"),
    ("api/models/x.py", "from mimatrix import planner", "api imports core only"),
    ("netsim/x.py", "from mimatrix.comm import Window", "pure does not import runtime"),
    ("api/x.py", "from mimatrix.server import app", "pure does not import interfaces"),
    ("api/x.py", "from mimatrix.cli import output", "pure does not import interfaces"),
    ("comm/x.py", "from mimatrix.engine import Engine", "comm stands right of engine"),
    ("engine/x.py", "from mimatrix.worker import Worker", "engine stands right of worker"),
    ("worker/x.py", "from mimatrix.launch import Launcher", "runtime does not import interfaces"),
    ("cli/x.py", "from mimatrix.server.app import app", "interfaces do not import one another's insides"),
    ("cli/x.py", "def f():\n    import mimatrix.lab.layout", "interfaces do not import one another's insides"),
    (
        "launch/x.py",
        "from mimatrix.lab.gpu import run_gpu",
        "interfaces do not import one another's insides",
    ),
    ("launch/x.py", "from mimatrix.server import app", "interfaces do not import one another"),
    ("launch/x.py", "import torch", "launch works without torch"),
    ("launch/x.py", "from mimatrix import cli", "interfaces do not import one another"),
    ("lab/x.py", "from ..server.store import Store", "interfaces do not import one another"),
    ("core/x.py", "import torch", "core works without torch"),
    ("netsim/x.py", "from torch import Tensor", "netsim works without torch"),
    ("planner/x.py", "def f():\n    import torch.nn as nn", "planner works without torch"),
    ("api/x.py", "if TYPE_CHECKING:\n    import torch", "api works without torch"),
    ("collectives/x.py", "try:\n    import torch\nexcept ImportError:\n    pass", "collectives works without torch"),
    ("cli/x.py", "async def f():\n    from torch.distributed import init", "cli works without torch"),
    ("cli/x.py", "import os, torch", "cli works without torch"),
    ("server/x.py", "from importlib import import_module\nx = import_module('torch.nn')", "server works without torch"),
    ("server/x.py", "f = lambda: __import__('torch')", "server works without torch"),
    ("netsim/x.py", "import mimatrix", "mimatrix itself is in no layer"),
    ("netsim/x.py", "from mimatrix import init", "init is in no layer"),
    ("netsim/x.py", "import mimatrix.brain", "brain is in no layer"),
    ("brain/x.py", "import os", "brain is in no layer; give it a place"),
    ("brain.py", "", "brain is in no layer; give it a place"),
    ("brain/__init__.py", "", "brain is in no layer; give it a place"),
    ("__init__.py", "import torch", "mimatrix itself works without torch"),
    ("__init__.py", "def init():\n    import torch", "mimatrix itself works without torch"),
    ("__init__.py", "from mimatrix.engine import prepare", "mimatrix itself starts without the runtime"),
    ("__init__.py", "from .engine import prepare", "mimatrix itself starts without the runtime"),
    ("__init__.py", "from mimatrix._init import init", "mimatrix itself starts without the runtime"),
    ("_init.py", "from mimatrix.server import app", "what mimatrix itself exports does not import interfaces"),
    ("engine/x.py", "from mimatrix._init import init", "_init is in no layer"),
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
    ("cluster/layout/x.py", "from mimatrix.core import errors\nfrom ..model import Link\nfrom . import scene"),
    ("api/x.py", "from mimatrix import core\nfrom mimatrix.api.models import Message"),
    ("netsim/x.py", "import torchless\nfrom mimatrix import __version__\nx = load('torch')"),
    ("comm/x.py", "import torch\nfrom mimatrix.collectives import Move"),
    ("worker/x.py", "import torch\nimport mimatrix.hybrid, mimatrix.engine, mimatrix.comm, mimatrix.api"),
    ("cli/x.py", "from mimatrix import __version__\ndef f():\n    from mimatrix.worker import run"),
    ("cli/x.py", "def f():\n    from mimatrix import lab\n    from mimatrix.server import app"),
    ("launch/x.py", "from mimatrix.processes.group import run_process_group"),
    ("__main__.py", "from mimatrix.cli.main import main"),
    ("_init.py", "import torch\nfrom mimatrix.hybrid.mode import Hybrid\nfrom mimatrix.core import errors"),
    ("__init__.py", "if TYPE_CHECKING:\n    from mimatrix._init import init"),
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
    """Return the heavy packages that a fresh Python is asked for when it imports `modules`."""
    done = subprocess.run([sys.executable, "-c", WATCH, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.split() if name in HEAVY]


def test_the_watch_sees() -> None:
    assert heavy_imports("json", "mimatrix.core.config") == []
    assert heavy_imports("json", "numpy") == ["numpy"]
    assert "torch" in heavy_imports("torch.nn")


def test_starting_the_command_loads_nothing_heavy() -> None:
    assert heavy_imports("mimatrix.cli.main") == []


def test_the_api_loads_nothing_heavy() -> None:
    assert heavy_imports("mimatrix.api", "mimatrix.api.models", "mimatrix.api.client") == []


def test_neither_pure_packages_nor_interfaces_load_torch() -> None:
    # Migrations are run by Alembic, and only by it.
    ours = [path for path in read_sources() if _package_of(path) in WITHOUT_TORCH and "/migrations/" not in path]
    paths = [path.removesuffix(".py") for path in ours]
    modules = [path.removesuffix("/__init__").replace("/", ".") for path in paths if not path.endswith("/__main__")]
    loaded = heavy_imports(*modules)
    assert "torch" not in loaded
    assert "numpy" in loaded
