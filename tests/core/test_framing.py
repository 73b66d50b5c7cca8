import json
import struct
import zlib
from collections.abc import Callable

import pytest

from mimatrix.core.errors import WorldError
from mimatrix.core.framing import PREFIX_BYTES, FrameDecoder, FrameFormat

CONTROL = FrameFormat(b"TST1", max_header_bytes=100)
BULK = FrameFormat(b"TST2", max_payload_bytes=1 << 40)


def test_frame_decoder_yields_headers_whichever_way_bytes_are_cut() -> None:
    headers = [{"n": number, "text": "ä" * number} for number in range(4)]
    stream = b"".join(CONTROL.pack(header) for header in headers)
    for step in (1, 3, PREFIX_BYTES, len(stream)):
        decoder = FrameDecoder(CONTROL)
        cuts = [stream[start : start + step] for start in range(0, len(stream), step)]
        assert [header for cut in cuts for header in decoder.feed(cut)] == headers


def test_frame_with_payload_announces_its_length() -> None:
    frame = BULK.pack({"dtype": "float32"}, payload_bytes=1 << 33)
    prefix = BULK.unpack_prefix(frame[:PREFIX_BYTES])
    assert prefix.payload_bytes == 1 << 33
    assert len(frame) == PREFIX_BYTES + prefix.header_bytes
    assert BULK.unpack_header(prefix, frame[PREFIX_BYTES:]) == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda frame: b"HTTP" + frame[4:], "starts with b'HTTP' instead of b'TST1'"),
        (lambda frame: frame[:4] + b"\xff\xff\xff\xff" + frame[8:], "announces 4294967295"),
        (lambda frame: frame[:8] + b"\0\0\0\0\0\0\0\1" + frame[16:], "announces .* 1 bytes"),
        (lambda frame: frame[:-2] + b"9}", "its checksum differs"),
    ],
)
def test_corrupt_frames_are_refused(spoil: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(WorldError, match=reason):
        list(FrameDecoder(CONTROL).feed(spoil(CONTROL.pack({"n": 1}))))


@pytest.mark.parametrize(
    ("text", "reason"), [(b"{n}", "it is not JSON"), (b"\xff", "not JSON"), (b"[1]", "JSON object")]
)
def test_headers_that_are_not_json_objects_are_refused(text: bytes, reason: str) -> None:
    with pytest.raises(WorldError, match=reason):
        list(FrameDecoder(CONTROL).feed(struct.pack("!4sIQI", b"TST1", len(text), 0, zlib.crc32(text)) + text))


def test_long_headers_and_payloads_are_not_sent() -> None:
    assert CONTROL.pack({"a": "x" * (100 - len(json.dumps({"a": ""}, separators=(",", ":"))))})
    with pytest.raises(WorldError, match="too long for its protocol; send at most 100"):
        CONTROL.pack({"a": "x" * 100})
    with pytest.raises(WorldError, match="too long"):
        CONTROL.pack({}, payload_bytes=1)
