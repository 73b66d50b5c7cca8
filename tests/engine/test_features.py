"""Optimizers, schedulers, datasets and models as users write them train as in one process, in every ZeRO stage."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.features import (
    ALONE,
    PAIR,
    STAGES,
    STEPS,
    THREE,
    Parameters,
    TrainingCase,
    assert_same,
    check,
    train_alone,
    train_on_ranks,
)
from support.models import Perceptron, cross_entropy, images, vectors
from support.plain import plain_run
from support.runs import in_runs
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from mimatrix.engine.run import Run
from mimatrix.engine.zero import base, zero0_shared
from mimatrix.engine.zero.zero0 import Zero0

in_stages = pytest.mark.parametrize("stage", STAGES)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have; it treats every element alike."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"], *group["betas"])

    def _update(self, param: nn.Parameter, lr: float, fast: float, slow: float) -> None:
        state = self.state[param]
        if not state:
            state["mean"] = torch.zeros_like(param)
        assert param.grad is not None
        param.sub_(lr * torch.lerp(param.grad, state["mean"], fast).sign() + lr * 0.1 * param)
        state["mean"].lerp_(param.grad, 1 - slow)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "lion": partial(Lion, lr=1e-2),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2, dtype=torch.float64)),
}


def mlp() -> nn.Module:
    return Perceptron().double()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_are_exact(name: str, stage: int) -> None:
    check(TrainingCase(mlp, vectors(STEPS * 5), cross_entropy, OPTIMIZERS[name]), stage, PAIR if stage == 1 else THREE)


@pytest.mark.parametrize(("name", "stage"), [("foreach", 0), ("fused", 1), ("foreach", 2), ("fused", 3)])
def test_float32_is_exact_within_rounding(name: str, stage: int) -> None:
    data = [(x.float(), y) for x, y in vectors(STEPS * 5)]
    check(TrainingCase(Perceptron, data, cross_entropy, OPTIMIZERS[name], tolerance=1e-5), stage)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        [2],
    ),
}


@pytest.mark.parametrize(("name", "stage"), [(name, stage) for name in SCHEDULERS for stage in (0, 2)])
def test_schedulers_step_once_for_each_global_batch_on_every_rank(name: str, stage: int) -> None:
    case = TrainingCase(mlp, vectors(STEPS * 5), cross_entropy, scheduler=SCHEDULERS[name], epochs=2)
    check(case, stage, ALONE if stage == 0 else THREE)


@dataclass
class ModelOutput:
    """What some models return."""

    logits: torch.Tensor
    note: str


class Crossed(nn.Module):
    """Runs its parts in another order than it has them, and each in its own way."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.last, self.middle, self.first = nn.Linear(5, 3), nn.Linear(4, 5), nn.Linear(6, 4)
        self.returns = returns

    def forward(self, x: torch.Tensor, *, note: str = "") -> Any:
        y = self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) * self.scale * self.scale
        kinds = {"tensor": y, "dict": {"logits": y}, "tuple": (note, [y]), "dataclass": ModelOutput(y, note)}
        return kinds[self.returns]


def by_name(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(x=batch["x"], note="hello")
    match output:
        case {"logits": logits}:
            pass
        case (str(), [logits]):
            pass
        case ModelOutput(logits, _):
            pass
        case _:
            logits = output
    return functional.cross_entropy(logits, batch["y"])


def named(count: int) -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in vectors(count)]


@pytest.mark.parametrize(
    ("returns", "stage"), [("tensor", 1), ("tensor", 3), ("dict", 3), ("tuple", 3), ("dataclass", 3)]
)
def test_models_with_any_module_order_batch_type_and_output_type(returns: str, stage: int) -> None:
    check(TrainingCase(lambda: Crossed(returns).double(), named(STEPS * 5), by_name), stage, unit_bytes=64)


class Shared(nn.Module):
    """One module in two places, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other, self.last = self.one, nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.other(torch.tanh(self.one(x)))))
        return y


@pytest.mark.parametrize("stage", range(3))
def test_tied_modules_train_exactly(stage: int) -> None:
    check(TrainingCase(lambda: Shared().double(), vectors(STEPS * 5), cross_entropy), stage)


class Adapted(nn.Module):
    """A frozen layer with a small one added, as in LoRA."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def backbone() -> nn.Module:
    frozen = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(
        frozen, nn.Flatten(), Adapted(12, 8), nn.Tanh(), Adapted(8, 8), nn.Tanh(), Adapted(8, 3)
    ).double()


@in_stages
def test_lora_on_a_frozen_backbone(stage: int) -> None:
    data = [(torch.tensor([number % 9, number % 5]), number % 3) for number in range(STEPS * 5)]
    check(TrainingCase(backbone, data, cross_entropy), stage)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        y: torch.Tensor = self.last(x)
        return y


@in_stages
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_exact(reentrant: bool, stage: int) -> None:
    check(TrainingCase(lambda: Checkpointed(reentrant).double(), vectors(STEPS * 5), cross_entropy), stage)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_exact(backend: str, stage: int) -> None:
    def compiled() -> nn.Module:
        model: nn.Module = torch.compile(Crossed().double(), backend=backend)  # type: ignore[assignment]
        return model

    check(TrainingCase(compiled, named(STEPS * 5), by_name), stage, PAIR)


