"""Ranks without data follow loops whose body they do not run: breaks, schedulers, learning rates set by hand."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.features import PAIR, THREE, TrainingCase, assert_same
from support.models import cross_entropy, seeded_perceptron, vectors
from support.runs import in_runs
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, StepLR

from mimatrix.core.errors import PeerLost, UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.loop.hyperparam_sync import HyperparamSync
from mimatrix.engine.loop.loop_signal import LoopSignal, LoopState
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.run import Run
from mimatrix.planner.model.split import Split

in_stages = pytest.mark.parametrize("stage", range(4))
UNITS: dict[str, Any] = {"unit_bytes": 300}


@in_stages
@pytest.mark.parametrize("split", [PAIR, THREE], ids=["all have data", "one has none"])
def test_idle_ranks_leave_the_loop_with_the_others(split: dict[str, Any], stage: int) -> None:
    """Ranks without data leave with the others, and all continue with the next epoch."""

    def on_rank(run: Run) -> tuple[int, int, list[float], dict[str, torch.Tensor]]:
        model, optimizer = seeded_perceptron()
        halving = StepLR(optimizer, 1, 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(20), halving, shuffle=False)
        for _ in run.epochs(3):
            for batch in loader:
                loss = cross_entropy(model, batch)
                run.backward(loss)
                optimizer.step()
                scheduler.step()
                run.log(loss=loss)
                if run.step % 2 == 0 and not run.in_batch:
                    break
        return (
            run.step,
            run.position.epoch,
            [group["lr"] for group in optimizer.param_groups],
            run.full_state_dict(model),
        )

    model, optimizer = seeded_perceptron()
    scheduler = StepLR(optimizer, 1, 0.5)
    batches = TrainingCase(lambda: model, vectors(20), cross_entropy).batches()
    for _ in range(3):
        for batch in batches[:2]:
            cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for steps, epoch, rates, state in in_runs(len(split["batch"]), on_rank, stage=stage, **split, **UNITS):
        assert (steps, epoch) == (6, 3)
        assert rates == [group["lr"] for group in optimizer.param_groups]
        assert_same(state, model.state_dict(), 1e-10)


def test_idle_ranks_do_not_wait_for_a_loader_iterator_that_is_kept() -> None:
    def on_rank(run: Run) -> list[int]:
        model, optimizer = seeded_perceptron()
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), shuffle=False)
        kept = []
        for _ in run.epochs(2):
            kept.append(iter(loader))
            for batch in kept[-1]:
                run.backward(cross_entropy(model, batch))
                optimizer.step()
                if run.step % 2 == 0 and not run.in_batch:
                    break
        return [run.step]

    assert in_runs(3, on_rank, stage=1, **THREE) == [[4]] * 3


@in_stages
def test_idle_ranks_take_over_learning_rates_that_are_set_by_hand(stage: int) -> None:
    """A rank without data does not run the body of the loop, and steps with them all the same."""

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = seeded_perceptron()
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), shuffle=False)
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (run.step + 1)
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        return run.full_state_dict(model)

    model, optimizer = seeded_perceptron()
    for number, batch in enumerate(TrainingCase(lambda: model, vectors(20), cross_entropy).batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for state in in_runs(3, on_rank, stage=stage, **THREE, **UNITS):
        assert_same(state, model.state_dict(), 1e-10)


@in_stages
@pytest.mark.parametrize("how", ["a scheduler", "before a step", "after a step"])
def test_learning_rates_agree_where_ranks_become_idle_and_busy(how: str, stage: int) -> None:
    """As plans may have it: a rank has no data for a while, or just where the other has some."""
    changes = {1: ((4,), ()), 2: ((), (4,)), 3: ((4,), ()), 4: ((1, 1), (2,))}

    def set_rates(optimizer: torch.optim.Optimizer, step: int, when: str) -> None:
        if how == when:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = seeded_perceptron()
        halving = StepLR(optimizer, 1, 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(20), halving, shuffle=False)
        for number, micro in changes.items():
            run._prepared().source.change_split(Split(micro), DataPosition(0, number))
        for batch in loader:
            set_rates(optimizer, run.step, "before a step")
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if how == "a scheduler":
                scheduler.step()
            if not run.in_batch:
                set_rates(optimizer, run.step, "after a step")
        return run.full_state_dict(model)

    model, optimizer = seeded_perceptron()
    scheduler = StepLR(optimizer, 1, 0.5)
    for step, batch in enumerate(TrainingCase(lambda: model, vectors(20), cross_entropy, size=4).batches()):
        set_rates(optimizer, step, "before a step")
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if how == "a scheduler":
            scheduler.step()
        set_rates(optimizer, step + 1, "after a step")
    for state in in_runs(2, on_rank, stage=stage, batch=[2, 2], **UNITS):
        assert_same(state, model.state_dict(), 1e-10)


def test_reduce_lr_on_plateau_after_the_loop_over_the_loader() -> None:
    """After the loop over the loader, which all ranks come by."""

    def on_rank(run: Run) -> list[float]:
        model, optimizer = seeded_perceptron()
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(15), plateau)
        for _ in run.epochs(3):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                optimizer.step()
            run.evaluate(model, vectors(5), lambda model, batch: {"loss": cross_entropy(model, batch)})
            scheduler.step(1.0)
        return [group["lr"] for group in optimizer.param_groups]

    for rates in in_runs(3, on_rank, stage=2, **THREE):
        assert rates == pytest.approx([0.0005, 0.0002])


@dataclass
class Step:
    """Stands in for the global step: inside a global batch or not."""

    is_open: bool = False
    is_complete: bool = False


def synced(step: Step | None = None) -> tuple[SyncedLRScheduler, StepLR]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.step()  # torch warns about schedulers that step first
    return SyncedLRScheduler(scheduler, cast(GlobalStep, step or Step())), scheduler


def test_synced_lr_scheduler_delegates_attributes_and_state() -> None:
    prepared, scheduler = synced()
    assert isinstance(prepared, LRScheduler)
    assert prepared.optimizer is scheduler.optimizer
    assert (prepared.gamma, prepared.last_epoch) == (0.5, 0)
    prepared.step()
    assert (prepared.last_epoch, prepared.get_last_lr()) == (1, [0.5])
    assert prepared.state_dict() == scheduler.state_dict()
    state = prepared.state_dict()
    prepared.step()
    prepared.load_state_dict(state)
    assert scheduler.last_epoch == 1
    assert not prepared.is_bypassed
    with pytest.raises(AttributeError):
        _ = SyncedLRScheduler.__new__(SyncedLRScheduler).last_epoch


def test_synced_lr_scheduler_steps_between_global_batches_only() -> None:
    step = Step(is_open=True)
    prepared, scheduler = synced(step)
    prepared.step()
    assert (prepared.calls, scheduler.last_epoch) == (0, 0)
    step.is_complete = True
    with pytest.raises(UserError, match=r"call optimizer.step\(\) first"):
        prepared.step()


def test_synced_lr_scheduler_catches_up_and_notices_a_bypass() -> None:
    prepared, scheduler = synced()
    prepared.catch_up([0, 3])
    assert (prepared.calls, scheduler.last_epoch) == (3, 3)
    prepared.catch_up([3, 2])
    assert not prepared.is_bypassed
    scheduler.step()
    assert prepared.is_bypassed
    assert scheduler.last_epoch == 4


@pytest.mark.parametrize(
    "state",
    [
        LoopState(continues=True),
        LoopState(continues=False),
        LoopState(continues=False, collective_call="run.evaluate"),
        LoopState(continues=False, report=BatchReport(lr_scheduler_calls=[2], hyperparams={"0/lr": 0.1})),
    ],
)
def test_loop_state_survives_its_text(state: LoopState) -> None:
    assert LoopState.from_text(state.to_text()) == state
    assert LoopState.from_text(state.to_text().encode()) == state


def hyperparam_sync(lr: Any = 0.1) -> tuple[HyperparamSync, dict[str, Any]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr)
    return HyperparamSync(optimizer), optimizer.param_groups[0]


def reports(*ranks: tuple[dict[str, Any], tuple[bool, bool]]) -> list[BatchReport]:
    return [BatchReport(hyperparams=changes, was_in_body=in_body) for changes, in_body in ranks]


BUSY, IDLE, ONLY_AFTER, ONLY_BEFORE = (True, True), (False, False), (True, False), (False, True)


def test_hyperparam_sync_reports_what_changed() -> None:
    sync, group = hyperparam_sync()
    assert sync.changed() == {}
    group["lr"] = 0.2
    assert sync.changed() == {"0/lr": 0.2}
    sync.reset()
    assert sync.changed() == {}


def test_an_idle_rank_takes_over_what_busy_ranks_set() -> None:
    sync, group = hyperparam_sync()
    sync.agree(reports(({"0/lr": 0.2}, BUSY), ({}, IDLE)), rank=1)
    assert group["lr"] == 0.2
    assert sync.changed() == {}


def test_a_tensor_lr_is_set_in_place() -> None:
    rate = torch.tensor(0.1)
    sync, group = hyperparam_sync(rate)
    sync.agree(reports(({"0/lr": 0.5}, BUSY), ({}, IDLE)), rank=1)
    assert group["lr"] is rate
    assert float(rate) == 0.5


def test_busy_ranks_must_agree() -> None:
    sync, _ = hyperparam_sync()
    with pytest.raises(UserError, match=r"lr \(param group 0\) is 0.2 on rank 0 and 0.1 on rank 1; set it from"):
        sync.agree(reports(({"0/lr": 0.2}, BUSY), ({}, BUSY)), rank=0)


def test_what_is_set_before_a_step_overrides_what_was_set_after_the_last() -> None:
    """No rank ran the loop's body both times."""
    sync, group = hyperparam_sync()
    sync.agree(reports(({"0/lr": 0.2, "0/momentum": 0.5}, ONLY_AFTER), ({"0/lr": 0.3}, ONLY_BEFORE)), rank=0)
    assert (group["lr"], group["momentum"]) == (0.3, 0.5)


