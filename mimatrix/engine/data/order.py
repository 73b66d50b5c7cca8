"""The order of samples in an epoch: in sequence, shuffled, or as a sampler gives it.

An order belongs to the seed and the epoch alone: every rank finds the same one, a resumed run finds it again, and no
generator that training draws from is moved by it.
"""

import copy
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from mimatrix.core.errors import UserError
from mimatrix.profiler.rng_state import get_rng_state, set_rng_state

Indices = Sequence[Any] | torch.Tensor


def derive_seed(*numbers: int) -> int:
    """Hash `numbers` to a seed: the same on every machine, and unrelated even for close numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SampleOrder(Protocol):
    """Gives the indices of an epoch, which global batches are cut from in order."""

    @property
    def is_foreign(self) -> bool:
        """Whether the user's code gives the order, so that ranks must compare it."""

    def num_samples(self) -> int:
        """Return the number of samples in an epoch."""

    def indices(self, seed: int, epoch: int) -> Indices:
        """Return all indices of an epoch."""


class DatasetOrder:
    """All samples of a dataset, each once."""

    def __init__(self, dataset: Any, *, shuffle: bool, generator: torch.Generator | None = None) -> None:
        self._dataset, self.shuffle = dataset, shuffle
        self.is_foreign = shuffle and generator is not None
        self._own_seed = () if generator is None else (generator.initial_seed(),)

    def num_samples(self) -> int:
        """Return the number of samples of the dataset."""
        return len(self._dataset)

    def indices(self, seed: int, epoch: int) -> Indices:
        """Return all indices, shuffled if asked for."""
        samples = len(self._dataset)
        if not self.shuffle:
            return range(samples)
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch, *self._own_seed))
        return torch.randperm(samples, generator=generator)


class SamplerOrder:
    """What a sampler yields; or a batch sampler, whose batches then are the global batches."""

    is_foreign = True

    def __init__(self, sampler: Any, *, global_batch: int | None, generator: torch.Generator | None = None) -> None:
        self._sampler, self._global_batch = sampler, global_batch
        """`global_batch`: of how many samples a batch sampler's batches must be; None for a sampler."""
        self._name = type(sampler).__name__
        own = [number for source in _generators(sampler) for number in _initial_seed(source)]
        self._own_seed = own if generator is None else [*own, generator.initial_seed()]
        """What generators that the user made and seeded bring into the order."""
        self._last: tuple[tuple[int, int], Indices] | None = None
        """The epoch drawn last."""

    def num_samples(self) -> int:
        """Return the number of indices in an epoch; for a batch sampler, those in the first epoch of a copy."""
        return self._length() if self._global_batch is None else self._num_in_batches

    @cached_property
    def _num_in_batches(self) -> int:
        return len(self._draw(_copy_sampler(self._sampler), 0, 0))

    def indices(self, seed: int, epoch: int) -> Indices:
        """Return what the sampler yields in an epoch; a second time too, as it may count how often it is asked."""
        if self._last is None or self._last[0] != (seed, epoch):
            self._last = (seed, epoch), self._draw(self._sampler, seed, epoch)
        return self._last[1]

    def _draw(self, sampler: Any, seed: int, epoch: int) -> Indices:
        with _seeded(sampler, derive_seed(seed, epoch, *self._own_seed)):
            for inner in _nested(sampler):
                if hasattr(inner, "set_epoch"):
                    inner.set_epoch(epoch)
            length = self._length()
            drawn = list(islice(sampler, length + 1))
        if len(drawn) != length:
            how = "more" if len(drawn) > length else f"only {len(drawn)}"
            raise UserError(f"{self._name} has the length {length} and yields {how}; let __len__ return what it yields")
        return _as_tensor(drawn if self._global_batch is None else _join(drawn, self._global_batch, self._name))

    def _length(self) -> int:
        try:
            return len(self._sampler)
        except (TypeError, NotImplementedError):
            raise UserError(f"{self._name} has no length, so an epoch has no end; give it __len__") from None


