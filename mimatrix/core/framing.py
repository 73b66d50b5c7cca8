"""Frames on a byte stream: a fixed prefix, a JSON header, and optionally a binary payload.

Everything here works on bytes; the caller owns the socket. Lengths are checked before anything is allocated, and the
header is protected by a checksum.

    prefix   magic (4 bytes), header length (4), payload length (8), CRC-32 of the header (4), all in network order
    header   a JSON object in UTF-8
    payload  raw bytes, sent and received by the caller
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mimatrix.core.errors import WorldError

_PREFIX = struct.Struct("!4sIQI")
PREFIX_BYTES = _PREFIX.size


@dataclass(frozen=True, slots=True)
class FramePrefix:
    """The checked prefix of one frame: how many bytes follow."""

    header_bytes: int
    payload_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """A protocol's frames. `magic` (4 bytes) names the protocol and its version; longer frames are refused.

    Example:
        >>> control = FrameFormat(b"MMX1")
        >>> decoder = FrameDecoder(control)
        >>> list(decoder.feed(control.pack({"ticket": 1})))
        [{'ticket': 1}]
    """

    magic: bytes
    max_header_bytes: int = 1 << 20
    max_payload_bytes: int = 0

    def pack(self, header: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
        """Return the prefix and header of a frame; the caller sends `payload_bytes` bytes of payload after them.

        Raises:
            WorldError: The header or the payload is longer than this format allows.
        """
        encoded = json.dumps(header, separators=(",", ":")).encode()
        if len(encoded) > self.max_header_bytes or payload_bytes > self.max_payload_bytes:
            raise WorldError(
                f"a message of {len(encoded)} + {payload_bytes} bytes is too long for its protocol; "
                f"send at most {self.max_header_bytes} + {self.max_payload_bytes} bytes"
            )
        return _PREFIX.pack(self.magic, len(encoded), payload_bytes, zlib.crc32(encoded)) + encoded

    def unpack_prefix(self, data: bytes | bytearray) -> FramePrefix:
        """Check the first `PREFIX_BYTES` bytes of a frame and return the lengths that they announce.

        Raises:
            WorldError: The bytes do not start a frame of this format, or announce one that is too long.
        """
        magic, header_bytes, payload_bytes, checksum = _PREFIX.unpack_from(data)
        if magic != self.magic:
            raise WorldError(
                f"a message is corrupt: it starts with {magic!r} instead of {self.magic!r}; "
                "check that the address belongs to a MiMatrix process of the same version"
            )
        if header_bytes > self.max_header_bytes or payload_bytes > self.max_payload_bytes:
            raise WorldError(
                f"a message is corrupt: it announces {header_bytes} + {payload_bytes} bytes; "
                "check that the address belongs to a MiMatrix process of the same version"
            )
        return FramePrefix(header_bytes, payload_bytes, checksum)

    def unpack_header(self, prefix: FramePrefix, data: bytes | bytearray) -> dict[str, Any]:
        """Check the header bytes that follow `prefix` and return the header.

        Raises:
            WorldError: The checksum differs, or the header is not a JSON object.
        """
        if zlib.crc32(data) != prefix.checksum:
            raise WorldError("a message is corrupt: its checksum differs; check the network between the two processes")
        try:
            header = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WorldError(f"a message is corrupt: it is not JSON ({error}); check who sent it") from error
        if not isinstance(header, dict):
            raise WorldError("a message is corrupt: its header is not a JSON object; check who sent it")
        return header


class FrameDecoder:
    """Turns bytes as they arrive into headers, for a format without payloads."""

    def __init__(self, frames: FrameFormat) -> None:
        assert not frames.max_payload_bytes, "payloads are read by the caller, who knows where to put them"
        self._format, self._buffer = frames, bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Append `data` and yield the headers that are now complete.

        Raises:
            WorldError: A frame is corrupt or too long; the stream cannot be used any further.
        """
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            prefix = self._format.unpack_prefix(self._buffer)
            end = PREFIX_BYTES + prefix.header_bytes
            if len(self._buffer) < end:
                return
            header = self._format.unpack_header(prefix, bytes(self._buffer[PREFIX_BYTES:end]))
            del self._buffer[:end]
            yield header
