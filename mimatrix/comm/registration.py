"""Makes `torch.distributed.init_process_group("mimatrix")` known; torch calls this itself when it is imported."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimatrix.comm.backend import MiMatrixProcessGroup


def register() -> None:
    """Tell torch.distributed how to make the backend. What it needs is imported when it is made."""
    import torch.distributed as dist

    if dist.is_available() and "mimatrix" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mimatrix", _create, devices=["cpu", "cuda"])


def _create(*arguments: Any) -> "MiMatrixProcessGroup":
    from mimatrix.comm.backend import MiMatrixProcessGroup

    return MiMatrixProcessGroup(*arguments)