def test_an_idle_ranks_own_change_is_undone() -> None:
    sync, group = hyperparam_sync()
    group["lr"] = 0.7
    sync.agree(reports(({}, BUSY), (sync.changed(), IDLE)), rank=1)
    assert group["lr"] == 0.1


def one_step() -> GlobalStep:
    return cast(GlobalStep, SimpleNamespace(is_complete=False, is_open=False))


def test_a_synced_scheduler_reads_and_sets_the_wrapped_ones_attributes() -> None:
    scheduler = StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), 1, 0.5)
    synced: Any = SyncedLRScheduler(scheduler, one_step())
    synced.gamma = 0.25
    assert scheduler.gamma == 0.25
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert len(synced.get_lr()) == 1
    assert repr(scheduler) in repr(synced)


@pytest.mark.parametrize("chained", [False, True])
def test_a_synced_scheduler_notices_steps_of_the_wrapped_one(chained: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    inner = StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler = ChainedScheduler([inner]) if chained else inner
    synced = SyncedLRScheduler(scheduler, one_step())
    synced.step()
    assert (synced.calls, synced.is_bypassed) == (1, False)
    synced.restore(scheduler.state_dict(), 7)
    assert (synced.calls, synced.is_bypassed) == (7, False)
    scheduler.step()
    assert synced.is_bypassed


def test_a_plateau_scheduler_stepped_before_a_break_is_refused_on_all_ranks() -> None:
    """The rank without data finds out where all ranks exchange their reports next."""

    def on_rank(run: Run) -> str:
        model, optimizer = seeded_perceptron()
        plateau = ReduceLROnPlateau(optimizer)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(15), plateau, shuffle=False)

        def train() -> None:
            for _ in run.epochs(1):
                for batch in loader:
                    loss = cross_entropy(model, batch)
                    run.backward(loss)
                    optimizer.step()
                    if not run.in_batch:
                        scheduler.step(metrics=float(loss.detach()))
                        break

        with pytest.raises(UserError) as raised:
            train()
        return str(raised.value)

    for message in in_runs(3, on_rank, **THREE):
        assert message.startswith("ReduceLROnPlateau steps by a metric")


