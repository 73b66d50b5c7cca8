"""ZeRO-3 holds few unsharded units at a time."""

from typing import Any

import torch
from support.models import cross_entropy, vectors
from support.runs import in_runs
from torch import nn

from mimatrix.engine.run import Run
from mimatrix.engine.zero.zero3 import Zero3


def test_zero3_reshards_frozen_units_in_backward() -> None:
    """No more than a few units are unsharded at the same time."""
    peaks: list[int] = []

    def on_rank(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 6), *(nn.Linear(6, 6) for _ in range(10)), nn.Linear(6, 3)).double()
        model[1:-1].requires_grad_(False)
        trainable = [param for param in model.parameters() if param.requires_grad]
        _, optimizer, loader = run.prepare(model, torch.optim.SGD(trainable, 0.1), vectors(10))
        strategy = run._prepared().strategy
        assert isinstance(strategy, Zero3)
        first: Any = model[0]
        first.weight.register_hook(lambda _: peaks.append(strategy.memory()["units in flight"]))
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        assert strategy.memory()["units in flight"] == 0

    in_runs(2, on_rank, stage=3, batch=[3, 2], unit_bytes=64)
    assert max(peaks) < 6 * 6 * 7 * 8
