"""Registers the backend `mimatrix` with torch.distributed; torch calls this itself when it is imported."""

from typing import TYPE_CHECKING, Any

from mimatrix.comm.accelerate_backend import accept_in_accelerate

if TYPE_CHECKING:
    from mimatrix.comm.backend import MiMatrixProcessGroup


def register() -> None:
    """Tell torch.distributed how to create the backend. Its modules are imported only when it is created.

    An entry point of the group `torch.backends`, so that a script needs no `import mimatrix`; with
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not call it.
    """
    import torch.distributed as dist

    if dist.is_available() and "mimatrix" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mimatrix", _create, devices=["cpu", "cuda"])
        accept_in_accelerate()


def _create(*arguments: Any) -> "MiMatrixProcessGroup":
    from mimatrix.comm.backend import MiMatrixProcessGroup

    return MiMatrixProcessGroup(*arguments)
