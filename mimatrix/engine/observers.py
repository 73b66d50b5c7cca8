"""Who wants to know of runs as they begin: the worker of a job does, which reports how they go. No torch here."""

from collections.abc import Callable
from typing import Any

OBSERVERS: list[Callable[[Any], None]] = []
"""Each is called with every `Run` that `mimatrix.init` makes, before it is prepared."""
