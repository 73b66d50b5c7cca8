"""Hooks on the runs that start in a process. No torch here: a worker may run a script that never starts one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RunHook = Callable[[Any], None]
"""Called with a `Run` that has just started."""

_hooks: list[RunHook] = []


@contextmanager
def observe_runs(hook: RunHook) -> Iterator[None]:
    """Call `hook` with every run that starts in this process while the context is open."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)


def notify(run: object) -> None:
    """Call all hooks with a run."""
    for hook in _hooks:
        hook(run)
