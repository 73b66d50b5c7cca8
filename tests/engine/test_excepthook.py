"""The line of a user's mistake is one of the script, not of a library that it went through."""

import copy
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.engine.excepthook import format_user_error


class Refusing:
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> "Refusing":
        raise UserError("it cannot be copied; make another")


def test_lines_of_the_standard_library_are_not_named() -> None:
    with pytest.raises(UserError) as caught:
        copy.deepcopy({"a": [Refusing()]})
    trace = caught.value.__traceback__
    assert trace
    assert trace.tb_next
    last = trace.tb_next
    while last.tb_next and last.tb_next.tb_next:
        last = last.tb_next
    assert Path(last.tb_frame.f_code.co_filename).name == "copy.py"
    last.tb_next = None  # as if the error came from this package: what is left ends in copy.py
    assert format_user_error(caught.value) == (
        f"it cannot be copied; make another ({Path(__file__).name}, line {trace.tb_lineno})"
    )
