"""Weights that a script reads or changes where they are not those of a complete step, or not there at all."""

import copy
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import cross_entropy, vectors
from support.runs import in_runs
from support.two_runs import in_two_runs
from torch import nn

from mimatrix.core.errors import DifferentCalls, UserError
from mimatrix.engine.run import Run

ALONE: dict[str, Any] = {"batch": [4], "micro_batch": 2}
PAIR: dict[str, Any] = {"batch": [2, 2], "micro_batch": 1}
AT_ONCE: dict[str, Any] = {"batch": [3, 1]}
SPLITS = pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
DATA = vectors(12)
Act = Callable[[nn.Linear], Any]


def build() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6))
        model.bias.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(split: dict[str, Any], after: Callable[[Run, nn.Linear], Any], stage: int = 0) -> list[Any]:
    """Train an epoch, with `after` at the end of the loop's body; return the weights of each rank."""

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA, shuffle=False)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            after(run, model)
        return run.full_state_dict(model)

    return in_runs(len(split["batch"]), on_rank, **{"stage": stage, **split})


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.9)


def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.5, 0.5)


@torch.no_grad()
def average(model: nn.Linear) -> None:
    torch.zeros(3, 6, dtype=torch.float64).lerp_(model.weight, 0.1)


@SPLITS
@pytest.mark.parametrize("act", [decay, clamp, average])
def test_weights_are_not_read_or_changed_inside_a_global_batch(split: dict[str, Any], act: Act) -> None:
    with pytest.raises(UserError, match=r"weight was read or changed inside a global batch.* `not run\.in_batch`"):
        train(split, lambda _, model: act(model))


@SPLITS
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("act", [decay, clamp])
def test_weights_changed_after_the_step_are_those_of_a_plain_loop(split: dict[str, Any], stage: int, act: Act) -> None:
    model, optimizer = build()
    for start in range(0, 12, 4):
        batch = torch.stack([x for x, _ in DATA[start : start + 4]]), torch.tensor([y for _, y in DATA[start:][:4]])
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        act(model)
    for state in train(split, lambda run, model: None if run.in_batch else act(model), stage):
        torch.testing.assert_close(state["weight"], model.weight.detach(), rtol=1e-10, atol=1e-10)


@SPLITS
def test_the_model_may_run_and_be_asked_for_its_form_inside_a_global_batch(split: dict[str, Any]) -> None:
    def look(run: Run, model: nn.Linear) -> None:
        with torch.no_grad():
            model(DATA[0][0])
        assert sum(param.numel() for param in model.parameters()) == 21
        assert model.weight.shape == (3, 6)
        assert model.weight.dtype == torch.float64
        assert "weight" in repr(model.weight) or not run.in_batch
        assert type(copy.deepcopy(model).weight) is nn.Parameter

    assert len(train(split, look)) == len(split["batch"])


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.weight.sum(),
        lambda model: model.weight.data,
        lambda model: torch.cat([model.weight, model.weight]),
        clamp,
        average,
    ],
)
def test_weights_that_stage_3_has_sharded_are_not_read(act: Act) -> None:
    sentence = r"weight was read or changed outside the model, and stage 3 has sharded it.* run\.full_state_dict"
    with pytest.raises(UserError, match=sentence):
        train(PAIR, lambda run, model: None if run.in_batch else act(model), stage=3)


def test_weights_that_stage_3_has_sharded_have_a_form() -> None:
    def look(_: Run, model: nn.Linear) -> None:
        assert model.weight.shape == (3, 6)
        assert model.weight.requires_grad
        assert repr(model.weight) == "ShardedParam(weight, [3, 6])"
        assert len({*model.parameters()}) == 2

    train(PAIR, look, stage=3)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("split", [{"batch": [4]}, AT_ONCE], ids=["alone", "pair"])
def test_a_second_optimizer_over_other_parameters_is_refused(split: dict[str, Any], stage: int) -> None:
    def on_rank(run: Run) -> None:
        model, _ = build()
        first, second = (torch.optim.SGD([param], lr=0.1) for param in model.parameters())
        _, optimizer, loader = run.prepare(model, first, DATA)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            second.step()

    with pytest.raises(UserError, match="give all parameters to one optimizer, as param groups"):
        in_runs(len(split["batch"]), on_rank, stage=stage, **split)


