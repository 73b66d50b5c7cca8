"""Mixed precision: fp32 parameters that are equal on all ranks bit for bit, and close to a run in fp32."""

from typing import Any

import pytest
import torch
from support.features import PAIR, STEPS, THREE, TrainingCase, assert_same, train_alone, train_on_ranks
from support.models import Perceptron, cross_entropy, vectors
from support.runs import in_runs
from torch import nn

from mimatrix.engine.run import Run

in_stages = pytest.mark.parametrize("stage", range(4))


def singles(count: int) -> list[Any]:
    return [(x.float(), y) for x, y in vectors(count)]


CASE = TrainingCase(Perceptron, singles(STEPS * 5), cross_entropy, tolerance=1e-5, max_grad_norm=1.0)


MIXED = {0: "bf16", 1: "fp16", "cpu": "fp32"}


@pytest.mark.parametrize(
    ("precision", "stage"), [("bf16", 0), ("fp16", 1), ("fp16", 2), ("bf16", 3), (MIXED, 0), (MIXED, 3)]
)
def test_16_bit_precision_in_every_stage(precision: Any, stage: int) -> None:
    expected, results = train_alone(CASE), train_on_ranks(CASE, stage, THREE, precision=precision)
    for result in results:
        assert_same(result.state, results[0].state, 0)
        assert_same(result.state, expected.state, 2e-2)
        assert all(value.dtype == torch.float32 for value in result.state.values())
        assert result.losses == results[0].losses
    assert any(not torch.equal(results[0].state[name], value) for name, value in expected.state.items())


def test_16_bit_precision_in_a_single_process() -> None:
    (result,) = train_on_ranks(CASE, 0, {"batch": [5], "micro_batch": 2}, precision="bf16")
    assert_same(result.state, train_alone(CASE).state, 2e-2)


class DtypeRecorder(nn.Module):
    """Records the dtype of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        self.seen.add(y.dtype)
        return {"y": y}


@in_stages
def test_bf16_computes_with_fp32_parameters(stage: int) -> None:
    def on_rank(run: Run) -> None:
        model = DtypeRecorder()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        _, optimizer, loader = run.prepare(model, optimizer, singles(10))
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs)["y"], targets))
            optimizer.step()
        assert model.seen == {torch.bfloat16}
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in kept} <= {torch.float32}
        shown: list[torch.dtype] = []

        def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
            shown.append(model(batch[0])["y"].dtype)
            return {"nothing": 0.0}

        run.evaluate(model, singles(5), measure)
        assert shown
        assert set(shown) == {torch.float32}

    in_runs(2, on_rank, stage=stage, precision="bf16", **PAIR)


@in_stages
def test_loss_scale_skips_the_step_on_all_ranks_after_an_overflow_on_one(stage: int) -> None:
    """The scale is halved, and the next finite step continues as if the overflow had not been."""
    good = singles(STEPS * 5)
    bad = [(torch.full((6,), 1e30) if number == 8 else x, y) for number, (x, y) in enumerate(good)]
    without = TrainingCase(
        Perceptron, good[:5] + good[10:], cross_entropy, lambda params: torch.optim.AdamW(params, lr=1e-2)
    )
    scales = []
    built = [without.build() for _ in range(2)]

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = built[run.rank]
        _, optimizer, loader = run.prepare(model, optimizer, bad, shuffle=False)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if not run.in_batch:
                scales.append((run.rank, run.step, run._prepared().global_step.scale.value))
        return run.full_state_dict(model)

    states = in_runs(2, on_rank, stage=stage, precision={1: "fp16"}, **PAIR)
    for rank in range(2):
        values = {step: value for at, step, value in scales if at == rank}
        assert values == {1: 2.0**16, 2: 2.0**15, 3: 2.0**15}
    for state in states:
        assert_same(state, states[0], 0)
        assert_same(state, train_alone(without).state, 1e-2)
