"""Collective calls as values: every rank of a group must make the same calls in the same order, and this shows it."""

import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.disagreement import describe_disagreement

REDUCE_OPS = ("sum", "avg", "max", "min")
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
SHARDED = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
"""Of these each rank owns a shard of the tensor."""
Way = Literal["equal", "lists", "padded"]
"""How a c10d backend moves shards: all of one size, as a list of any sizes, or padded to the size of the largest."""
_PACKED = struct.Struct("<QQQIIIIBBBx")
PACKED_BYTES = _PACKED.size
_NUMBER, _OFFSET, _REST = slice(0, 8), slice(8, 16), slice(16, PACKED_BYTES)


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """Which collective to run, apart from the tensor and the algorithm."""

    collective: Collective
    dtype: torch.dtype
    reduce_op: str = "sum"
    shares: Shares | None = None
    root: int = 0
    is_bucket: bool = False
    """Whether the tensor is one of DDP's buckets, which peers read in place."""

    def describe(self, count: int) -> str:
        """Return for example `all_reduce of 10 float32`."""
        return f"{self.collective.value} of {count} {_dtype_name(self.dtype)}"

    def shard_counts(self, count: int, world_size: int) -> tuple[int, ...] | None:
        """Return how many of `count` elements each rank owns; None if the collective has no shards."""
        return (self.shares or Shares.equal(world_size)).cut(count) if self.collective in SHARDED else None


@dataclass(frozen=True, slots=True)
class CallCounters:
    """What the calls of a group were carried by."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls by collective and what carried them, as in `all_reduce windows` or `all_gather nccl`."""
    bytes_moved: Counter[str] = field(default_factory=Counter)
    """Bytes of the tensors of all calls, by collective."""

    def add(self, collective: Collective, carrier: str, size: int) -> None:
        """Count a call on a tensor of `size` bytes."""
        self.calls[f"{collective.value} {carrier}"] += 1
        self.bytes_moved[collective.value] += size


@dataclass(frozen=True, slots=True)
class CallSignature:
    """One collective call as every rank must make it."""

    collective: Collective
    dtype: torch.dtype
    reduce_op: str
    count: int
    choice: str
    """The transport and algorithm: ranks that run different ones would wait for each other for ever."""
    root: int = 0
    shares: int = 0
    """A checksum of the shares, 0 if they are equal."""

    @classmethod
    def of(cls, op: CollectiveOp, count: int, choice: object) -> "CallSignature":
        """Return the signature of `op` on `count` elements, run as `choice`."""
        shares = zlib.crc32(repr(op.shares.fractions).encode()) if op.shares else 0
        return cls(op.collective, op.dtype, op.reduce_op, count, str(choice), op.root, shares)

    def __str__(self) -> str:
        return f"{self._describe_data()} ({self.reduce_op}, {self.choice})"

    def describe_request(self) -> str:
        """Return what is asked for, by whichever algorithm, for example `all_reduce of 10 float32 (sum)`."""
        shares = ", by shares" if self.shares else ""
        return f"{self._describe_data()} ({self.reduce_op}{shares})"

    def _describe_data(self) -> str:
        root = f" from {self.root}" if self.collective is Collective.BROADCAST else ""
        return f"{self.collective.value}{root} of {self.count} {_dtype_name(self.dtype)}"

    def pack(self, number: int, offset: int, user_call: int = 0) -> bytes:
        """Return a header for peers: the call's number in its group, where its data lie, the user's call."""
        codes = COLLECTIVES.index(self.collective), DTYPES.index(self.dtype), REDUCE_OPS.index(self.reduce_op)
        choice = zlib.crc32(self.choice.encode())
        return _PACKED.pack(number, offset, self.count, choice, self.root, self.shares, user_call, *codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeader:
    """A peer's call, as its header describes it."""

    number: int
    offset: int
    count: int
    choice: int
    root: int
    shares: int
    user_call: int
    """The code of the user's call in which it is made, 0 if that is not known."""
    collective: Collective
    dtype: torch.dtype
    reduce_op: str

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "CallHeader":
        """Return the header that `CallSignature.pack` made."""
        number, offset, count, choice, root, shares, user_call, collective, dtype, reduce_op = _PACKED.unpack(data)
        return cls(
            number=number,
            offset=offset,
            count=count,
            choice=choice,
            root=root,
            shares=shares,
            user_call=user_call,
            collective=COLLECTIVES[collective],
            dtype=DTYPES[dtype],
            reduce_op=REDUCE_OPS[reduce_op],
        )

    def matches(self, call: CallSignature) -> bool:
        """Return whether the peer makes the same call by the same algorithm."""
        return self.requests_same(call) and self.choice == zlib.crc32(call.choice.encode())

    def requests_same(self, call: CallSignature) -> bool:
        """Return whether the peer makes the same call, by whichever algorithm."""
        theirs = (self.count, self.collective, self.dtype, self.reduce_op, self.root, self.shares)
        return theirs == (call.count, call.collective, call.dtype, call.reduce_op, call.root, call.shares)

    def __str__(self) -> str:
        root = f" from {self.root}" if self.collective is Collective.BROADCAST else ""
        shares = ", other shares" if self.shares else ""
        return f"{self.collective.value}{root} of {self.count} {_dtype_name(self.dtype)} ({self.reduce_op}{shares})"


def offset_if_same(own: bytes, theirs: bytes) -> int | None:
    """Return where a peer's data lie if the two packed headers are of the same call, otherwise None."""
    if own[_NUMBER] != theirs[_NUMBER] or own[_REST] != theirs[_REST]:
        return None
    return int.from_bytes(theirs[_OFFSET], "little")


def describe_mismatch(number: int, rank: str, call: CallSignature, peer: str, header: CallHeader) -> str:
    """Return one sentence on two ranks that make different calls; `rank` and `peer` say who and where they are."""
    is_same = header.requests_same(call) and header.number == number
    other = "the same by another algorithm" if is_same else str(header)
    return describe_disagreement(f"at call number {number}", f"{rank} asks for {call}, {peer} for {other}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
