"""A pseudo-locale: sentences for people are in other letters, so that code that looks into one goes wrong.

A plugin of pytest, for the process of the tests and for all that they start: `make pseudolocale`. Tests that are marked
`wording` check what a sentence says, and are left out.

PYTEST_DONT_REWRITE: it is imported before pytest in the processes that pytest starts.
"""

import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

RENDERING = (
    "mimatrix.core.errors",
    "mimatrix.launch.exit_causes",
    "mimatrix.launch.local_run",
    "mimatrix.launch.start_failure",
    "mimatrix.monitor.hangs",
    "mimatrix.monitor.stragglers",
    "mimatrix.processes.group_exit",
    "mimatrix.scheduler.reasons",
    "mimatrix.server.errors",
    "mimatrix.server.jobs.events",
)
"""The modules that turn values into sentences, by functions and methods that are called `describe...`."""
IN_CHILDREN = str(Path(__file__).parent / "in_children")
_SYNTAX = re.compile(r"(?P<syntax>\\.|\{\d+,?\d*\}|\(\?(?:P<\w+>|[:=!]|<[=!]))|.", re.DOTALL)
_FULL_WIDTH = 0xFF01 - ord("!")
_LETTERS = {ord(letter): ord(letter) + _FULL_WIDTH for letter in map(chr, range(128)) if letter.isalnum()}


def pytest_configure() -> None:
    """Replace the sentences of this process and of its children."""
    import pytest  # not in the children

    install()
    pytest.raises = partial(_raises, pytest.raises)
    paths = [IN_CHILDREN, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def pseudo(sentence: str) -> str:
    """Return a sentence in letters and digits of full width; one that is so already stays as it is."""
    return sentence.translate(_LETTERS)


def pseudo_pattern(pattern: str) -> str:
    """Return a regular expression that matches what `pattern` matches, in the letters of `pseudo`."""
    return "".join(part if is_syntax else pseudo(part) for is_syntax, part in _parts(pattern))


def install() -> None:
    """Change the modules when they are imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in RENDERING if name in sys.modules]
    assert not early, f"imported before their sentences were replaced: {early}"
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in RENDERING else None
        if spec and spec.loader:
            run = spec.loader.exec_module

            def run_and_replace(module: ModuleType) -> None:
                run(module)
                _replace(module)

            spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    match module.__name__:
        case "mimatrix.core.errors":
            module.MiMatrixError.__init__ = lambda error, *texts: Exception.__init__(error, *map(_if_text, texts))
        case "mimatrix.server.errors":
            answer = module.problem
            module.problem = lambda status, detail: answer(status, pseudo(detail))
        case "mimatrix.server.jobs.events":
            create = module.JobEvent.__init__
            module.JobEvent.__init__ = lambda event, kind, sentence, *data: create(event, kind, pseudo(sentence), *data)
    for owner in (module, *(value for value in vars(module).values() if inspect.isclass(value))):
        if getattr(owner, "__module__", module.__name__) != module.__name__:
            continue
        for name, value in list(vars(owner).items()):
            if name.startswith("describe") and inspect.isfunction(value):
                setattr(owner, name, _in_other_letters(value))


def _raises(raises: Callable[..., Any], expected: Any, *arguments: Any, match: Any = None, **named: Any) -> Any:
    """Raise as `pytest.raises` does, with a pattern of which only our own errors are in other letters."""
    return raises(expected, *arguments, match=match and f"{pseudo_pattern(match)}|{match}", **named)


def _parts(pattern: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a regular expression, and whether each is syntax: an escape, a count, the kind of a group."""
    for found in _SYNTAX.finditer(pattern):
        yield found.lastgroup == "syntax", found[0]


def _if_text(argument: object) -> object:
    return pseudo(argument) if isinstance(argument, str) else argument


def _in_other_letters(render: Callable[..., str]) -> Callable[..., str]:
    @wraps(render)
    def rendered(*arguments: Any, **named: Any) -> str:
        return pseudo(render(*arguments, **named))

    return rendered
