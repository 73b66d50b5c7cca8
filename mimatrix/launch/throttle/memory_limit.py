"""Emulate workers with little memory: each knows its limit, which is enforced if this user may do so."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.launch.throttle.cpu_quota import memory_limits


@contextmanager
def limit_memory(sizes: Sequence[int], say: Callable[[str], None]) -> Iterator[Mapping[int, Path]]:
    """Give each rank a control group of its size while this lasts; yield the files that join them.

    If there can be none, `say` gets a sentence, and the limit is only in the environment of the workers
    (MIMATRIX_MEMORY).
    """
    with ExitStack() as stack:
        if not sizes:
            yield {}
            return
        try:
            joins = stack.enter_context(memory_limits(dict(enumerate(sizes))))
        except UserError as error:
            say(f"the memory limit of the workers is not enforced: {error}")
            joins = {}
        yield joins


def wrap_command(file: Path | None, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that joins the control group of `file` before it becomes `command`."""
    if file is None:
        return command
    # The lab's processes join one group before they start; memory may have a hierarchy of its own.
    return ("sh", "-c", 'echo 0 > "$0" && exec "$@"', str(file), *command)
