"""A checkpoint is complete or absent, and loads with any ranks, shares and stage, bit for bit."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import (
    Perceptron,
    Residual,
    Transformer,
    adamw,
    cross_entropy,
    images,
    momentum,
    sentences,
    token_cross_entropy,
    vectors,
)
from support.runs import in_runs
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(90)

SAMPLES, SAVED_AT, EPOCHS = 44, 8, 3
"""6 global batches of 8 in an epoch, the last one smaller; saved in the middle of the second; 10 more steps follow."""
STEPS = 18
UNEVEN = {"batch": [4, 1, 0, 3], "micro_batch": [2, 1, 1, 3], "shares": [0.4, 0.35, 0.25, 0.0], "stage": 3}
ELSEWHERE: list[tuple[int, dict[str, Any]]] = [
    (1, {"global_batch": 8, "stage": 0}),
    (2, {"batch": [3, 5], "micro_batch": [1, 5], "shares": [0.2, 0.8], "stage": 1}),
    (3, {"batch": [0, 5, 3], "micro_batch": [1, 2, 3], "shares": [0.6, 0.0, 0.4], "stage": 2}),
]
TASKS: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Any], list[Any], Any]] = {
    "perceptron": (Perceptron, adamw, vectors(SAMPLES), cross_entropy),
    "tokens": (Transformer, adamw, sentences(SAMPLES), token_cross_entropy),
    "momentum": (Perceptron, momentum, vectors(SAMPLES), cross_entropy),
}
Task = tuple[type[nn.Module], Callable[[nn.Module], Any], list[Any], Any]
OnRank = Callable[[Run], Any]


class PreparedTask:
    """A run with a model of its own, as a script would have it."""

    def __init__(self, run: Run, task: Task) -> None:
        kind, make, data, self.loss = task
        self.run = run
        # Ranks start apart on purpose: what is loaded must come from the checkpoint.
        torch.manual_seed(run.rank + 10 * run.world_size)
        self.model = kind().double()
        optimizer = make(self.model)
        slower = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9, 12], 0.5)
        prepared = run.prepare(self.model, optimizer, data, slower, loss=self.loss)
        _, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, each_step: Callable[[], None] = lambda: None, epochs: int = EPOCHS) -> list[float]:
        for _ in self.run.epochs(epochs):
            for batch in self.loader:
                loss = self.loss(self.model, batch)
                self.run.backward(loss, weight=float((batch != 0).sum()) if self.loss is token_cross_entropy else None)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.run.log(loss=loss)
                if not self.run.in_batch:
                    each_step()
        return [means["loss"] for _, means in self.run.history]

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state: for each parameter the slice and what is kept for it."""
        loop = self.run._prepared()
        states = {}
        for parameter, leaf in loop.optimizer.shard_params.items():
            piece = loop.optimizer.find_shard(parameter)
            assert piece
            kept = {key: value.clone() for key, value in loop.optimizer.optimizer.state.get(leaf, {}).items()}
            states[piece.param.names[0]] = (piece.start, piece.stop, kept)
        return states


def settings(more: dict[str, Any]) -> dict[str, Any]:
    return {"unit_bytes": 300, "seed": 5, **more}


