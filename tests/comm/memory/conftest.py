from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.window_ranks import RankProcess


@pytest.fixture(scope="session")
def programs() -> Iterator[list[RankProcess]]:
    """Three processes for all tests of windows: importing torch takes seconds."""
    with ExitStack() as stack:
        started = [RankProcess() for _ in range(3)]
        for program in started:
            stack.callback(program.end)
        yield started


@pytest.fixture
def victim() -> Iterator[RankProcess]:
    """Yield a process that may be killed."""
    program = RankProcess()
    yield program
    program.end()
