"""NCCL's process group, set up so that a lost rank ends in an error that names it, not in an aborted process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

_GRACE = timedelta(seconds=60)
"""torch's own watchdog only knows that a collective takes too long; ours, which can say why, comes first."""
_SETTINGS = {
    # Abort the communicator after an error, and do not end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # A dump of all collectives, for which torch's watchdog would wait a minute before it aborts.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def create_nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return NCCL's process group; it connects at its first collective."""
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout + _GRACE
    with _changed_environment(_SETTINGS):
        return ProcessGroupNCCL(PrefixStore("nccl", store), rank, world_size, options)


@contextmanager
def _changed_environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which torch reads when the group is created, for the time of the body."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
