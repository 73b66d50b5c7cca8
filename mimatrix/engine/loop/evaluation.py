"""Evaluation: weighted means of metrics over a dataset, each sample once, on all ranks together."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mimatrix.core.errors import UserError
from mimatrix.engine.data.digest import are_close, describe_samples
from mimatrix.engine.data.fingerprint import check_same_rows, fingerprint_rows
from mimatrix.engine.data.loading_config import check_loading, dataset_size, describe_dataset
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.loop.batch_agreement import BatchAgreement
from mimatrix.engine.loop.metrics import MetricLog, WeightedMeans, check_number, to_float
from mimatrix.engine.rank_exchange import gather_or_raise
from mimatrix.engine.world import World
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.planner.model.split import Split

MetricFn = Callable[[nn.Module, Any], dict[str, Any]]
"""Metrics of a batch by name, each a mean over its samples."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of `run.evaluate` on this rank."""

    world: World
    split: Split
    """Of a training batch; each rank evaluates as large a part."""
    strategy: ShardingStrategy | None
    metric_fn: MetricFn

    def open(
        self, model: nn.Module, dataset: Any, loading: Mapping[str, Any], log: MetricLog, step: int
    ) -> MicroBatchSource:
        """Open the dataset; refuse it, or the model, on all ranks if it is not the same on all. A collective.

        Ranks meet here anyway, so what they have logged before is merged, too.
        """
        source: MicroBatchSource | None = None

        def describe() -> dict[str, Any]:
            nonlocal source
            source = self._open(dataset, loading)
            settings = {"shuffle": source.loading.shuffles, **_describe_drop_last(dataset, source)}
            return {
                "dataset": describe_dataset(dataset),
                "rows": fingerprint_rows(source.loading) if self.world.world_size > 1 else None,
                "weights": self._describe_weights(model) if self.world.world_size > 1 else None,
                "settings": settings,
                "logged": log.sums_outside(step),
            }

        descriptions = gather_or_raise(self.world.exchange, describe)
        assert source is not None
        _check_same(descriptions)
        rows = [each["rows"] for each in descriptions]
        check_same_rows(self.world.exchange, source.loading, rows, "run.evaluate")
        _check_same_weights([each["weights"] for each in descriptions])
        log.merge(each["logged"] for each in descriptions)
        return source

    def _describe_weights(self, model: nn.Module) -> list[Any] | None:
        """Describe a model that is not the prepared one, by some elements of each parameter; None for that one.

        Buffers count only where there is nothing else: batch norm may have other statistics on each rank.
        """
        units = self.strategy.units if self.strategy else ()
        prepared = {id(param.parameter) for unit in units for param in unit.params}
        if any(id(param) in prepared for param in model.parameters()):
            return None
        tensors: list[torch.Tensor] = list(model.parameters())
        return [describe_samples([tensor]) for tensor in tensors or model.buffers()]

    def _open(self, dataset: Any, loading: Mapping[str, Any]) -> MicroBatchSource:
        check_loading(loading)
        size = dataset_size(dataset)
        if size == 0:
            raise UserError("run.evaluate was given a dataset without samples; give it at least one")
        split = self.split.for_samples(self.split.total if size is None else min(self.split.total, size))
        given = {"shuffle": False, **loading}
        # How many samples a stream has is found out on the way.
        return MicroBatchSource(dataset, split, self.world.rank, device=self.world.device, is_evaluation=True, **given)

    def run(self, model: nn.Module, source: MicroBatchSource) -> dict[str, float]:
        """Compute the means over what all ranks have. A collective."""
        with _eval_mode(model), self.world.timer.excluded():
            if source.stream_mode or (self.strategy and self.strategy.counts_forward_passes):
                # Ranks meet for every batch of a stream, or in every forward pass: one that fails cannot wait for them.
                return merge_means(self.world.exchange.all_gather(self._sums(model, source)))
            return merge_means(gather_or_raise(self.world.exchange, lambda: self._sums(model, source)))

    def _sums(self, model: nn.Module, source: MicroBatchSource) -> dict[str, list[float]]:
        """Run the metric function on this rank's part; where forward passes are collective, with all ranks."""
        means, names = WeightedMeans(), None
        agreement = BatchAgreement(source, self.world.exchange, call="run.evaluate", logs=False)
        for micro, batch in agreement.agree_on_all(source.epoch(0)):
            passes = self.strategy.forward_passes() if self.strategy else 0
            if micro.num_micro_steps:
                metrics = self.metric_fn(model, batch)
                _check_metrics(metrics, names)
                names = sorted(metrics)
                weight = to_float(metrics.get("weight", micro.num_samples))
                # A batch that counts nothing may have no mean, and 0 * NaN would make all of them NaN.
                values = {name: to_float(value) if weight else 0.0 for name, value in metrics.items()}
                means.add({name: value for name, value in values.items() if name != "weight"}, weight)
            if self.strategy and self.strategy.counts_forward_passes:
                _check_one_pass(self.strategy.forward_passes() - passes, has_data=micro.num_micro_steps > 0)
                if micro.is_last:
                    for _ in range(micro.num_micro_steps, micro.max_micro_steps):
                        self.strategy.forward_without_data()
        return means.sums()


