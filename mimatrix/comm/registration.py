"""Registers the backend `mimatrix` with torch.distributed; torch calls this itself when it is imported."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimatrix.comm.backend import MiMatrixProcessGroup


def register() -> None:
    """Tell torch.distributed how to create the backend. Its modules are imported only when it is created."""
    import torch.distributed as dist

    if dist.is_available() and "mimatrix" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mimatrix", _create, devices=["cpu", "cuda"])


def _create(*arguments: Any) -> "MiMatrixProcessGroup":
    from mimatrix.comm.backend import MiMatrixProcessGroup

    return MiMatrixProcessGroup(*arguments)
