"""Random numbers of each rank: its own, and reproducible from one seed."""

import hashlib
import random
import sys
from typing import Any

import torch


def separate_rng(rank: int, group: int = 0) -> None:
    """Give this rank random numbers of its own, derived from those that it was seeded with.

    So ranks draw different dropout masks and augmentations although the script has seeded them alike. The first rank
    keeps its generators as they are, and so does a single process: it draws what a plain loop draws.

    Args:
        rank: The rank, within its group.
        group: The group, where groups do not wait for each other.
    """
    if (rank, group) == (0, 0):
        return
    # Not from its state: what a rank has drawn so far, such as to print a sample, must not matter.
    torch.manual_seed(_derive_seed(torch.initial_seed(), rank, group))
    random.seed(_derive_seed(random.getstate(), rank, group))
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        numpy.random.seed(_derive_seed((name, keys.tobytes(), rest), rank, group) % 2**32)


def _derive_seed(*values: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1