class WholeBatches:
    """What fills whole batches of another order; the rest is left out, as by a DataLoader with `drop_last`."""

    def __init__(self, order: SampleOrder, batch_size: int) -> None:
        self._order, self._batch_size = order, batch_size
        self.is_foreign = order.is_foreign

    def num_samples(self) -> int:
        """Return the number of samples in whole batches."""
        return self._order.num_samples() // self._batch_size * self._batch_size

    def indices(self, seed: int, epoch: int) -> Indices:
        """Return the indices of whole batches."""
        indices = self._order.indices(seed, epoch)
        return indices[: len(indices) // self._batch_size * self._batch_size]


def choose_order(
    dataset: Any,
    *,
    global_batch: int,
    shuffle: bool,
    sampler: Any = None,
    batch_sampler: Any = None,
    generator: torch.Generator | None = None,
) -> SampleOrder:
    """Return the order that a user asked for, by `shuffle` or by a sampler."""
    if sampler is not None and batch_sampler is not None:
        raise UserError("both sampler and batch_sampler were given, and each is an order; leave one of them out")
    if batch_sampler is not None:
        _check_global(batch_sampler)
        return SamplerOrder(batch_sampler, global_batch=global_batch, generator=generator)
    if sampler is None:
        return DatasetOrder(dataset, shuffle=shuffle, generator=generator)
    _check_global(sampler)
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return DatasetOrder(dataset, shuffle=False)
    is_shuffle = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    if is_shuffle:
        return DatasetOrder(dataset, shuffle=True, generator=sampler.generator)
    return SamplerOrder(sampler, global_batch=None, generator=generator)


def order_of_dataloader(loader: "DataLoader[Any]", global_batch: int) -> SampleOrder:
    """Return the order in which a DataLoader reads; its batches only count if it has a batch sampler of its own."""
    has_own_batches = loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    order = {"batch_sampler": loader.batch_sampler} if has_own_batches else {"sampler": loader.sampler}
    return choose_order(loader.dataset, global_batch=global_batch, shuffle=False, generator=loader.generator, **order)


def _check_global(sampler: Any) -> None:
    """Refuse a sampler that gives one of several ranks its part."""
    for inner in _nested(sampler):
        replicas = getattr(inner, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise UserError(
                f"{type(inner).__name__} gives one of {replicas} replicas its part, but the split decides which rank "
                "sees which samples; create it with num_replicas=1, rank=0, or leave it out"
            )


def _join(batches: Sequence[Sequence[Any]], global_batch: int, name: str) -> list[Any]:
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        if len(batch) > global_batch or (len(batch) < global_batch and not is_last) or not batch:
            raise UserError(
                f"batch {number} of {name} has {len(batch)} samples, and a global batch has {global_batch}; let it "
                "yield global batches, of which only the last may be smaller"
            )
    return list(chain.from_iterable(batches))


def _as_tensor(indices: list[Any]) -> Indices:
    """Return integers as a tensor, which takes an eighth of the memory."""
    return torch.tensor(indices, dtype=torch.int64) if all(type(index) is int for index in indices) else indices


# Generators: global ones, and those of samplers


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (of the CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with the global generators seeded, and give them back their states."""
    cpu = torch.device("cpu")
    saved = get_rng_state(cpu)
    seed_generators(seed)
    try:
        yield
    finally:
        set_rng_state(saved, cpu)


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it wraps."""
    depth = 0
    while sampler is not None and depth < 8:
        yield sampler
        sampler, depth = getattr(sampler, "sampler", None), depth + 1


def _copy_sampler(sampler: Any) -> Any:
    """Return a sampler with counters and lists of its own; not a deep copy, which would copy the dataset as well."""
    try:
        clone = copy.copy(sampler)
        for name, value in [*getattr(clone, "__dict__", {}).items()]:
            if isinstance(value, list | dict | set | deque):
                setattr(clone, name, copy.copy(value))
        if getattr(clone, "sampler", None) is not None:
            clone.sampler = _copy_sampler(clone.sampler)
    except Exception:  # noqa: BLE001 (user code may refuse to be copied; it is then asked itself)
        return sampler
    return clone


def _generators(sampler: Any) -> list[Any]:
    """Return the generators that a sampler and those that it wraps own."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    values = [value for inner in _nested(sampler) for value in getattr(inner, "__dict__", {}).values()]
    return [value for value in values if isinstance(value, kinds)]


def _initial_seed(generator: Any) -> list[int]:
    if isinstance(generator, torch.Generator):
        return [generator.initial_seed()]
    return [int.from_bytes(hashlib.blake2b(repr(_state(generator)).encode(), digest_size=8).digest(), "big")]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Run the body with all generators seeded, the global ones too, and give them back their states."""
    generators = _generators(sampler)
    without = [inner for inner in _nested(sampler) if getattr(inner, "generator", sampler) is None]
    own = [_state(generator) for generator in generators]
    try:
        for number, generator in enumerate(generators):
            _seed(generator, derive_seed(seed, number))
        for inner in without:
            inner.generator = torch.Generator().manual_seed(seed)
        with seeded(seed):
            yield
    finally:
        for generator, state in zip(generators, own, strict=True):
            _set_state(generator, state)
        for inner in without:
            inner.generator = None
