"""Text from users' programs, made safe for terminals, logs and pages."""

import re

# Terminal escape sequences: CSI, OSC, and two-character ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)
_LAYOUT = "\n\t\r"


def one_line(text: str) -> str:
    """Return `text` without escape sequences and control characters, as one line."""
    plain = _ESCAPES.sub("", text)
    return "".join(char if char.isprintable() else " " * (char in _LAYOUT) for char in plain).strip()


def strip_escapes(text: str) -> str:
    """Return `text` without escape sequences and control characters; line breaks and tabs stay."""
    return "".join(char for char in _ESCAPES.sub("", text) if char.isprintable() or char in _LAYOUT)
