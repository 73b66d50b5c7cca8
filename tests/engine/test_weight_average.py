"""EMA and SWA: any split, in every stage, gives what torch's AveragedModel gives in a plain loop."""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, STAGES, THREE, UNIT_BYTES, assert_same
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)

DECAY, EPOCHS, SIZE = 0.9, 3, 5
DATA = vectors(20)
"""4 global batches in an epoch."""
State = dict[str, torch.Tensor]
TOLERANCE = 1e-10


class WithBuffer(nn.Module):
    """A perceptron that also has a buffer, which changes in every global batch."""

    mark: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.perceptron = Perceptron()
        self.register_buffer("mark", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.perceptron(x)
        return y


def build() -> WithBuffer:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return WithBuffer().double()


INITIAL = build().state_dict()


def metric_fn(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": cross_entropy(model, batch)}


@lru_cache
def plain() -> tuple[State, State, State, float]:
    """Return the weights, the EMA and the SWA of a plain loop, and the loss of the EMA."""
    model = build()
    optimizer = adamw(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    sums: State = {}
    for _ in range(EPOCHS):
        for start in range(0, len(DATA), SIZE):
            optimizer.zero_grad()
            cross_entropy(model, default_collate(DATA[start : start + SIZE])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.mark += 1
            ema.update_parameters(model)
        sums = {name: sums.get(name, 0) + value.clone() for name, value in model.state_dict().items()}
    swa = {name: value / EPOCHS for name, value in sums.items()} | {"mark": model.state_dict()["mark"]}
    with torch.no_grad():
        loss = float(cross_entropy(ema.module, default_collate(DATA)))
    return model.state_dict(), ema.module.state_dict(), swa, loss


class AveragedRun:
    """A run with averages, as a script would have it."""

    def __init__(self, run: Run, *, load_from: Path | None = None, makes_averages_first: bool = True) -> None:
        self.run, self.model = run, build()
        self.model.load_state_dict(INITIAL)
        _, self.optimizer, self.loader = run.prepare(
            self.model, adamw(self.model), DATA, loss=cross_entropy, shuffle=False
        )
        if load_from and not makes_averages_first:
            assert run.load(load_from)
        self.ema, self.swa = run.ema(DECAY), run.swa()
        if load_from and makes_averages_first:
            assert run.load(load_from)

    def train(self, each_step: Callable[[], None] = lambda: None) -> None:
        for _ in self.run.epochs(EPOCHS):
            for batch in self.loader:
                self.run.backward(cross_entropy(self.model, batch))
                self.optimizer.step()
                if not self.run.in_batch:
                    each_step()
            self.model.mark.fill_(self.run.step)
            self.swa.update()

    def check(self) -> None:
        weights, ema, swa, loss = plain()
        assert_same(self.run.full_state_dict(), weights, TOLERANCE)
        assert_same(self.ema.full_state_dict(), ema, TOLERANCE)
        assert_same(self.swa.full_state_dict(), swa, TOLERANCE)
        with self.ema.applied():
            result = self.run.evaluate(self.model, DATA, metric_fn)
            assert result["loss"] == pytest.approx(loss, abs=TOLERANCE)
            assert_same(self.run.full_state_dict(), ema, TOLERANCE)
            assert_same(self.ema.full_state_dict(), ema, TOLERANCE)
        assert_same(self.run.full_state_dict(), weights, TOLERANCE)
        assert (self.ema.updates, self.swa.updates) == (4 * EPOCHS, EPOCHS)


def settings(split: dict[str, Any], stage: int) -> dict[str, Any]:
    return {"unit_bytes": UNIT_BYTES, "stage": stage, **split}


def on_ranks(split: dict[str, Any], stage: int, on_rank: Callable[[Run], Any]) -> list[Any]:
    return in_runs(len(split["batch"]), on_rank, **settings(split, stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("split", [ALONE, PAIR, THREE], ids=["alone", "pair", "three"])
def test_averages_are_those_of_a_plain_loop(split: dict[str, Any], stage: int) -> None:
    def on_rank(run: Run) -> None:
        averaged = AveragedRun(run)
        averaged.train()
        averaged.check()

    on_ranks(split, stage, on_rank)


@pytest.mark.parametrize("makes_averages_first", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [((ALONE, 0), (THREE, 3)), ((THREE, 3), (PAIR, 1)), ((PAIR, 2), (THREE, 0)), ((THREE, 0), (ALONE, 0))],
)
def test_averages_resume_on_other_ranks_and_stages(
    before: tuple[dict[str, Any], int],
    after: tuple[dict[str, Any], int],
    makes_averages_first: bool,
    tmp_path: Path,
) -> None:
    def save(run: Run) -> None:
        averaged = AveragedRun(run)
        averaged.train(lambda: run.save(tmp_path) if run.step == 6 else None)
        run.close()

    def resume(run: Run) -> None:
        averaged = AveragedRun(run, load_from=tmp_path, makes_averages_first=makes_averages_first)
        assert (averaged.ema.updates, averaged.swa.updates) == (6, 1)
        averaged.train()
        averaged.check()

    on_ranks(*before, save)
    on_ranks(*after, resume)


@pytest.mark.parametrize("stage", STAGES)
def test_an_average_that_a_checkpoint_does_not_have_begins_with_the_loaded_weights(stage: int, tmp_path: Path) -> None:
    def save(run: Run) -> None:
        model = build()
        run.prepare(model, adamw(model), DATA)
        run.save(tmp_path, wait=True)

    def resume(run: Run) -> None:
        model = build()
        nn.init.zeros_(model.perceptron.first.weight)
        run.prepare(model, adamw(model), DATA)
        ema = run.ema()
        assert run.load(tmp_path)
        assert ema.updates == 0
        assert_same(ema.full_state_dict(), INITIAL, 0.0)

    on_ranks(ALONE, 0, save)
    on_ranks(PAIR, stage, resume)


def test_an_ema_that_the_resumed_script_does_not_make_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(run: Run) -> None:
        AveragedRun(run)
        run.save(tmp_path, wait=True)

    on_ranks(ALONE, 0, save)

    def resume(run: Run) -> None:
        model = build()
        _, optimizer, loader = run.prepare(model, adamw(model), DATA)
        assert run.load(tmp_path)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        assert run.swa().updates == 0
        run.save(tmp_path / "next", wait=True)

    with caplog.at_level(logging.WARNING):
        on_ranks(PAIR, 1, resume)
    assert sum("the checkpoint has an EMA that the script has not made" in line for line in caplog.messages) == 1


def test_a_skipped_step_does_not_update_an_ema() -> None:
    def on_rank(run: Run) -> None:
        averaged = AveragedRun(run)
        for batch in averaged.loader:
            loss = cross_entropy(averaged.model, batch)
            run.backward(loss * float("inf") if run.step == 1 else loss)
            averaged.optimizer.step()
        assert run.step == 4
        assert averaged.ema.updates == 3
        assert all(bool(value.isfinite().all()) for value in averaged.ema.full_state_dict().values())

    in_runs(2, on_rank, **PAIR, stage=0, max_grad_norm=1.0)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_error_while_averages_are_applied_puts_the_weights_back(stage: int) -> None:
    def on_rank(run: Run) -> None:
        averaged = AveragedRun(run)
        averaged.train()
        with pytest.raises(ValueError, match="mine"), averaged.ema.applied():
            raise ValueError("mine")
        averaged.check()

    on_ranks(PAIR, stage, on_rank)


def test_calls_at_the_wrong_moment_are_refused(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        with pytest.raises(UserError, match=r"call run\.prepare"):
            run.ema()
        averaged = AveragedRun(run)
        for decay in (-0.1, 1.5):
            with pytest.raises(UserError, match="; give a number from 0 to 1"):
                run.ema(decay)
        collective: dict[str, Callable[[], Any]] = {
            "run.ema": run.ema,
            "run.swa": run.swa,
            "swa.update": averaged.swa.update,
            "ema.applied": averaged.ema.full_state_dict,
        }
        for batch in averaged.loader:
            for name, call in collective.items():
                with pytest.raises(UserError, match=f"{name} was called inside a global batch; call it when"):
                    call()
            run.backward(cross_entropy(averaged.model, batch))
            averaged.optimizer.step()
        with averaged.ema.applied():
            calls: list[Callable[[], Any]] = [
                partial(run.save, tmp_path),
                partial(run.load, tmp_path),
                partial(next, iter(averaged.loader)),
                averaged.swa.update,
                averaged.swa.full_state_dict,
                run.ema,
            ]
            for call in calls:
                with pytest.raises(UserError, match=r"inside ema\.applied\(\); leave that `with` block first"):
                    call()

    in_runs(1, on_rank, batch=[5])


@pytest.mark.parametrize("call", ["swa.update", "ema.applied", "run.ema"])
def test_collective_calls_in_a_batch_without_data_on_a_rank_are_refused(call: str) -> None:
    def on_rank(run: Run) -> None:
        averaged = AveragedRun(run)
        calls: dict[str, Callable[[], Any]] = {
            "swa.update": averaged.swa.update,
            "ema.applied": averaged.ema.full_state_dict,
            "run.ema": run.ema,
        }
        with pytest.raises(UserError, match=f"rank 1 has no data in this batch and does not come to {call}; call it"):
            averaged.train(calls[call])

    on_ranks(THREE, 2, on_rank)


def test_averages_that_differ_between_ranks_are_refused() -> None:
    def on_rank(run: Run) -> None:
        averaged = AveragedRun(run)
        with pytest.raises(UserError, match=r"decay is 0\.0 on rank 0 and 0\.5 on rank 1; give all ranks the same"):
            run.ema(run.rank / 2)
        call = averaged.swa.update if run.rank == 0 else averaged.swa.full_state_dict
        with pytest.raises(UserError, match=r"rank 0 called swa.update .* where rank 1 called swa.full_state_dict"):
            call()

    on_ranks(PAIR, 1, on_rank)
