"""A call that only some ranks make is named on all ranks, with its line, within seconds and in every stage."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import in_runs
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

SECONDS = 5.0
DATA = [(torch.full((4,), float(index)), torch.tensor([float(index)])) for index in range(12)]
Odd = Callable[["Script"], None]


class Script:
    """A user's script on one rank: a loop over the loader, and something that only rank 0 does."""

    def __init__(self, run: Run, folder: Path, *, norm: bool = False) -> None:
        layers = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)] if norm else [nn.Linear(4, 3), nn.Linear(3, 1)]
        self.run, self.folder, model = run, str(folder), nn.Sequential(*layers)
        self.model, self.optimizer, self.loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA)

        self.average = run.swa()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self, batch: Any) -> None:
        self.run.backward(self.loss(batch))
        self.optimizer.step()

    def evaluate(self) -> None:
        self.run.evaluate(self.model, DATA, lambda _, batch: {"loss": float(self.loss(batch))})

    def train(self, odd: Odd) -> None:
        """Call `odd` on rank 0 after the second step."""
        for _ in self.run.epochs(2):
            for number, batch in enumerate(self.loader):
                self.step(batch)
                if number == 1 and self.run.rank == 0:
                    odd(self)


def errors_of(on_rank: Callable[[Run], None], stage: int, ranks: int = 2, **settings: Any) -> tuple[list[str], float]:
    """Return what each rank raised, and how long the slowest took after the first of them called something odd."""
    raised: dict[int, BaseException] = {}

    def guarded(run: Run) -> float:
        began_s = time.monotonic()
        try:
            on_rank(run)
        except UserError as error:
            raised[run.rank] = error
        return time.monotonic() - began_s

    given = {"batch": [2] * ranks, "stage": stage, **settings}
    seconds = in_runs(ranks, guarded, timeout_s=30.0, **given)
    return [f"{type(raised[rank]).__name__}: {raised[rank]}" for rank in sorted(raised)], max(seconds)