def tensors_of(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """As torch's own tool reads them; random states apart, which are the ranks'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has something to say about reading without ranks
        dcp_to_torch_save(checkpoint, folder / "plain.pt")
    tensors: dict[str, torch.Tensor] = torch.load(folder / "plain.pt")
    return {key: value for key, value in tensors.items() if not key.startswith("random.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype
        assert torch.equal(value, other[key]), key


def uninterrupted(folder: Path, task: Task) -> tuple[list[float], list[Any]]:
    """Stage 3 on 4 uneven ranks, one of them without data: its losses, and what each rank had when it saved."""

    def on_rank(run: Run) -> Any:
        prepared, kept = PreparedTask(run, task), {}

        def save() -> None:
            if run.step == SAVED_AT:
                run.save(folder)
                kept.update(prepared.state())

        losses = prepared.train(save)
        run.close()
        assert run.step == STEPS
        return losses, kept

    results = in_runs(4, on_rank, **settings(UNEVEN))
    return results[0][0], [kept for _, kept in results]


@pytest.mark.parametrize("name", TASKS)
def test_a_run_resumes_with_other_ranks_shares_and_stage(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    losses, kept = uninterrupted(tmp_path / "from", task)
    (saved,) = storage.list_checkpoints(tmp_path / "from")
    assert saved.name == f"step-{SAVED_AT:08d}"
    original = tensors_of(saved, tmp_path)
    for state in kept:
        for parameter, (start, stop, values) in state.items():
            for key, value in values.items():
                if value.dim():
                    assert torch.equal(original[f"optimizer.{parameter}.{key}"][start:stop], value), (parameter, key)

    def on_rank(run: Run) -> Any:
        prepared = PreparedTask(run, task)
        assert run.load(tmp_path / "from")
        assert (run.step, run.position.epoch, run.position.batch) == (SAVED_AT, 1, 2)
        run.save(tmp_path / f"to-{run.world_size}", wait=True)
        weights = run.full_state_dict(prepared.model)
        losses = prepared.train()
        run.close()
        return losses, weights

    for ranks, more in ELSEWHERE:
        results = in_runs(ranks, on_rank, **settings(more))
        (again,) = storage.list_checkpoints(tmp_path / f"to-{ranks}")
        same(tensors_of(again, tmp_path), original)
        metadata, before = storage.read_metadata(again), storage.read_metadata(saved)
        for what in ("state", "groups", "schedulers", "parameters", "buffers", "step", "position", "loss_scale"):
            assert metadata[what] == before[what], what
        for later, weights in results:
            assert later == pytest.approx(losses[SAVED_AT:], abs=1e-10)
            for parameter, value in weights.items():
                stored = original.get(f"model.{parameter}")
                assert stored is None or torch.equal(value.reshape(-1), stored), parameter
            assert torch.equal(weights["output.weight"], weights["words.weight"]) if name == "tokens" else True


def test_buffers_and_rng_states_are_saved(tmp_path: Path) -> None:
    task: Task = (Residual, momentum, images(SAMPLES), cross_entropy)

    def first(run: Run) -> list[float]:
        prepared = PreparedTask(run, task)
        losses = prepared.train(lambda: run.save(tmp_path) if run.step == SAVED_AT else None)
        run.close()
        return losses

    def then(run: Run) -> list[float]:
        prepared = PreparedTask(run, task)
        assert run.load(tmp_path)
        losses = prepared.train()
        run.close()
        return losses

    # Batch norm is over the union of a micro-step: whole batches are the same however they are split.
    losses = in_runs(2, first, **settings({"batch": [0, 8], "stage": 3, "shares": [0.3, 0.7]}))[0]
    elsewhere: list[tuple[int, dict[str, Any]]] = [(1, {"global_batch": 8}), (3, {"batch": [3, 3, 2], "stage": 1})]
    for ranks, more in elsewhere:
        for later in in_runs(ranks, then, **settings(more)):
            assert later == pytest.approx(losses[SAVED_AT:], abs=1e-10)

    def drawn(run: Run) -> list[float]:
        PreparedTask(run, TASKS["perceptron"])
        torch.manual_seed(run.rank)
        run.save(tmp_path / "chance", wait=True)
        expected = torch.rand(3).tolist()
        torch.manual_seed(99)
        assert run.load(tmp_path / "chance")
        assert torch.rand(3).tolist() == expected
        return expected

    in_runs(1, drawn, **settings({"global_batch": 8}))


def alone(on_rank: OnRank, **more: Any) -> Any:
    return in_runs(1, on_rank, **settings({"global_batch": 8, **more}))[0]


def saving(folder: Path, keep: int = 3, task: str = "perceptron") -> OnRank:
    """One epoch, saved after every step."""

    def on_rank(run: Run) -> PreparedTask:
        prepared = PreparedTask(run, TASKS[task])
        prepared.train(lambda: run.save(folder, keep=keep), epochs=1)
        run.close()
        return prepared

    return on_rank


def loading(folder: Path, task: str = "perceptron") -> Callable[[Run], int]:
    def on_rank(run: Run) -> int:
        PreparedTask(run, TASKS[task])
        return run.step if run.load(folder) else -1

    return on_rank


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_save_keeps_the_last_checkpoints_and_removes_leftovers(tmp_path: Path) -> None:
    for left in (".unfinished-00000001-abc", ".gone-step-00000001-abc"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "__0_0.distcp").write_text("half")
    in_runs(2, saving(tmp_path, keep=2), **settings({"batch": [3, 5]}))
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


def test_load_without_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        before = {name: value.clone() for name, value in prepared.model.state_dict().items()}
        assert not run.load(tmp_path / "nowhere")
        assert not run.load(tmp_path)
        same(before, prepared.model.state_dict())
        assert run.step == 0

    alone(on_rank)


def test_save_and_load_at_the_wrong_moment_are_refused(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        for what in (run.save, run.load):
            with pytest.raises(UserError, match=r"call run\.prepare"):
                what(tmp_path)
        prepared = PreparedTask(run, TASKS["perceptron"])
        with pytest.raises(UserError, match="keep is 0; give the number"):
            run.save(tmp_path, keep=0)
        for _ in prepared.loader:
            with pytest.raises(UserError, match=r"run\.save was called inside a global batch; call it when"):
                run.save(tmp_path)
            with pytest.raises(UserError, match=r"run\.load was called inside a global batch"):
                run.load(tmp_path)
            break

    alone(on_rank)
    assert names(tmp_path) == []


def corrupt_bytes(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"!")


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "has another checksum": lambda path: corrupt_bytes(path / "__0_0.distcp"),
    "has 10 bytes of": lambda path: (path / "__1_0.distcp").write_bytes(b"0123456789"),
    "__1_0.distcp cannot be read (No such file or directory)": lambda path: (path / "__1_0.distcp").unlink(),
    "run.json cannot be read (JSONDecodeError)": lambda path: (path / "run.json").write_text("{"),
    "run.json cannot be read (No such": lambda path: (path / "run.json").unlink(),
    "it has format 99": lambda path: (path / "run.json").write_text('{"format": 99, "files": {}}'),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_load_skips_a_corrupt_checkpoint(message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_runs(2, saving(tmp_path), **settings({"batch": [3, 5], "stage": 1}))
    CORRUPTIONS[message](tmp_path / "step-00000006")
    assert set(in_runs(2, loading(tmp_path), **settings({"batch": [4, 4]}))) == {5}
    (line,) = caplog.messages
    assert message in line
    assert line.startswith("rank ")
    assert line.endswith(f"using the next older checkpoint, {tmp_path / 'step-00000005'}")
    assert alone(loading(tmp_path / "step-00000004")) == 4


def test_load_refuses_a_folder_of_corrupt_checkpoints(tmp_path: Path) -> None:
    alone(saving(tmp_path, keep=1))
    corrupt_bytes(tmp_path / "step-00000006" / "__0_0.distcp")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read: .* has another checksum; give another"):
        alone(loading(tmp_path))


def test_load_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    alone(saving(tmp_path))

    class Wider(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 11, bias=False)
            self.last = nn.Linear(7, 4)

    def on_rank(run: Run, task: Task, sentence: str) -> None:
        PreparedTask(run, task)
        with pytest.raises(UserError, match=sentence):
            run.load(tmp_path)

    narrow = (Wider, adamw, vectors(SAMPLES), cross_entropy)
    alone(lambda run: on_rank(run, narrow, r"last.weight has the shape \[4, 7\] here and \[3, 7\] in the checkpoint"))
    tokens = TASKS["tokens"]
    alone(
        lambda run: on_rank(run, tokens, r"the model has a parameter words.weight, and the checkpoint has none; load")
    )
    other = TASKS["momentum"]
    alone(lambda run: on_rank(run, other, "the checkpoint is of AdamW, not SGD"))


def test_load_refuses_other_param_groups(tmp_path: Path) -> None:
    def swapped(model: nn.Module) -> torch.optim.Optimizer:
        groups = adamw(model).param_groups
        return torch.optim.AdamW([{"params": groups[1]["params"]}, {"params": groups[0]["params"]}])

    def on_rank(run: Run) -> None:
        PreparedTask(run, (Perceptron, swapped, vectors(SAMPLES), cross_entropy))
        with pytest.raises((UserError, WorldError), match=r"is in param group . here and in . in the checkpoint"):
            run.load(tmp_path)

    alone(saving(tmp_path))
    in_runs(2, on_rank, **settings({"batch": [3, 5], "stage": 1, "shares": [0.0, 1.0]}))


def test_resume_position_with_another_global_batch(tmp_path: Path) -> None:
    def on_rank(run: Run) -> tuple[int, int]:
        PreparedTask(run, TASKS["perceptron"])
        run.load(tmp_path / "step-00000004")
        return run.position.epoch, run.position.batch

    alone(saving(tmp_path))
    assert alone(on_rank, global_batch=4) == (0, 8)
    with pytest.raises(UserError, match="after 32 samples, which is not a multiple of 12; use the same"):
        alone(on_rank, global_batch=12)
    with pytest.raises(UserError, match="from the middle of an epoch with seed = 5, and with 6"):
        alone(on_rank, seed=6)


def test_failed_saves_are_raised_by_the_next_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = Path("/proc/nope")

    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        with pytest.raises(WorldError, match="rank 0 could not begin a checkpoint: FileNotFoundError"):
            prepared.train(lambda: run.save(blocked))
        assert run.step == 3
        run.save(tmp_path / "free", wait=True)

    in_runs(2, on_rank, **settings({"batch": [3, 5], "max_failed_saves": 2}))
    assert [line.split(" is not saved")[0] for line in caplog.messages] == [
        f"the checkpoint of step {step}" for step in (1, 2)
    ]
    assert [line.endswith("(this is 1)") for line in caplog.messages] == [True, False]
    assert len(storage.list_checkpoints(tmp_path / "free")) == 1


def test_save_names_a_rank_that_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write_part

    def write_or_fail(unfinished: Path, rank: int, parts: Any, metadata: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(unfinished, rank, parts, metadata)

    monkeypatch.setattr(storage, "write_part", write_or_fail)

    def on_rank(run: Run) -> None:
        PreparedTask(run, TASKS["perceptron"])
        with pytest.raises(WorldError, match=r"rank 1 could not write its part: OSError.*No space left"):
            run.save(tmp_path, wait=True)

    in_runs(3, on_rank, **settings({"batch": [3, 4, 1]}))
    assert names(tmp_path) == []


@pytest.mark.parametrize("waits", ["wait", "a second folder"])
def test_waiting_in_the_loop_for_a_rank_without_data_is_refused(waits: str, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])

        def save() -> None:
            if waits == "wait":
                run.save(tmp_path, wait=True)
            else:
                run.save(tmp_path / "one")
                run.save(tmp_path / "two")

        with pytest.raises(UserError, match=r"rank 1 has no data in this batch and does not come to .*run\.save"):
            prepared.train(save, epochs=1)

    in_runs(2, on_rank, **settings({"batch": [8, 0]}))


def test_ranks_without_data_join_a_save_before_the_loop_is_left(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        for batch in prepared.loader:
            run.backward(prepared.loss(prepared.model, batch))
            prepared.optimizer.step()
            if run.step == 2:
                run.save(tmp_path / "in")
                break
        run.save(tmp_path / "after", wait=True)
        run.close()

    in_runs(2, on_rank, **settings({"batch": [0, 8], "stage": 3}))
    for folder in ("in", "after"):
        assert names(tmp_path / folder) == ["step-00000002"]


def test_other_ranks_join_a_save_of_one_rank(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        prepared.train(lambda: run.save(tmp_path) if run.rank == 0 else None, epochs=1)
        run.close()

    in_runs(3, on_rank, **settings({"batch": [3, 4, 1], "stage": 2}))
    assert names(tmp_path) == [f"step-0000000{step}" for step in (4, 5, 6)]
    assert alone(loading(tmp_path)) == 6


def test_the_leading_rank_must_save(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        prepared.train(lambda: run.save(tmp_path) if run.rank == 1 and run.step == 2 else None, epochs=1)
        with pytest.raises(
            WorldError, match=r"rank 0 did not call run\.save at step 2, and others did; call it on all"
        ):
            run.close()

    in_runs(2, on_rank, **settings({"batch": [3, 5]}))
    assert names(tmp_path) == []


def test_a_rewound_run_resumes_its_own_checkpoints(tmp_path: Path) -> None:
    alone(saving(tmp_path))

    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        assert run.load(tmp_path / "step-00000004")
        prepared.train(lambda: run.save(tmp_path) if run.step == 5 else None, epochs=1)
        run.save(tmp_path)
        run.save(tmp_path, wait=True)
        assert run.load(tmp_path)
        assert run.step == 6

    alone(on_rank)
    assert names(tmp_path) == ["step-00000005-2", "step-00000006", "step-00000006-2"]
    assert storage.list_checkpoints(tmp_path)[0].name == "step-00000006-2"


class Scalars(nn.Module):
    """Single numbers, of which nothing shows whether what is kept for them is a counter; and pictures' own layout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.5]))
        self.paint = nn.Conv2d(2, 3, 3)
        self.paint.weight.data = self.paint.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.paint(x).mean((2, 3)) * self.scale + self.shift
        return y


def test_scalars_and_channels_last_parameters_are_saved(tmp_path: Path) -> None:
    task: Task = (Scalars, adamw, images(SAMPLES), cross_entropy)

    def first(run: Run) -> Any:
        prepared = PreparedTask(run, task)
        losses = prepared.train(lambda: run.save(tmp_path / "from") if run.step == SAVED_AT else None)
        run.close()
        return losses

    def then(run: Run) -> Any:
        prepared = PreparedTask(run, task)
        assert run.load(tmp_path / "from")
        run.save(tmp_path / f"to-{run.world_size}", wait=True)
        return prepared.train()

    for ranks, more in [(1, {"global_batch": 8}), *ELSEWHERE[1:]]:
        losses = in_runs(ranks, first, **settings(more))[0]
        original = tensors_of(storage.list_checkpoints(tmp_path / "from")[0], tmp_path)
        for other, others in ELSEWHERE:
            for later in in_runs(other, then, **settings(others)):
                assert later == pytest.approx(losses[SAVED_AT:], abs=1e-10)
            same(tensors_of(storage.list_checkpoints(tmp_path / f"to-{other}")[0], tmp_path), original)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_run_killed_while_saving_leaves_complete_checkpoints() -> None:
    soak = Path(__file__).parents[1] / "soak_saving.py"
    done = subprocess.run([sys.executable, soak, "--rounds", "3"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert report["last_step"] >= 3


def test_loaded_hyperparameters_survive_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The first loop after such a load has nothing to do."""

    def on_rank(run: Run, saves: bool) -> float:
        model = nn.Linear(6, 3).double()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = run.prepare(model, optimizer, vectors(8), shuffle=False)
        assert run.load(tmp_path) != saves
        for _ in run.epochs(1 if saves else 2):
            for inputs, targets in loader:
                run.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                if saves and run.step == 2:
                    optimizer.param_groups[0]["lr"] = 0.01
                    run.save(tmp_path)
        run.close()
        return float(optimizer.param_groups[0]["lr"])

    for saves in (True, False):
        assert in_runs(2, partial(on_rank, saves=saves), stage=1, global_batch=4) == [0.01, 0.01]
