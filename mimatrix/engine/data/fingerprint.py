"""What a few rows of a dataset look like, by which ranks find out that theirs has other samples.

Datasets of equal length may differ: a list of files that each rank has shuffled, or data that each has drawn. Rows are
read as they will be later, in this process or in a loader process: a file that is opened at the first read must not be
shared by a fork.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mimatrix.core.errors import UserError
from mimatrix.engine.data.digest import are_close, describe_samples
from mimatrix.engine.data.loading import WorkerInit, return_unchanged
from mimatrix.engine.data.loading_config import LoadingConfig
from mimatrix.engine.data.order import seeded
from mimatrix.engine.rank_exchange import RankExchange

Fingerprint = list[Any]
"""Of a row, as JSON: its number, a digest of what must be the same, and numbers that may be rounded differently."""

_SEED = 0
_NUM_READS = 8
"""How often rows are read to find out whether they are the same each time."""


def fingerprint_rows(loading: LoadingConfig) -> list[Fingerprint] | None:
    """Describe the first row of a dataset, one in the middle and the last; None for a stream, or if one fails.

    Generators are seeded alike, so that random augmentation is the same on all ranks, and get back their states. A row
    that fails is not raised here: the loop may never ask for it, and if it does, it fails there.
    """
    if loading.is_stream:
        return None
    try:
        return _read_rows(loading, 1)[0]
    except Exception:  # noqa: BLE001 (see above)
        return None


def check_same_rows(
    exchange: RankExchange, loading: LoadingConfig, by_rank: Sequence[list[Fingerprint] | None], call: str
) -> None:
    """Raise on all ranks if one has other samples than rank 0. A collective if rows differ.

    Rows that differ from one read to the next, as by augmentation with generators of its own, are not compared.

    Args:
        exchange: How the ranks tell each other.
        loading: The dataset of this rank.
        by_rank: What `fingerprint_rows` gave on each rank.
        call: What the dataset was given to.

    Raises:
        UserError: It names the rank and the row.
    """
    difference = _find_difference(by_rank)
    if difference is None:
        return
    if all(message["is_stable"] for message in exchange.all_gather({"is_stable": _is_stable(loading)})):
        rank, row = difference
        raise UserError(
            f"rank {rank} has another row {row} in its dataset than rank 0; give {call} the same samples in the same "
            "order on all ranks, e.g. make and shuffle them with the same seed"
        )


def _find_difference(by_rank: Sequence[list[Fingerprint] | None]) -> tuple[int, int] | None:
    """Return the first rank that differs from rank 0, and the row."""
    if any(prints is None for prints in by_rank):
        return None
    first = by_rank[0] or []
    for rank, prints in enumerate(by_rank):
        for own, other in zip(prints or [], first, strict=True):
            if not _is_same(own, other):
                return rank, own[0]
    return None


def _is_same(one: Fingerprint, other: Fingerprint) -> bool:
    return bool(one[:2] == other[:2]) and are_close(one[2], other[2])


def _is_stable(loading: LoadingConfig) -> bool:
    try:
        reads = _read_rows(loading, _NUM_READS)
    except Exception:  # noqa: BLE001 (as in `fingerprint_rows`)
        return False
    return all(_is_same(own, first) for read in reads for own, first in zip(read, reads[0], strict=True))


def _read_rows(loading: LoadingConfig, times: int) -> list[list[Fingerprint]]:
    """Read the rows, several times, as they will be read later."""
    samples = len(loading.dataset)
    rows = sorted({0, samples // 2, samples - 1}) if samples else []
    reader = _FingerprintReader(loading.dataset)
    if not loading.num_workers:
        return [[reader[row] for row in rows] for _ in range(times)]
    in_worker: DataLoader[Fingerprint] = DataLoader(
        reader,
        batch_size=None,
        sampler=rows * times,
        num_workers=1,
        collate_fn=return_unchanged,
        worker_init_fn=WorkerInit(loading.worker_init_fn),
        timeout=loading.timeout_s,
        multiprocessing_context=loading.multiprocessing_context,
        generator=torch.Generator(),  # or torch's global one would be drawn from
    )
    drawn = list(in_worker)
    return [drawn[start : start + len(rows)] for start in range(0, len(drawn), len(rows))]


class _FingerprintReader(Dataset[Fingerprint]):
    """Reads rows and describes them, so that only that comes back from a loader process."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, row: int) -> Fingerprint:
        with seeded(_SEED):
            many = getattr(self.dataset, "__getitems__", None)
            sample = many([row])[0] if many else self.dataset[row]
        digest, numbers = describe_samples([sample])
        return [row, digest, numbers]
