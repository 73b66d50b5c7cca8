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
_PACKED = struct.Struct("<QQQIIIBBBx")
PACKED_BYTES = _PACKED.size
_NUMBER, _OFFSET, _REST = slice(0, 8), slice(8, 16), slice(16, PACKED_BYTES)


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """What is to be done, apart from the tensor and the way."""

    collective: Collective
    dtype: torch.dtype
    op: str = "sum"
    shares: Shares | None = None
    root: int = 0
    is_bucket: bool = False
    """Whether it is of one of DDP's buckets, which peers read where they lie."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """One collective call as every rank must make it."""

    collective: Collective
    dtype: torch.dtype
    op: str
    count: int
    choice: str
    """The algorithm with its settings: ranks that run different ones would wait for one another for ever."""
    root: int = 0
    shares: int = 0
    """A checksum of the shares, where they are given."""

    @classmethod
    def of(cls, kind: CollectiveOp, count: int, choice: object) -> "CallSignature":
        """A kind of collective on so many elements, by a plan."""
        shares = zlib.crc32(repr(kind.shares.fractions).encode()) if kind.shares else 0
        return cls(kind.collective, kind.dtype, kind.op, count, str(choice), kind.root, shares)

    def __str__(self) -> str:
        root = f" from {self.root}" if self.collective is Collective.BROADCAST else ""
        word = f"{self.collective.value}{root} of {self.count} {str(self.dtype).removeprefix('torch.')}"
        return f"{word} ({self.op}, {self.choice})"

    def packed(self, number: int, offset: int) -> bytes:
        """For a peer's eyes: which call of the group this is, and where in the arena its data lie."""
        codes = COLLECTIVES.index(self.collective), DTYPES.index(self.dtype), OPS.index(self.op)
        choice = zlib.crc32(self.choice.encode())
        return _PACKED.pack(number, offset, self.count, choice, self.root, self.shares, *codes)


@dataclass(frozen=True, slots=True)
class CallHeader:
    """A peer's call, as its header says."""

    number: int
    offset: int
    count: int
    choice: int
    root: int
    shares: int
    collective: Collective
    dtype: torch.dtype
    op: str

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "CallHeader":
        """Read a header."""
        number, offset, count, choice, root, shares, collective, dtype, op = _PACKED.unpack(data)
        return cls(number, offset, count, choice, root, shares, COLLECTIVES[collective], DTYPES[dtype], OPS[op])

    def agrees(self, call: CallSignature) -> bool:
        """Whether the two ask for the same."""
        return self.asks_like(call) and self.choice == zlib.crc32(call.choice.encode())

    def asks_like(self, call: CallSignature) -> bool:
        """Whether they do, by whatever plan."""
        mine = (self.count, self.collective, self.dtype, self.op, self.root, self.shares)
        return mine == (call.count, call.collective, call.dtype, call.op, call.root, call.shares)

    def __str__(self) -> str:
        root = f" from {self.root}" if self.collective is Collective.BROADCAST else ""
        shares = ", other shares" if self.shares else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.collective.value}{root} of {self.count} {kind} ({self.op}{shares})"


def offset_if_same(mine: bytes, theirs: bytes) -> int | None:
    """Where a peer's data lie, if its header asks for the same as ours; None if it must be looked at closely."""
    if mine[_NUMBER] != theirs[_NUMBER] or mine[_REST] != theirs[_REST]:
        return None
    return int.from_bytes(theirs[_OFFSET], "little")


def disagreement(number: int, mine: str, call: CallSignature, theirs: str, found: CallHeader) -> str:
    """One sentence on two ranks that ask for different things; `mine` and `theirs` say who and where."""
    other = "the same by another algorithm" if found.asks_like(call) and found.number == number else str(found)
    return (
        f"ranks disagree at call number {number}: {mine} asks for {call}, {theirs} for {other}; "
        "every rank must call the same collectives in the same order with the same sizes and types"
    )
