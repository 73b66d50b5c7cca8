"""Lets Accelerate, and with it transformers.Trainer, start a process group with the backend `mimatrix` on CPUs.

On GPUs Accelerate hands the name of a backend to torch as it is. On CPUs it knows "mpi" and "gloo" only and refuses any
other name, registered with torch or not; there is nothing to register with. So its choice is corrected here, for this
one name: `TrainingArguments(ddp_backend="mimatrix")` and `InitProcessGroupKwargs(backend="mimatrix")`.
"""

import sys
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def accept_in_accelerate() -> None:
    """Have Accelerate accept the backend: now if it is imported already, otherwise when it is imported."""
    if _MODULE in sys.modules:
        _accept(sys.modules[_MODULE])
    elif not any(isinstance(finder, _AccelerateFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AccelerateFinder())


class _AccelerateFinder(MetaPathFinder):
    """Finds Accelerate's module as Python does, once, and has `_accept` called after it."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec and spec.loader:
            spec.loader = _AcceptingLoader(spec.loader)
        return spec


class _AcceptingLoader(Loader):
    """Loads a module by another loader, and then calls `_accept`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if it had been imported without us: `inspect.getsource` and pickles look here.
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _accept(module)


def _accept(module: ModuleType) -> None:
    """Wrap the method that chooses a backend; a version of Accelerate without it is left as it is."""
    state = getattr(module, "PartialState", None)
    choose = getattr(state, "_prepare_backend", None)
    if choose is None or hasattr(choose, "__wrapped__"):
        return

    @wraps(choose)
    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: str | None = None) -> Any:
        chosen, distributed_type = choose(self, cpu, sagemaker_dp, backend)
        return ("mimatrix" if backend == "mimatrix" and chosen == "gloo" else chosen), distributed_type

    state._prepare_backend = prepare_backend  # type: ignore[union-attr]
