"""Text of users' programs cannot control the terminal of the user who reads it."""

import pytest

from mimatrix.api.text import one_line, strip_escapes


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("clear\x1b[2J\x1b[H", "clear"),
        ("bell\x07 and \x9b31m", "bell and 31m"),
        ("half \x1b", "half "),
        ("tab\tline\nprogress\r", "tab\tline\nprogress\r"),
        ("äöü 漢字", "äöü 漢字"),
    ],
)
def test_escape_sequences_are_removed_and_layout_stays(text: str, plain: str) -> None:
    assert strip_escapes(text) == plain


def test_a_sequence_that_two_pieces_of_output_share_loses_its_effect() -> None:
    assert "\x1b" not in strip_escapes("a\x1b[3") + strip_escapes("1mb")


def test_one_line_has_no_line_breaks() -> None:
    assert one_line(" a\nthe token of root\x1b[0m\r\n") == "a the token of root"
