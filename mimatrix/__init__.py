"""MiMatrix: train PyTorch models on clusters whose machines are not alike."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mimatrix.hybrid.auto_mode import Hybrid as Hybrid
    from mimatrix.hybrid.auto_mode import init as init

_ON_TORCH = ("init", "Hybrid")


def __getattr__(name: str) -> Any:
    # The command and the server know nothing of torch; whoever trains imports it with the first of these names.
    if name in _ON_TORCH:
        from importlib import import_module

        return getattr(import_module("mimatrix.hybrid.auto_mode"), name)
    raise AttributeError(f"module 'mimatrix' has no attribute {name!r}")
