from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.window_ranks import Program


@pytest.fixture(scope="session")
def programs() -> Iterator[list[Program]]:
    """Three processes for all tests of windows: importing torch takes seconds."""
    with ExitStack() as stack:
        started = [Program() for _ in range(3)]
        for program in started:
            stack.callback(program.end)
        yield started


@pytest.fixture
def victim() -> Iterator[Program]:
    """A process that may be killed."""
    program = Program()
    yield program
    program.end()