@pytest.mark.parametrize("split", [{"batch": [4]}, AT_ONCE], ids=["alone", "pair"])
def test_gradients_after_the_step_are_hidden_until_the_loop_is_left(split: dict[str, Any]) -> None:
    def norm(_: Run, model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.norm()

    with pytest.raises(UserError, match=r"`\.grad` has none for the script; read run\.grad_norm"):
        train(split, norm)

    def on_rank(run: Run) -> None:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        assert model.weight.grad is None
        model.float()

    in_runs(len(split["batch"]), on_rank, **split)


@SPLITS
def test_zero_grad_that_fills_with_zeros_is_fine_after_the_step_only(split: dict[str, Any]) -> None:
    def run_with(when: str) -> list[Any]:
        def on_rank(run: Run) -> Any:
            model, optimizer = build()
            _, optimizer, loader = run.prepare(model, optimizer, DATA, shuffle=False)
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                if when == "before":
                    model.zero_grad(set_to_none=False)
                optimizer.step()
                model.zero_grad(set_to_none=False)
            return run.full_state_dict(model)

        return in_runs(len(split["batch"]), on_rank, **split)

    for state, expected in zip(run_with("after"), train(split, lambda *_: None), strict=True):
        torch.testing.assert_close(state["weight"], expected["weight"], rtol=0, atol=0)
    with pytest.raises(UserError, match=r"gradients were set or dropped between run.backward and optimizer.step"):
        run_with("before")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_dict_has_memory_of_its_own(stage: int) -> None:
    def save(run: Run, model: nn.Linear) -> None:
        if run.in_batch:
            return
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert buffer.tell() < 10_000
        assert model.state_dict()["weight"].untyped_storage().nbytes() == 18 * 8
        copy.deepcopy(model.state_dict())

    train(PAIR, save, stage)


@SPLITS
def test_a_step_that_is_made_twice_is_refused(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> None:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if not run.in_batch:
                optimizer.step()

    with pytest.raises(UserError, match=r"optimizer.step was called twice for one micro-batch"):
        in_runs(len(split["batch"]), on_rank, **split)


@SPLITS
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_warned_of_once(split: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(run: Run) -> None:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        for epoch in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                optimizer.step()
            if run.rank == 0 and epoch == 0:
                assert "gradient hook" not in caplog.text, "the engine's own hooks are not meant"
            getattr(model.weight, kind)(lambda _: None)

    with caplog.at_level(logging.WARNING):
        in_runs(len(split["batch"]), on_rank, **split)
    assert caplog.text.count("weight has a gradient hook") == 1


def test_models_that_train_each_other_have_one_micro_batch() -> None:
    def on_rank(discriminating: Run, generating: Run) -> None:
        discriminator, generator = nn.Linear(3, 1).double(), nn.Linear(6, 3).double()
        _, step_d, loader_d = discriminating.prepare(discriminator, torch.optim.SGD(discriminator.parameters()), DATA)
        _, step_g, loader_g = generating.prepare(generator, torch.optim.SGD(generator.parameters()), DATA)
        for (noise, _), _ in zip(loader_d, loader_g, strict=True):
            discriminating.backward(discriminator(generator(noise).detach()).mean())
            step_d.step()
            discriminator.requires_grad_(False)
            generating.backward(discriminator(generator(noise)).mean())
            discriminator.requires_grad_(True)
            step_g.step()

    with pytest.raises(UserError, match=r"is used by another model inside a global batch.* one micro-batch"):
        in_two_runs(1, on_rank, **ALONE)
    in_two_runs(1, on_rank, batch=[4])


# Loops and epochs


@SPLITS
def test_a_loop_that_takes_the_length_for_its_micro_batches_is_warned_of(
    split: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def on_rank(run: Run) -> None:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, vectors(16))
        for _ in range(3):
            iterator = iter(loader)
            for _ in range(len(loader)):
                run.backward(cross_entropy(model, next(iterator)))
                optimizer.step()

    with caplog.at_level(logging.WARNING):
        in_runs(len(split["batch"]), on_rank, **split)
    assert caplog.text.count("the last loop drew len(loader) = 4 micro-batches") == len(split["batch"])


@SPLITS
def test_an_epoch_that_was_left_early_is_over_in_a_resumed_run_too(split: dict[str, Any], tmp_path: Path) -> None:
    def on_rank(run: Run, epochs: int, folder: Path, *, load: bool = False) -> Any:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        assert run.load(folder) == load
        seen = []
        for epoch in run.epochs(4):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                optimizer.step()
                if not run.in_batch and run.step % 2 == 0:
                    break
            seen.append(epoch)
            run.save(folder, wait=True)
            if epoch + 1 == epochs:
                break
        return seen, run.full_state_dict(model)

    ranks = len(split["batch"])
    whole = in_runs(ranks, lambda run: on_rank(run, 4, tmp_path / "whole"), **split)
    in_runs(ranks, lambda run: on_rank(run, 2, tmp_path / "half"), **split)
    rest = in_runs(ranks, lambda run: on_rank(run, 4, tmp_path / "half", load=True), **split)
    for (_, expected), (seen, state) in zip(whole, rest, strict=True):
        assert seen == [2, 3]
        torch.testing.assert_close(state["weight"], expected["weight"], rtol=0, atol=0)


@SPLITS
def test_looking_at_a_batch_with_an_iterator_that_is_kept(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> int:
        model, optimizer = build()
        _, optimizer, loader = run.prepare(model, optimizer, DATA)
        iterator = iter(loader)
        next(iterator)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        return run.step

    assert in_runs(len(split["batch"]), on_rank, **split) == [3] * len(split["batch"])


def test_a_batch_that_only_rank_0_looks_at_is_named_with_both_lines() -> None:
    def on_rank(run: Run) -> None:
        model, optimizer = build()
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)
        _, optimizer, loader = run.prepare(model, optimizer, DATA, sampler=sampler)
        if run.rank == 0:
            next(iter(loader))
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()

    with pytest.raises(DifferentCalls, match=r"rank 0 continued the loop over the loader \(.*\) where rank 1 called"):
        in_runs(2, on_rank, **AT_ONCE)