def line_of(text: str) -> str:
    """Return where this file has a line."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}, line {1 + next(n for n, line in enumerate(lines) if text in line)}"


def run_model(script: Script) -> None:
    with torch.no_grad():
        script.model(DATA[0][0])


def call_evaluate(script: Script) -> None:
    script.evaluate()


def call_full_state_dict(script: Script) -> None:
    script.run.full_state_dict(script.model)


def call_load(script: Script) -> None:
    script.run.load(script.folder)


def call_save(script: Script) -> None:
    script.run.save(script.folder, wait=True)


def call_ema(script: Script) -> None:
    script.run.ema()


def call_swa(script: Script) -> None:
    script.run.swa()


def apply_average(script: Script) -> None:
    with script.average.applied():
        pass


def update_average(script: Script) -> None:
    script.average.update()


def gather_average(script: Script) -> None:
    script.average.full_state_dict()


def prepare_scheduler(script: Script) -> None:
    script.run.prepare_scheduler(torch.optim.lr_scheduler.StepLR(script.optimizer, 1))


ODD: dict[Odd, tuple[str, str, str]] = {
    call_ema: ("called run.ema", "script.run.ema", "call run.ema on all ranks"),
    call_swa: ("called run.swa", "script.run.swa", "call run.swa on all ranks"),
    apply_average: ("called swa.applied", "script.average.applied", "call swa.applied on all ranks"),
    update_average: ("called swa.update", "script.average.update", "call swa.update on all ranks"),
    gather_average: ("called swa.full_state_dict", "script.average.full", "call swa.full_state_dict on all ranks"),
    prepare_scheduler: (
        "called run.prepare_scheduler",
        "script.run.prepare_scheduler",
        "call run.prepare_scheduler on all ranks",
    ),
    call_evaluate: ("called run.evaluate", "script.evaluate", "call run.evaluate on all ranks"),
    call_load: ("called run.load", "script.run.load", "call run.load on all ranks"),
    call_save: ("called run.save at step 2", "script.run.save", "call run.save on all ranks"),
}
ODD_IN_STAGE_3: dict[Odd, tuple[str, str, str]] = {
    call_full_state_dict: (
        "called run.full_state_dict",
        "script.run.full_state",
        "call run.full_state_dict on all ranks",
    ),
    run_model: (
        "ran the model outside a batch",
        "script.model(DATA[0",
        "in stage 3 all ranks run the model together: run it on all ranks",
    ),
}


STAGES = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]


@pytest.mark.parametrize(
    ("stage", "odd"),
    [
        pytest.param(stage, odd, marks=[pytest.mark.long] if stage in (1, 2) else [])
        for stage in range(4)
        for odd in (ODD | ODD_IN_STAGE_3 if stage == 3 else ODD)
    ],
)
def test_call_on_rank_0_alone_is_named_on_every_rank(stage: int, odd: Odd, tmp_path: Path) -> None:
    errors, seconds = errors_of(lambda run: Script(run, tmp_path).train(odd), stage)
    call, text, fix = (ODD | ODD_IN_STAGE_3)[odd]
    assert len(errors) == 2
    assert errors[0] == errors[1]
    place = f"{Path(__file__).name}, line"
    start, _, rest = errors[0].partition(" where rank 1 ")
    if odd is call_evaluate:
        text = "self.run.evaluate("
    assert start == f"DifferentCalls: rank 0 {call} ({line_of(text)})"
    assert rest.endswith(f"; {fix}")
    assert place in rest
    assert any(name in rest for name in ("called run.backward", "called optimizer.step", "ran the model (")), rest
    assert seconds < SECONDS


def call_nothing(script: Script) -> None:
    del script


@pytest.mark.parametrize("stage", STAGES)
def test_loop_that_only_one_rank_leaves_early_is_named_on_every_rank(stage: int, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path)
        for _ in run.epochs(2):
            for number, batch in enumerate(script.loader):
                script.step(batch)
                if number == 1 and run.rank == 0:
                    break

    errors, seconds = errors_of(on_rank, stage)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    if stage < 3:
        # In stage 3 both run the model next, in the same global batch; what differs shows at the end of the epoch.
        assert errors[0].startswith(
            f"DifferentCalls: rank 0 left the loop over the loader ({Path(__file__).name}, line "
        )
        assert " where rank 1 called " in errors[0]
        assert errors[0].endswith("; leave the loop on all ranks after the same batch")
    assert seconds < SECONDS


@pytest.mark.parametrize("stage", STAGES)
def test_rank_that_has_ended_is_named_with_the_call_that_waits_for_it(stage: int, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path)
        script.train(call_nothing)
        if run.rank == 0:
            script.evaluate()

    errors, seconds = errors_of(on_rank, stage)
    assert errors == [
        f"DifferentCalls: rank 1 has ended, and rank 0 waits for it in run.evaluate ({line_of('self.run.evaluate(')}); "
        "call run.evaluate on all ranks"
    ]
    assert seconds < SECONDS


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("odd", [call_evaluate, run_model])
def test_two_ranks_call_alike_and_the_third_one_is_named(stage: int, odd: Odd, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path)
        for _ in run.epochs(2):
            for number, batch in enumerate(script.loader):
                script.step(batch)
                if number == 0 and run.rank < 2:
                    odd(script)

    errors, seconds = errors_of(on_rank, stage, ranks=3)
    if odd is run_model and stage < 3:
        assert errors == []  # a pass over the model is no collective there
        return
    assert len(set(errors)) == 1
    assert len(errors) == 3
    assert " where rank 2 " in errors[0]
    assert seconds < SECONDS


def test_model_with_batch_norm_that_one_rank_runs_in_training_mode_is_named(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path, norm=True)
        for batch in script.loader:
            script.step(batch)
        if run.rank == 0:
            script.model(torch.stack([DATA[0][0], DATA[1][0]]))
        script.evaluate()

    errors, seconds = errors_of(on_rank, 0)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert f"rank 0 ran the model ({line_of('script.model(torch.stack')})" in errors[0]
    assert f"rank 1 called run.evaluate ({line_of('self.run.evaluate(')})" in errors[0]
    assert seconds < SECONDS


def test_rank_without_data_is_named_where_another_runs_the_model_in_stage_3(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path)
        for batch in script.loader:
            script.step(batch)
            if not run.in_batch:
                run_model(script)

    errors, seconds = errors_of(on_rank, 3, ranks=3, batch=[2, 0, 2])
    assert len(set(errors)) == 1
    assert len(errors) == 3
    assert "the model outside a batch" in errors[0]
    assert "rank 1 left the loop over the loader" in errors[0] or "rank 1 continued" in errors[0]
    assert seconds < SECONDS


def test_rank_that_computes_for_long_is_waited_for(tmp_path: Path) -> None:
    def on_rank(run: Run) -> int:
        script = Script(run, tmp_path)
        for number, batch in enumerate(script.loader):
            if number == 1 and run.rank == 1:
                time.sleep(4.0)  # a long computation: longer than ranks wait before they ask what the others do
            script.step(batch)
        script.evaluate()
        return run.step

    assert in_runs(2, on_rank, stage=3, batch=[2, 2], timeout_s=30.0) == [3, 3]


@pytest.mark.parametrize("stage", [1, 3])
def test_training_after_close_on_one_rank_is_refused_within_seconds(stage: int, tmp_path: Path) -> None:
    errors, seconds = errors_of(lambda run: Script(run, tmp_path).train(lambda script: script.run.close()), stage)
    assert errors[0].startswith(
        ("UserError: run.close was called, and training continues", "UserError: a collective was started after")
    )
    assert seconds < SECONDS


def test_training_after_close_is_refused_on_one_rank_as_on_many(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        script = Script(run, tmp_path)
        for batch in script.loader:
            script.step(batch)
        run.close()
        with pytest.raises(
            UserError, match=r"run\.close was called, and training continues; call it last, on all ranks"
        ):
            next(iter(script.loader))

    in_runs(1, on_rank, batch=[4])
    in_runs(2, on_rank, batch=[2, 2], stage=2)


def test_scheduler_that_only_one_rank_gives_prepare_is_refused(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if run.rank == 0 else []
        run.prepare(model, optimizer, DATA, *schedulers)

    errors, seconds = errors_of(on_rank, 0)
    sentence = "UserError: rank 0 prepared a StepLR and rank 1 no scheduler; prepare the same scheduler on all ranks"
    assert errors == [sentence, sentence]
    assert seconds < SECONDS
