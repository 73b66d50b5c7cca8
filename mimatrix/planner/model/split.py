"""How a global batch is cut: how many samples each rank takes, and in which micro-batches."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mimatrix.core.device_kinds import match_kind
from mimatrix.core.errors import UserError, nearest

Batch = str | int | Sequence[int] | Mapping[int | str, int]
"""`"auto"`, one number for every rank, one for each rank, or some by rank or by kind of device."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a global batch is cut: for each rank the sizes of its micro-batches, in order. A rank may have none."""

    micro: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if any(size < 1 for sizes in self.micro for size in sizes):
            raise UserError(f"a micro-batch has at least one sample, got {list(map(list, self.micro))}; leave it out")
        if not any(self.micro):
            raise UserError("a split gives no rank any samples; give at least one rank one sample")

    @classmethod
    def of(cls, batches: Sequence[int], micro_batch: int | Sequence[int] | None = None) -> "Split":
        """Let rank r take `batches[r]` samples, at most `micro_batch[r]` at once; None: all at once.

        Each rank takes as few micro-steps as possible, as even as possible, the larger ones first.
        """
        limits = _limits(batches, micro_batch)
        return cls(tuple(_even(batch, limit) for batch, limit in zip(batches, limits, strict=True)))

    @property
    def ranks(self) -> int:
        """The number of ranks, including those without samples."""
        return len(self.micro)

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(map(sum, self.micro))

    @property
    def total(self) -> int:
        """Samples of a whole global batch."""
        return sum(self.batches)

    @property
    def rounds(self) -> int:
        """The most micro-steps of any rank."""
        return max(map(len, self.micro))

    def for_samples(self, count: int) -> "Split":
        """Return the cut of a last batch of only `count` samples: each rank within one of its proportion.

        No rank has more micro-steps or larger micro-batches than in the whole one; ranks with equal micro-steps
        may come to have unequal ones, since a few samples cannot fill them all.
        """
        assert 0 < count <= self.total, f"{count} samples of {self.total}"
        if count == self.total:
            return self
        # The largest of each rank's sizes is its limit: n samples in ceil(n / limit) steps are never more than before.
        limits = [max(sizes, default=1) for sizes in self.micro]
        return Split.of(_in_proportion(count, self.batches), limits)

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return the positions in the global batch of each micro-batch of `rank`: ranks follow one another in order."""
        first = sum(map(sum, self.micro[:rank]))
        return tuple(range(start, stop) for start, stop in pairwise(accumulate(self.micro[rank], initial=first)))

    def to_json(self) -> list[list[int]]:
        """Return lists for `from_json`."""
        return [list(sizes) for sizes in self.micro]

    @classmethod
    def from_json(cls, lists: Iterable[Iterable[int]]) -> "Split":
        """Return what `to_json` was called on."""
        return cls(tuple(tuple(sizes) for sizes in lists))


def resolve_batches(batch: Batch, global_batch: int | None, devices: Sequence[str]) -> tuple[int, ...]:
    """Return how many samples of a global batch each rank takes.

    "auto" is equal, a number is for every rank, a list has one for each rank. A dict has ranks or kinds of devices as
    keys, and a rank's own key wins; ranks that it does not name share what remains equally.

    Args:
        batch: What the user wrote.
        global_batch: The samples of a step, if they are given.
        devices: The device of each rank.

    Raises:
        UserError: The batch is invalid, or does not sum to the global batch.
    """
    if global_batch is not None and _whole("global_batch", global_batch) < 1:
        raise UserError(f"global_batch = {global_batch} has no samples; use 1 or more")
    batches = _batches(batch, global_batch, devices)
    if any(size < 0 for size in batches):
        raise UserError(f"batch = {_shown(batch)} has a negative number; use 0 for a rank without samples")
    if global_batch is not None and sum(batches) != global_batch:
        raise UserError(
            f"batch = {_shown(batch)} sums to {sum(batches)}{_over(batch, devices)}, but global_batch is "
            f"{global_batch}; make them agree or leave one of them out"
        )
    if not any(batches):
        raise UserError(f"batch = {_shown(batch)} gives no rank any samples; give at least one rank 1 or more")
    return batches


def _batches(batch: Batch, global_batch: int | None, devices: Sequence[str]) -> tuple[int, ...]:
    match batch:
        case "auto":
            if global_batch is None:
                raise UserError('batch = "auto" needs a global_batch to share out; set global_batch')
            return _shared(global_batch, len(devices))
        case str():
            raise UserError(f'batch = "{batch}" is not known; use "auto", a number, a list or a dict')
        case Mapping():
            return _by_name(batch, global_batch, devices)
        case Sequence():
            if len(batch) != len(devices):
                raise UserError(
                    f"batch = {_shown(batch)} has {len(batch)} numbers for {len(devices)} ranks; "
                    f"give one number for each rank"
                )
            return tuple(_whole(f"batch of rank {rank}", size) for rank, size in enumerate(batch))
        case _:
            return (_whole("batch", batch),) * len(devices)


def _by_name(batch: Mapping[int | str, int], global_batch: int | None, devices: Sequence[str]) -> tuple[int, ...]:
    sizes = {key: _whole(f"batch of {key!r}", size) for key, size in batch.items()}
    ranks_of = {key: _ranks_of(key, devices) for key in sizes}
    keys = {rank: _key_of(rank, ranks_of, devices) for rank in sorted({*sum(ranks_of.values(), ())})}
    named = {rank: sizes[key] for rank, key in keys.items()}
    left = max(0, (global_batch or 0) - sum(named.values()))
    others = [rank for rank in range(len(devices)) if rank not in named]
    named |= zip(others, _shared(left, len(others)), strict=True)
    return tuple(named[rank] for rank in range(len(devices)))


def _ranks_of(key: int | str, devices: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that `key` names: itself, or those whose device it matches."""
    if not isinstance(key, str):
        if _whole("a rank in batch", key) not in range(len(devices)):
            raise UserError(f"batch names rank {key} of {len(devices)} ranks; use 0 to {len(devices) - 1}")
        return (key,)
    matches = match_kind(key, devices)
    if not matches:
        raise UserError(f'batch names "{key}", and this job has no such device{nearest(key, set(devices))}')
    return tuple(rank for rank, name in enumerate(devices) if name in matches)


