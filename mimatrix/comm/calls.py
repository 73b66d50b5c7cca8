"""What a rank asks for. All ranks of a group must ask for the same, in the same order; this is how that is seen."""

import struct
import zlib
from dataclasses import dataclass

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares

OPS = ("sum", "avg", "max", "min")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
COLLECTIVES = tuple(Collective)
_PACKED = struct.Struct("<QQQIBBBx")
PACKED_BYTES = _PACKED.size


@dataclass(frozen=True, slots=True)
class Kind:
    """What is to be done, apart from the tensor and the way."""

    collective: Collective
    dtype: torch.dtype
    op: str = "sum"
    shares: Shares | None = None
    root: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call as every rank must make it."""

    collective: Collective
    dtype: torch.dtype
    op: str
    count: int
    plan: str
    """The algorithm with its settings: ranks that run different ones would wait for one another for ever."""

    def __str__(self) -> str:
        word = f"{self.collective.value} of {self.count} {str(self.dtype).removeprefix('torch.')}"
        return f"{word} ({self.op}, {self.plan})"

    def packed(self, number: int, offset: int) -> bytes:
        """For a peer's eyes: which call of the group this is, and where in the arena its data lie."""
        codes = COLLECTIVES.index(self.collective), DTYPES.index(self.dtype), OPS.index(self.op)
        return _PACKED.pack(number, offset, self.count, zlib.crc32(self.plan.encode()), *codes)


@dataclass(frozen=True, slots=True)
class Announced:
    """A peer's call, as its header says."""

    number: int
    offset: int
    count: int
    plan: int
    collective: Collective
    dtype: torch.dtype
    op: str

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Announced":
        """Read a header."""
        number, offset, count, plan, collective, dtype, op = _PACKED.unpack(data)
        return cls(number, offset, count, plan, COLLECTIVES[collective], DTYPES[dtype], OPS[op])

    def agrees(self, call: Call) -> bool:
        """Whether the two ask for the same."""
        wanted = (call.count, zlib.crc32(call.plan.encode()), call.collective, call.dtype, call.op)
        return (self.count, self.plan, self.collective, self.dtype, self.op) == wanted

    def __str__(self) -> str:
        return f"{self.collective.value} of {self.count} {str(self.dtype).removeprefix('torch.')} ({self.op})"


def disagreement(number: int, mine: str, call: Call, theirs: str, found: Announced) -> str:
    """One sentence on two ranks that ask for different things; `mine` and `theirs` say who and where."""
    same = (found.count, found.collective, found.dtype, found.op) == (call.count, call.collective, call.dtype, call.op)
    other = "the same by another algorithm" if same and found.number == number else str(found)
    return (
        f"ranks disagree at call number {number}: {mine} asks for {call}, {theirs} for {other}; "
        "every rank must call the same collectives in the same order with the same sizes and types"
    )
