"""Weighted means of metrics: the same whether one rank adds all values, or several ranks add their sums."""

import pytest
import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.evaluation import merge_means
from mimatrix.engine.loop.metrics import WeightedMeans


def test_means_count_by_weight() -> None:
    means = WeightedMeans()
    means.add({"loss": 1.0, "accuracy": 0.5}, 1.0)
    means.add({"loss": 4.0}, 3.0)
    assert means.means() == {"loss": 3.25, "accuracy": 0.5}
    assert means.sums() == {"loss": [13.0, 4.0], "accuracy": [0.5, 1.0]}


def test_tensors_are_detached_and_stay_tensors_until_sums_are_asked_for() -> None:
    means = WeightedMeans()
    loss = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    means.add({"loss": loss}, 2.0)
    mean = means.means()["loss"]
    assert isinstance(mean, torch.Tensor)
    assert not mean.requires_grad
    (total, weight) = means.sums()["loss"]
    assert (type(total), total, weight) == (float, 4.0, 2.0)


def test_merged_sums_of_ranks_are_the_means_over_all() -> None:
    alone, ranks = WeightedMeans(), [WeightedMeans(), WeightedMeans(), WeightedMeans()]
    for number in range(10):
        alone.add({"loss": number**2}, number + 1)
        ranks[number % 2].add({"loss": number**2}, number + 1)
    assert ranks[2].sums() == {}
    assert merge_means([rank.sums() for rank in ranks]) == pytest.approx(alone.means(), rel=1e-15)


def test_metrics_that_only_some_ranks_have_are_refused_since_their_means_depend_on_the_batches() -> None:
    with pytest.raises(
        UserError, match="returned loss on rank 1 and accuracy on rank 2; return the same names for every"
    ):
        merge_means([{}, {"loss": [2.0, 2.0]}, {"accuracy": [1.0, 4.0]}])


def test_sums_of_halves_do_not_overflow() -> None:
    means = WeightedMeans()
    means.add({"loss": torch.tensor(200.0, dtype=torch.float16)}, 1000.0)
    assert float(means.means()["loss"]) == 200.0


def test_a_weight_of_zero_does_not_divide() -> None:
    means = WeightedMeans()
    means.add({"loss": 3.0}, 0.0)
    assert means.means() == {"loss": 0.0}