class Sometimes(nn.Module):
    """Has parameters that get no gradient in some steps, or ever."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.odd, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.odd(x) * use[:, None] if bool(use.any()) else y


def sometimes(model: nn.Module, batch: Any) -> torch.Tensor:
    (x, use), y = batch
    return functional.cross_entropy(model(x, use), y)


@in_stages
def test_parameters_without_gradient_keep_value_and_state(stage: int) -> None:
    """Weight decay and momentum leave them alone, as in one process."""
    data = [((x, float(number // 5 == 1)), y) for number, (x, y) in enumerate(vectors(STEPS * 5))]
    check(TrainingCase(lambda: Sometimes().double(), data, sometimes), stage)


@in_stages
@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_with_a_partial_last_batch(drop_last: bool, stage: int) -> None:
    case = TrainingCase(
        mlp, vectors(12), cross_entropy, epochs=2, loading=(("drop_last", drop_last),), max_grad_norm=0.3
    )
    check(case, stage, THREE if drop_last else PAIR)


class IterableOnly:
    def __init__(self, data: list[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_iterable_dataset(stage: int) -> None:
    case = TrainingCase(mlp, vectors(12), cross_entropy, epochs=2)
    expected = train_alone(case)
    for result in train_on_ranks(replace(case, data=IterableOnly(vectors(12))), stage, THREE):  # type: ignore[arg-type]
        assert_same(result.state, expected.state, 1e-10)


@in_stages
def test_an_optimizer_that_has_stepped_before_prepare(stage: int) -> None:
    def stepped(params: Parameters) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    check(TrainingCase(mlp, vectors(STEPS * 5), cross_entropy, stepped), stage)


def tokens(batch: Any) -> float:
    return float(sum((target >= 0).sum() for target in batch[1:]))


def per_token(model: nn.Module, batch: Any) -> torch.Tensor:
    """Compute the loss by hand, so that a batch without tokens gives NaN."""
    x, targets = batch
    kept = (targets >= 0).double()
    losses = functional.cross_entropy(model(x), targets.clamp(min=0), reduction="none")
    loss: torch.Tensor = (losses * kept).sum() / kept.sum()
    return loss


@in_stages
def test_token_weights_where_some_micro_batches_have_no_token(stage: int) -> None:
    data = [(x, -1 if number % 3 == 0 else y) for number, (x, y) in enumerate(vectors(STEPS * 5))]
    case = TrainingCase(mlp, data, per_token, weight=tokens, max_grad_norm=0.2)
    check(case, stage, THREE)
    check(case, stage, ALONE | {"micro_batch": 1})


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_grads_are_reduced_in_backward_or_after_it(overlaps: bool, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "can_overlap", lambda group, units: overlaps)
    monkeypatch.setattr(zero0_shared, "can_overlap", lambda group, units: True)  # so that nothing is read in place
    check(TrainingCase(mlp, vectors(STEPS * 5), cross_entropy, max_grad_norm=0.5), stage)
    check(TrainingCase(lambda: Crossed().double(), named(STEPS * 5), by_name), stage)


def test_zero0_shares_grads_only_with_torch_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's optimizers only: another one might change what it sees."""
    monkeypatch.setattr(zero0_shared, "can_overlap", lambda group, units: False)

    def on_rank(run: Run, kind: Any) -> type:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        run.prepare(model, kind(model.parameters(), lr=0.1), vectors(10))
        return type(run._prepared().strategy)

    kinds: dict[Any, type] = {torch.optim.SGD: zero0_shared.Zero0SharedGrads, Lion: Zero0}
    for kind, expected in kinds.items():
        strategies = in_runs(2, partial(on_rank, kind=kind), stage=0, global_batch=5, unit_bytes=10_000)
        assert strategies == [expected] * 2


class Odd(nn.Module):
    """Buffers and parameters of unusual kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("tilted", torch.arange(6.0).view(2, 3).t())
        self.whole = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.scale + self.whole
        return y


@in_stages
def test_unusual_buffers_and_parameters(stage: int) -> None:
    def build() -> nn.Module:
        model = Odd()
        model.layer.double()
        return model

    check(TrainingCase(build, vectors(STEPS * 5), cross_entropy), stage)


class Mixed(nn.Module):
    """An auxiliary loss in addition to the output, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(6, 4), nn.Linear(6, 4)
        self.aux_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.router(x).softmax(-1)
        y: torch.Tensor = self.inner(x) * chances
        self.aux_loss = chances.square().mean()
        return torch.cat([y, y], -1)[:, :6]


def with_aux_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    for module in model.modules():
        if isinstance(module, Mixed):
            assert module.aux_loss is not None
            loss = loss + module.aux_loss
    return loss


@in_stages
def test_an_auxiliary_loss_stored_on_a_module(stage: int) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Mixed(), Mixed(), Mixed(), nn.Linear(6, 3)).double()

    check(TrainingCase(build, vectors(STEPS * 5), with_aux_loss), stage, unit_bytes=64)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "optimizer_of", [partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, momentum=0.9)]
)
def test_channels_last_parameters(stage: int, optimizer_of: Any) -> None:
    def model_of() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            convolution = nn.Conv2d(2, 4, 3, padding=1)
            model = nn.Sequential(convolution, nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 3))
        last: nn.Module = model.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return last

    models = [model_of() for _ in range(3)]
    data = images(20)

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model = models[run.rank]
        _, optimizer, loader = run.prepare(model, optimizer_of(model.parameters(), lr=0.01), data, shuffle=False)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        return run.full_state_dict(model)

    states = in_runs(2, on_rank, stage=stage, batch=[3, 1], unit_bytes=300)
    batches = [default_collate(data[start : start + 4]) for start in range(0, 20, 4)]
    plain_run(models[2], optimizer_of(models[2].parameters(), lr=0.01), batches, cross_entropy)
    for state in states:
        for name, value in models[2].state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
