"""Output of processes that run together: whole lines, each behind the label of the process that wrote it."""

import os
from typing import IO, BinaryIO

_LONGEST_LINE = 1 << 16
_USER_ERROR = b"mimatrix: "
"""How the last line of a process begins that ended with an error for the user."""


class LabeledStream:
    """One stream of one process, passed on to a sink line by line."""

    def __init__(self, pipe: IO[bytes], sink: BinaryIO, label: str, errors: dict[bytes, bytes]) -> None:
        self.pipe = pipe
        self.last_line = ""
        self._errors = errors
        """Errors that were passed on once, each with the label of the first process that wrote it."""
        self._sink = sink
        self._label = f"[{label}] ".encode()
        self._rest = b""

    def pass_on(self) -> bool:
        """Pass on what has arrived; return False at the end of the stream."""
        data = os.read(self.pipe.fileno(), _LONGEST_LINE)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        if last := next((line for line in reversed(lines) if line.strip()), b""):
            self.last_line = last.decode(errors="replace").strip()
        self._sink.write(b"".join(self._label + line + b"\n" for line in lines if not self._is_repeated(line)))
        self._sink.flush()
        return bool(data)

    def _is_repeated(self, line: bytes) -> bool:
        """Whether another process has written the same error, which all ranks raise alike."""
        return line.startswith(_USER_ERROR) and self._errors.setdefault(line, self._label) != self._label