def test_a_bypassed_scheduler_before_a_break_is_refused_on_all_ranks() -> None:
    """Also on the rank that stepped it, and not as a lost peer."""

    def on_rank(run: Run) -> str:
        model, optimizer = seeded_perceptron()
        given = StepLR(optimizer, 1, 0.5)
        _, optimizer, loader, _ = run.prepare(model, optimizer, vectors(15), given, shuffle=False)

        def train() -> None:
            for _ in run.epochs(1):
                for batch in loader:
                    run.backward(cross_entropy(model, batch))
                    optimizer.step()
                    if not run.in_batch:
                        given.step()
                        break

        with pytest.raises(UserError) as raised:
            train()
        return str(raised.value)

    for message in in_runs(3, on_rank, **THREE):
        assert message.startswith("the scheduler that was given to run.prepare was stepped")


def test_a_loop_signal_that_never_comes_names_the_leader_after_its_timeout() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("check", "await_arrival", "note_waiting"), lambda *_: None)
    control = SimpleNamespace(**nothing, describe=lambda rank: f"rank {rank} on here")
    group: Any = SimpleNamespace(endpoint=SimpleNamespace(store=HashStore(), control=control), members=(0, 1))
    with pytest.raises(PeerLost, match="rank 1 on here did not continue the loop over its loader"):
        LoopSignal(group, "run", timeout_s=0.05).wait(1, 1)
