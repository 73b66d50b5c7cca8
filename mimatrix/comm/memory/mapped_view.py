"""A peer's memory that can be seen in place: what mapped, in-process and CUDA IPC windows have in common."""

import torch

from mimatrix.core.errors import UserError


class MappedView:
    """Another rank's bytes as a tensor over the memory itself."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory

    def view(self, start: int, stop: int) -> torch.Tensor:
        """The bytes themselves."""
        if not 0 <= start <= stop <= len(self._bytes):
            raise UserError(f"bytes {start} to {stop} are not within the window of {len(self._bytes)} bytes")
        return self._bytes[start:stop]

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy them."""
        seen = self.view(start, stop)
        if into.numel() != stop - start:
            raise UserError(f"{stop - start} bytes do not fit a tensor of {into.numel()}; give one of that size")
        into.copy_(seen)

    def close(self) -> None:
        """Let go of it; the mapping goes when the last view does."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def check_size(size: int) -> None:
    """Refuse windows that hold nothing."""
    if size < 1:
        raise UserError(f"a window of {size} bytes holds nothing; use 1 or more")
