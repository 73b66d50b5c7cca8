"""Loops as people write them give what a plain loop gives, or are refused with a sentence, on one rank as on two."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models import cross_entropy, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

ALONE: dict[str, Any] = {"batch": [4], "micro_batch": 2}
PAIR: dict[str, Any] = {"batch": [3, 1], "micro_batch": [1, 1]}
SPLITS = pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
DATA = vectors(12)
Loop = Callable[[Run, nn.Module, Any, Any], None]


def linear() -> nn.Module:
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6))
        model.bias.zero_()
    return model


def train(split: dict[str, Any], loop: Loop, **settings: Any) -> list[dict[str, torch.Tensor]]:
    """Run a loop on ranks, and return the weights of each."""
    prepare = {name: settings.pop(name) for name in ("read_ahead",) if name in settings}

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared = run.prepare(model, optimizer, DATA, shuffle=False, loss=cross_entropy, **prepare)
        loop(run, *prepared)
        return run.full_state_dict(model)

    return in_runs(len(split["batch"]), on_rank, **{"stage": 0, **split, **settings})


def expected(steps: int, *, max_norm: float | None = None, lr: Callable[[int], float] = lambda _: 0.1) -> nn.Module:
    """Train in a plain loop on global batches of four."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        samples = [DATA[(4 * step + number) % 12] for number in range(4)]
        batch = (torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]))
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def assert_trained(results: list[dict[str, torch.Tensor]], model: nn.Module) -> None:
    for state in results:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def body(run: Run, model: nn.Module, optimizer: Any, batch: Any) -> None:
    run.backward(cross_entropy(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def micro_batches(run: Run) -> int:
    """Return how many micro-batches of a global batch this rank has."""
    return len(run.split.micro[run.rank])


# What works


@SPLITS
def test_a_loop_that_calls_next_and_never_exhausts_the_iterator_has_full_epochs(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for _ in range(3):
            iterator = iter(loader)
            for _ in range(len(loader) * micro_batches(run)):
                body(run, model, optimizer, next(iterator))
        assert run.step == 9

    assert_trained(train(split, loop), expected(9))


@SPLITS
def test_a_loop_that_reads_one_batch_ahead(split: dict[str, Any]) -> None:
    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        last = next(batches)
        for batch in batches:
            yield last
            last = batch
        yield last

    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for _ in run.epochs(2):
            for batch in ahead(iter(loader)):
                body(run, model, optimizer, batch)
        assert run.step == 6

    assert_trained(train(split, loop, read_ahead=True), expected(6))


def test_a_loop_that_reads_ahead_with_a_rank_without_data() -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for _ in run.epochs(2):
            last = None
            for batch in loader:
                if last is not None:
                    body(run, model, optimizer, last)
                last = batch
            if last is not None:
                body(run, model, optimizer, last)

    assert_trained(train({"batch": [4, 0], "micro_batch": 2}, loop, read_ahead=True), expected(6))


@SPLITS
def test_looking_at_one_batch_before_the_loop(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        inputs, _ = next(iter(loader))
        assert inputs.shape[1] == 6
        for _ in run.epochs(1):
            for batch in loader:
                body(run, model, optimizer, batch)

    assert_trained(train(split, loop), expected(3))
    assert_trained(train(split, loop, stage=3, unit_bytes=50), expected(3))


@SPLITS
def test_an_epoch_that_was_left_early_is_over_as_with_a_dataloader(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for epoch in range(3):
            for batch in loader:
                body(run, model, optimizer, batch)
                if not run.in_batch and run.step % 3 == 1 and epoch == 0:
                    break
        assert run.position.epoch == 3
        assert run.step == 7

    train(split, loop)


@SPLITS
def test_a_micro_batch_is_left_out_with_weight_0(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.backward(loss * float("nan") if run.step == 1 else loss, weight=0 if run.step == 1 else None)
            optimizer.step()

    def plain() -> nn.Module:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in (0, 2):
            samples = DATA[4 * step : 4 * step + 4]
            optimizer.zero_grad()
            batch = (torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]))
            cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model

    assert_trained(train(split, loop), plain())


@SPLITS
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_of_the_gradient_is_known_and_logged(split: dict[str, Any], stage: int) -> None:
    norms: dict[int, list[float]] = {}
    histories: dict[int, list[Any]] = {}

    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        mine = norms.setdefault(run.rank, [])
        with pytest.raises(UserError, match="is not known yet"):
            _ = run.grad_norm
        for _ in run.epochs(1):
            for batch in loader:
                body(run, model, optimizer, batch)
                if not run.in_batch:
                    mine.append(run.grad_norm)
        histories[run.rank] = run.history

    assert_trained(train(split, loop, stage=stage, max_grad_norm=0.05, unit_bytes=50), expected(3, max_norm=0.05))
    model = linear()
    batch = (torch.stack([x for x, _ in DATA[:4]]), torch.tensor([y for _, y in DATA[:4]]))
    cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
    first = float(nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))
    assert norms[0][0] == pytest.approx(first, rel=1e-10)
    assert all(values == norms[0] for values in norms.values())
    assert [means["grad_norm"] for _, means in histories[0]] == norms[0]


def test_an_infinite_limit_computes_the_norm_and_clips_nothing() -> None:
    assert_trained(train(PAIR, simple, max_grad_norm=float("inf")), expected(3))


def simple(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for _ in run.epochs(1):
        for batch in loader:
            body(run, model, optimizer, batch)


@SPLITS
def test_a_scheduler_for_the_length_of_the_loader_is_made_after_prepare(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        made = LambdaLR(optimizer, lambda step: 1 - step / (2 * len(loader)))
        scheduler = run.prepare_scheduler(made)
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                optimizer.step()
                scheduler.step()

    assert_trained(train(split, loop), expected(6, lr=lambda step: 0.1 * (1 - step / 6)))


# What is refused


def refuse(split: dict[str, Any], sentence: str, loop: Loop, **settings: Any) -> None:
    with pytest.raises(UserError, match=sentence):
        train(split, loop, **settings)


@SPLITS
def test_reading_ahead_without_saying_so(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        batches = iter(loader)
        last = next(batches)
        for batch in batches:
            body(run, model, optimizer, last)
            last = batch

    refuse(split, "a second micro-batch was drawn before run.backward .* read_ahead=True", loop)


@SPLITS
def test_accumulating_by_hand(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for number, batch in enumerate(loader):
            run.backward(cross_entropy(model, batch) / 8)
            if number % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()

    refuse(split, "drawn before optimizer.step was called for this one", loop)


@SPLITS
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            r"clip_grad_norm_ .* max_grad_norm=.*grad_norm",
        ),
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0), r"clip_grad_value_ .* max_grad_norm"),
        (lambda model: model.weight.grad.norm(), r"`\.grad` has none for the script.* run.grad_norm"),
        (lambda model: model.weight.grad.mul_(2), r"`\.grad` has none for the script"),
    ],
    ids=["clip norm", "clip value", "norm", "scale"],
)
def test_looking_at_gradients_before_they_are_summed(
    split: dict[str, Any], stage: int, act: Callable[[nn.Module], Any], sentence: str
) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            act(model)
            optimizer.step()

    refuse(split, sentence, loop, stage=stage, unit_bytes=50)


@SPLITS
@pytest.mark.parametrize("stage", range(4))
def test_a_grad_scaler(split: dict[str, Any], stage: int) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        for batch in loader:
            run.backward(scaler.scale(cross_entropy(model, batch)))
            scaler.step(optimizer)
            scaler.update()

    refuse(split, 'a GradScaler .* precision="fp16"', loop, stage=stage, unit_bytes=50)


@SPLITS
@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
def test_dropping_gradients_before_the_step(split: dict[str, Any], clear: str) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            if clear == "optimizer":
                optimizer.zero_grad()
            elif clear == "model":
                model.zero_grad()
            else:
                model.weight.grad = None
            optimizer.step()

    refuse(split, r"between run.backward and optimizer.step.*weight=0", loop)


@SPLITS
def test_clearing_gradients_of_the_model_where_a_plain_loop_does_is_fine(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for number, batch in enumerate(loader):
            model.zero_grad(set_to_none=number % 2 == 0)
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            model.zero_grad()

    assert_trained(train(split, loop), expected(3))


@SPLITS
@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_another_models_loss(split: dict[str, Any], stage: int) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            body(run, model, optimizer, batch)
            cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]

    refuse({**split, "micro_batch": 4}, r"gradients came outside run.backward", loop, stage=stage)


@SPLITS
@pytest.mark.parametrize("made_of", ["prepared", "given", "before"])
def test_a_scheduler_that_the_run_does_not_know(split: dict[str, Any], made_of: str) -> None:
    def on_rank(run: Run) -> None:
        model = linear()
        given: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(given, 1) if made_of == "before" else None
        _, optimizer, loader = run.prepare(model, given, DATA)
        scheduler = scheduler or StepLR(optimizer if made_of == "prepared" else given, 1)
        for batch in loader:
            body(run, model, optimizer, batch)
            scheduler.step()

    with pytest.raises(UserError, match=r"a scheduler that the run does not know.*run.prepare_scheduler"):
        in_runs(len(split["batch"]), on_rank, **split)


@SPLITS
def test_a_list_of_schedulers(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, DATA, [OneCycleLR(optimizer, 0.1, 5)])  # type: ignore[call-overload]

    with pytest.raises(UserError, match=r"the scheduler is a list; give one scheduler, such as a ChainedScheduler"):
        in_runs(len(split["batch"]), on_rank, **split)


@SPLITS
def test_two_iterators_at_once(split: dict[str, Any]) -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        first = iter(loader)
        for _ in range(micro_batches(run)):
            body(run, model, optimizer, next(first))
        second = iter(loader)
        for _ in range(micro_batches(run)):
            body(run, model, optimizer, next(second))
        next(first)

    refuse(split, "another loop over the loader has begun since", loop)


def test_gradients_from_before_prepare_do_not_enter_the_first_step() -> None:
    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        simple(run, *run.prepare(model, optimizer, DATA, shuffle=False))
        return run.full_state_dict(model)

    for split in (ALONE, PAIR):
        assert_trained(in_runs(len(split["batch"]), on_rank, **split), expected(3))


def test_a_copy_of_a_prepared_model_is_an_ordinary_model() -> None:
    def loop(run: Run, model: nn.Module, optimizer: Any, loader: Any) -> None:
        other = copy.deepcopy(model)
        other(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        other.zero_grad()
        assert all(param.grad is None for param in other.parameters())

    train(ALONE, loop)