def _describe_drop_last(dataset: Any, source: MicroBatchSource) -> dict[str, Any]:
    if isinstance(dataset, DataLoader) and dataset.drop_last:
        return {"drop_last": True, "batch_size": dataset.batch_size}
    return {"drop_last": source.loading.drop_last, "batch_size": None}


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_same(descriptions: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what differs between ranks, in the same words on all of them: samples would be left out or repeated."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other["dataset"] != first["dataset"]:
            size = first["dataset"].replace("a dataset of", "one of")
            raise UserError(
                f"rank {rank} evaluates {other['dataset']} and rank 0 {size}; give run.evaluate the same on all ranks"
            )
        for name, value in other["settings"].items():
            if value != first["settings"][name]:
                raise UserError(
                    f"rank {rank} evaluates with {name}={value} and rank 0 with {name}={first['settings'][name]}; "
                    "give run.evaluate the same on all ranks"
                )


def _check_same_weights(by_rank: Sequence[list[Any] | None]) -> None:
    """Refuse a model that is not the prepared one, if its weights are not the same on all ranks."""
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if (first is None) != (other is None):
            prepared, own = (0, rank) if first is None else (rank, 0)
            raise UserError(
                f"rank {prepared} evaluates the prepared model and rank {own} another one; give run.evaluate the same "
                "on all ranks"
            )
        if first is None or other is None:
            continue
        if len(first) != len(other) or not all(map(_is_same_tensor, first, other)):
            raise UserError(
                f"run.evaluate was given a model that was not prepared, and rank {rank} has other weights of it than "
                "rank 0; give it the prepared model, or one with the same weights on all ranks"
            )


def _is_same_tensor(one: Sequence[Any], other: Sequence[Any]) -> bool:
    # Up to rounding: each rank may have averaged the weights on a GPU of another kind.
    return bool(one[0] == other[0]) and are_close(one[1], other[1])


def _check_metrics(metrics: Any, names: Sequence[str] | None) -> None:
    """Refuse what has no mean, or one that depends on how the samples are cut into batches."""
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"the metric function of run.evaluate returned a {type(metrics).__name__}; return a dict of numbers by name"
        )
    for name, value in metrics.items():
        check_number(f'the metric "{name}" of run.evaluate is', value)
    weight = to_float(metrics.get("weight", 1.0))
    if not 0 <= weight < math.inf:
        raise UserError(f"the metric function of run.evaluate returned weight = {weight}; return one that is 0 or more")
    if names is not None and names != sorted(metrics):
        raise _unlike_names(f"{_join(names)} for one batch and {_join(sorted(metrics))} for another")


def _check_one_pass(passes: int, *, has_data: bool) -> None:
    if has_data and passes != 1:
        raise UserError(
            f"the metric function ran the model {passes} times for a batch, and in stage 3 all ranks run it together; "
            "run it once for each batch"
        )


def merge_means(sums_of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the means over what all ranks found; a rank without data found nothing."""
    merged, names = WeightedMeans(), {rank: sorted(sums) for rank, sums in enumerate(sums_of_ranks) if sums}
    first = min(names, default=0)
    for rank, found in names.items():
        if found != names[first]:
            raise _unlike_names(f"{_join(names[first])} on rank {first} and {_join(found)} on rank {rank}")
        merged.add_sums(sums_of_ranks[rank])
    for name, (_, weight) in merged.sums().items():
        if not weight:
            raise UserError(f"the weights of {name} sum to 0, so it has no mean; give at least one batch a weight")
    return merged.means()


def _unlike_names(found: str) -> UserError:
    return UserError(f"the metric function of run.evaluate returned {found}; return the same names for every batch")


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
