"""Emulated small workers: each is told how much memory it may use, and held to it where this user may do so."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.launch.throttle.cpu_quota import memory_limits


@contextmanager
def limit_memory(sizes: Sequence[int], say: Callable[[str], None]) -> Iterator[Mapping[int, Path]]:
    """While this lasts each rank has a control group of its size: gives the files that join them.

    Where there can be none, `say` gets a sentence, and workers are only told their size (MIMATRIX_MEMORY).
    """
    with ExitStack() as stack:
        if not sizes:
            yield {}
            return
        try:
            joins = stack.enter_context(memory_limits(dict(enumerate(sizes))))
        except UserError as error:
            say(f"workers are told their memory but not held to it: {error}")
            joins = {}
        yield joins


def joining(file: Path | None, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a process that joins the group of `file` before it becomes what `words` say."""
    if file is None:
        return words
    # The lab's processes join one group before they start; memory may have a hierarchy of its own.
    return ("sh", "-c", 'echo 0 > "$0" && exec "$@"', str(file), *words)
