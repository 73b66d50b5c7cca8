"""What a collective can run as, and which of that is worth trying here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mimatrix.collectives.catalog import find
from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError

Transport = Literal["windows", "send_recv", "c10d"]
CACHED_BYTES = 256 << 10
"""A block of this size and its target stay in a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The path that data take, the algorithm, its segments, and shares of the blocks where they are uneven."""

    transport: Transport = "windows"
    algorithm: str = "gdraa"
    segments: int = 1
    shares: Shares | None = None

    def __str__(self) -> str:
        if self.transport == "c10d":
            return "c10d"
        cut = f"/{self.segments}" if self.segments > 1 else ""
        return f"{self.transport} {self.algorithm}{cut}{' by bandwidth' if self.shares else ''}"

    @classmethod
    def parse(cls, text: str) -> "AlgorithmChoice":
        """`send_recv ring`, `windows gdraa/8`: what `str` gives, shares apart."""
        transport, _, rest = text.strip().partition(" ")
        algorithm, _, segments = rest.partition("/")
        if transport not in ("windows", "send_recv") or not (segments or "1").isdecimal():
            raise UserError(
                f'"{text}" does not name a transport and an algorithm; write for example "send_recv ring" or '
                '"windows gdraa/8"'
            )
        return cls(transport, find(algorithm).name, int(segments or 1))  # type: ignore[arg-type]


C10D = AlgorithmChoice("c10d", "c10d")
_LEAST_BLOCK_BYTES = 32 << 10


def default_choice(collective: Collective, size: int, ranks: int, transport: Transport) -> AlgorithmChoice:
    """Without measurements: GDRAA, in segments whose blocks stay in cache."""
    segments = size // (ranks * CACHED_BYTES) if collective is Collective.ALL_REDUCE and transport == "windows" else 1
    return AlgorithmChoice(transport, "gdraa", max(1, min(64, segments)))


def candidates(
    collective: Collective, size: int, ranks: int, transports: tuple[Transport, ...]
) -> Iterator[AlgorithmChoice]:
    """What may be fastest for a message of `size` bytes; the native collective always."""
    yield C10D
    reducing = collective is Collective.ALL_REDUCE
    near = "send_recv" not in transports
    if "windows" in transports:
        for segments in _segment_counts(size, ranks) if reducing and near else (1,):
            yield AlgorithmChoice("windows", "gdraa", segments)
    if "send_recv" in transports:
        yield AlgorithmChoice("send_recv", "gdraa")
        yield AlgorithmChoice("send_recv", "ring", 1)
        if reducing:
            yield AlgorithmChoice("send_recv", "halving_doubling")
            if size >= 1 << 20:
                yield AlgorithmChoice("send_recv", "gdraa", 4)
                yield AlgorithmChoice("send_recv", "gdraa", 16)


def _segment_counts(size: int, ranks: int) -> list[int]:
    """Those whose blocks are large enough to be worth a synchronisation."""
    return [count for count in (1, 2, 8, 32, 64) if count == 1 or size // (count * ranks) >= _LEAST_BLOCK_BYTES]
