from collections.abc import Callable

import pytest

from mimatrix.comm.control.messages import ControlMessage, Decoder, MessageType
from mimatrix.core.errors import WorldError


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda frame: b"HTTP" + frame[4:], "it starts with b'HTTP'"),
        (lambda frame: frame[:-1] + b"!", "its checksum differs"),
        (lambda frame: frame[:4] + b"\xff\xff\xff\xff" + frame[8:], "it announces 4294967295"),
    ],
)
def test_corrupt_control_messages_are_refused(spoil: Callable[[bytes], bytes], sentence: str) -> None:
    frame = ControlMessage(MessageType.GO, 7, {"ticket": 1}).encode()
    assert [message.body for message in Decoder(7).feed(frame)] == [{"ticket": 1}]
    with pytest.raises(WorldError, match=sentence):
        list(Decoder(7).feed(spoil(frame)))


def test_control_messages_of_another_generation_are_refused() -> None:
    with pytest.raises(WorldError, match="is of generation 6, and this is generation 7"):
        list(Decoder(7).feed(ControlMessage(MessageType.GO, 6).encode()))


@pytest.mark.parametrize("header", [{"type": 99}, {"type": "GO"}, {"generation": "7"}, {"body": []}])
def test_control_messages_with_wrong_fields_are_refused(header: dict[str, object]) -> None:
    with pytest.raises(WorldError, match="its fields are not those of a message"):
        ControlMessage.decode({"type": 3, "generation": 7, "body": {}} | header)


def test_control_messages_may_arrive_byte_by_byte() -> None:
    inbox, frames = (
        Decoder(0),
        b"".join(ControlMessage(MessageType.GO, 0, {"n": number}).encode() for number in range(3)),
    )
    found = [message.body["n"] for byte in frames for message in inbox.feed(bytes([byte]))]
    assert found == [0, 1, 2]
