"""Checkpoints of groups: training resumes exactly, with any number of groups and shards."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hybrid_groups import BATCH, SAMPLES, ShardServers, make_model, make_push, shard_servers
from support.models import adamw, cross_entropy, momentum, vectors
from support.runs import in_runs
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import storage as disk
from mimatrix.engine.run import Run
from mimatrix.hybrid.client.checkpoint import GlobalState, check_format
from mimatrix.hybrid.client.group_optimizer import GroupOptimizer
from mimatrix.hybrid.policy import Policy, PushScaling, make_policy
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard

STEPS, SAVED_AT = 19, 8
"""7 global batches in an epoch, the last one smaller."""
ONE, TWO, THREE = Shares((1.0,)), Shares((0.6, 0.4)), Shares((0.2, 0.5, 0.3))
State = dict[str, torch.Tensor]


def trained(
    run: Run, model: nn.Module, optimizer: Any, to: int, before: Callable[[], object], each: Callable[[], object]
) -> State:
    made = optimizer(model)
    halving = torch.optim.lr_scheduler.StepLR(made, 5, 0.5)
    model, made, loader, scheduler = run.prepare(model, made, vectors(SAMPLES), halving, loss=cross_entropy)
    try:
        before()
        while run.step < to:
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                made.step()
                made.zero_grad()
                scheduler.step()
                if not run.in_batch:
                    each()
                if run.step == to:
                    break
        return run.full_state_dict(model)
    finally:
        run.close()


def alone(
    chosen: Policy,
    shares: Shares,
    batches: tuple[int, ...],
    stage: int,
    optimizer: Any,
    to: int,
    saves: Path | None = None,
    loads: Path | None = None,
) -> tuple[State, list[Shard]]:
    """One group alone up to step `to`; what it has then, and what the shards have."""

    def each(run: Run) -> State:
        def load() -> None:
            if loads:
                assert run.load(loads)
                assert run.step == SAVED_AT

        def save() -> None:
            if saves and run.step == SAVED_AT:
                run.save(saves)

        return trained(run, models[run.rank], optimizer, to, load, save)

    models = [make_model() for _ in batches]
    with shard_servers(chosen, shares) as found:
        states = in_runs(
            len(batches),
            each,
            outer=lambda rank: found.optimizer(0, rank),
            batch=list(batches),
            stage=stage,
            unit_bytes=300,
        )
        return states[0], found.shards()


@pytest.mark.parametrize(
    ("name", "options", "optimizer"),
    [
        ("large", {"warm_up": 100}, momentum),
        ("large", {}, adamw),
        ("bounded", {}, momentum),
        ("local", {"local_steps": 3}, adamw),
        ("elastic", {"local_steps": 3}, momentum),
    ],
)
@pytest.mark.parametrize(
    ("batches", "stage", "then", "later"),
    [((6,), 0, (6,), THREE), ((4, 2), 1, (5, 1), TWO), ((2, 4), 3, (6,), ONE)],
)
def test_a_single_group_resumes_exactly(
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    optimizer: Any,
    batches: tuple[int, ...],
    stage: int,
    then: tuple[int, ...],
    later: Shares,
) -> None:
    chosen = make_policy(name, BATCH, options)
    wanted, shards = alone(chosen, TWO, batches, stage, optimizer, STEPS)
    alone(chosen, TWO, batches, stage, optimizer, SAVED_AT + 3, saves=tmp_path)
    found, others = alone(chosen, later, then, stage, optimizer, STEPS, loads=tmp_path)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10)
    counted = {(shard.log.version, shard.log.samples) for shard in (*shards, *others)}
    assert len(counted) == 1


def two_groups(found: ShardServers, each: Callable[[int, Run, nn.Module], object], overlaps: bool) -> None:
    models = [make_model() for _ in range(2)]
    members: list[GroupOptimizer] = [found.optimizer(group, overlaps=overlaps) for group in range(2)]
    errors: list[BaseException] = []

    def group(number: int) -> None:
        try:
            in_runs(
                1,
                lambda run: each(number, run, models[number]),
                outer=lambda _: members[number],
                batch=[BATCH],
                stage=0,
                seed=number,
            )
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("saver", [0, 1])
def test_shards_resume_bit_for_bit_with_two_groups(tmp_path: Path, saver: int) -> None:
    """One saves while both wait; what shards have after it was loaded is what they had, to the last bit."""
    meets = threading.Barrier(2, timeout=30)
    had: list[tuple[torch.Tensor, dict[int, Any], int, int]] = []

    def saving(number: int, run: Run, model: nn.Module) -> None:
        def each() -> None:
            meets.wait()
            if run.step == SAVED_AT and number == saver:
                run.save(tmp_path, wait=True)
                had.extend(kept(town_of[0]))
            meets.wait()

        trained(run, model, momentum, SAVED_AT + 2, lambda: None, each)

    def loading(number: int, run: Run, model: nn.Module) -> None:
        def load() -> None:
            meets.wait()
            assert run.load(tmp_path)
            assert run.step == SAVED_AT
            meets.wait()
            if number == 0:
                had.extend(kept(town_of[0]))
            meets.wait()

        trained(run, model, momentum, SAVED_AT + 3, load, lambda: None)

    town_of: list[ShardServers] = []
    for each in (saving, loading):
        with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
            town_of[:] = [found]
            two_groups(found, each, overlaps=False)
    (first, second), (loaded, after) = had[:2], had[2:]
    for one, other in ((first, loaded), (second, after)):
        assert torch.equal(one[0], other[0])
        assert one[2:] == other[2:]
        assert one[1].keys() == other[1].keys()
        for number, state in one[1].items():
            assert torch.equal(state["momentum_buffer"], other[1][number]["momentum_buffer"])


def kept(found: ShardServers) -> list[tuple[torch.Tensor, dict[int, Any], int, int]]:
    saved = [shard.save() for shard in found.shards()]
    return [(each.values, each.optimizer_state, each.log.version, each.log.samples) for each in saved]


def test_all_groups_may_save_to_one_directory(tmp_path: Path) -> None:
    def each(number: int, run: Run, model: nn.Module) -> None:
        trained(
            run, model, momentum, 40, lambda: None, lambda: run.save(tmp_path, keep=50) if run.step % 4 == 0 else None
        )

    with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
        two_groups(found, each, overlaps=True)
    paths = disk.list_checkpoints(tmp_path)
    assert len(paths) == 20
    for path in paths:
        facts = disk.read_metadata(path)
        disk.verify(path, facts)
        assert facts["outer"]["samples"] <= BATCH * facts["outer"]["version"]
    assert not list(tmp_path.glob(".*"))


def test_a_group_that_loads_late_takes_the_current_state(tmp_path: Path) -> None:
    """Another has loaded and gone on: that is not undone."""
    chosen = Policy(scaling=PushScaling(reference=BATCH))
    alone(chosen, TWO, (6,), 0, momentum, SAVED_AT, saves=tmp_path)
    goes = threading.Event()

    def each(number: int, run: Run, model: nn.Module) -> None:
        def load() -> None:
            assert number == 0 or goes.wait(30)
            assert run.load(tmp_path)

        def step() -> None:
            if run.step == SAVED_AT + 5:
                goes.set()

        trained(run, model, momentum, SAVED_AT + 10, load, step)

    with shard_servers(chosen) as found:
        two_groups(found, each, overlaps=False)
        assert [shard.log.version for shard in found.shards()] == [SAVED_AT + 20] * 2


def test_checkpoints_of_another_mode_are_refused(tmp_path: Path) -> None:
    def load(run: Run) -> None:
        trained(run, make_model(), momentum, 2, lambda: run.load(tmp_path), lambda: None)

    alone(Policy(scaling=PushScaling(reference=BATCH)), TWO, (6,), 0, momentum, SAVED_AT, saves=tmp_path)
    with pytest.raises(UserError, match='saved in mode="hybrid" and the run is in mode="sync"'):
        in_runs(1, load, batch=[BATCH], stage=0)
    with (
        shard_servers(make_policy("local", BATCH, {})) as found,
        pytest.raises(Exception, match="groups with another policy"),
    ):
        in_runs(1, load, outer=lambda rank: found.optimizer(0, rank), batch=[BATCH], stage=0)


def test_momentum_keeps_its_magnitude_in_shards_of_other_sizes() -> None:
    """Two shards whose last pushes counted differently become three, and then go on as they would have."""
    rules = PushScaling(reference=4, staleness_exponent=1.0)
    pieces = (ParamSpan(0, 0, 5), ParamSpan(1, 0, 3))
    sgd = {"lr": 0.1, "momentum": 0.9}
    parts = ((ParamSpan(0, 0, 4),), (ParamSpan(0, 0, 1), ParamSpan(1, 0, 3)))
    shards = [
        Shard(torch.ones(4, dtype=torch.float64), OptimizerSpec(torch.optim.SGD, (sgd,), part), rules) for part in parts
    ]
    for number, shard in enumerate(shards):
        shard.push(make_push(0, 1, 4, 0), torch.ones(4, dtype=torch.float64))
        shard.push(make_push(1, 1, 4, number), torch.arange(4, dtype=torch.float64))
    whole = GlobalState.merge([shard.save() for shard in shards], pieces)
    assert [factor for _, factor in whole.factors] == [0.5, 1.0]
    sizes = (3, 3, 2)
    cuts = ((ParamSpan(0, 0, 3),), (ParamSpan(0, 0, 2), ParamSpan(1, 0, 1)), (ParamSpan(1, 0, 2),))
    others = [
        Shard(torch.zeros(size, dtype=torch.float64), OptimizerSpec(torch.optim.SGD, (sgd,), part), rules)
        for size, part in zip(sizes, cuts, strict=True)
    ]
    for shard, kept in zip(others, whole.split(pieces, sizes, rules, "here"), strict=True):
        shard.load(kept)
    for shard in (*shards, *others):
        now = shard.pull()
        number = shard.log.pushes.get(0, 0) + 1
        shard.push(make_push(0, number, 4, now.version), now.values * 2)
    one, other = (torch.cat([shard.pull().values for shard in found]) for found in (shards, others))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_checkpoints_of_another_format_are_refused() -> None:
    with pytest.raises(UserError, match="reads format 1; load it with the version that saved it"):
        check_format({"format": 0})