def _key_of(rank: int, ranks_of: Mapping[int | str, tuple[int, ...]], devices: Sequence[str]) -> int | str:
    """Return the key that counts for `rank`: its own, otherwise the one that contains all others."""
    if rank in ranks_of:
        return rank
    names = [key for key, ranks in ranks_of.items() if isinstance(key, str) and rank in ranks]
    winners = [name for name in names if all(other.lower() in name.lower() for other in names)]
    if len(winners) != 1:
        both = " and ".join(f'"{name}"' for name in names)
        raise UserError(f'batch names rank {rank} ("{devices[rank]}") by {both}; leave all but one of them out')
    return winners[0]


def _whole(what: str, value: object) -> int:
    """Return `value` as an integer; True and 4.0 are refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # checked here
    except TypeError:
        raise UserError(f"{what} = {value!r} is not an integer; write a whole number of samples") from None


def _limits(batches: Sequence[int], micro_batch: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the largest micro-batch of each rank."""
    if any(_whole(f"batch of rank {rank}", batch) < 0 for rank, batch in enumerate(batches)):
        raise UserError(f"batch = {_shown(batches)} has a negative number; use 0 for a rank without samples")
    if micro_batch is None:
        return tuple(max(1, batch) for batch in batches)
    limits = tuple(micro_batch) if isinstance(micro_batch, Sequence) else (micro_batch,) * len(batches)
    if len(limits) != len(batches):
        raise UserError(
            f"micro_batch = {_shown(limits)} has {len(limits)} numbers for {len(batches)} ranks; "
            f"give one number for each rank"
        )
    if any(_whole(f"micro_batch of rank {rank}", limit) < 1 for rank, limit in enumerate(limits)):
        raise UserError(f"micro_batch = {_shown(micro_batch)} has a number below 1; use 1 or more")
    return limits


def _even(samples: int, limit: int) -> tuple[int, ...]:
    """Return `samples` in as few parts as possible of at most `limit`."""
    return _shared(samples, -(-samples // limit))


def _shared(samples: int, parts: int) -> tuple[int, ...]:
    """Return `samples` in equal parts; the first parts have one more if it does not come out even."""
    return tuple((samples + parts - 1 - part) // parts for part in range(parts))


def _in_proportion(count: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return `count` in whole parts in the proportion of `weights`; the largest remainders are rounded up.

    Integers only: each part is the proportion rounded down or up, so never above its weight while `count` is
    at most their sum.
    """
    total = sum(weights)
    parts = [count * weight // total for weight in weights]
    # Python sorts stably: of equal remainders the first rank's comes first.
    order = sorted(range(len(weights)), key=lambda rank: -(count * weights[rank] % total))
    for rank in order[: count - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def _over(batch: Batch, devices: Sequence[str]) -> str:
    """Return a clause with the number of ranks, if `batch` itself does not show it."""
    return f" over {len(devices)} ranks" if isinstance(batch, int | Mapping) else ""


def _shown(batch: object) -> str:
    """Return a batch as a person would write it."""
    return str(list(batch)) if isinstance(batch, Sequence) and not isinstance(batch, str) else str(batch)
