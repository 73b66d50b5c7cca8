"""Groups in the training loop: a single group is exact in every stage; several do not wait for each other."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from support.hybrid_groups import BATCH, SAMPLES, make_model, shard_servers
from support.models import adamw, cross_entropy, momentum, vectors
from support.plain import plain_run
from support.runs import in_runs
from torch import nn
from torch.utils.data import default_collate

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run
from mimatrix.hybrid.policy import Policy, PushScaling, make_policy


def trained(run: Run, model: nn.Module, optimizer: Any, epochs: int = 1) -> dict[str, torch.Tensor]:
    stepper = optimizer(model)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    model, stepper, loader, scheduler = run.prepare(
        model, stepper, vectors(SAMPLES), halving, loss=cross_entropy, shuffle=False
    )
    for _ in run.epochs(epochs):
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            stepper.step()
            stepper.zero_grad()
            scheduler.step()
    found = run.full_state_dict(model)
    run.close()
    return found


@pytest.mark.parametrize("optimizer", [adamw, momentum])
@pytest.mark.parametrize(
    ("batches", "stage"), [((6,), 0), ((4, 2), 0), ((4, 2), 1), ((1, 3, 2), 2), ((5, 1), 3), ((6, 0), 1)]
)
def test_a_single_group_trains_like_one_process(batches: tuple[int, ...], stage: int, optimizer: Any) -> None:
    reference = make_model()
    data = vectors(SAMPLES)
    stepper = optimizer(reference)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    whole = [default_collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)]
    plain_run(reference, stepper, whole, cross_entropy, scheduler=halving)
    models = [make_model() for _ in batches]
    with shard_servers(Policy(scaling=PushScaling(reference=BATCH, warm_up=100))) as found:
        states = in_runs(
            len(batches),
            lambda run: trained(run, models[run.rank], optimizer),
            outer=lambda rank: found.optimizer(0, rank),
            batch=list(batches),
            stage=stage,
            unit_bytes=300,
        )
    for state in states:
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def test_averages_are_refused_where_groups_share_their_weights() -> None:
    def on_rank(run: Run) -> None:
        model = make_model()
        run.prepare(model, adamw(model), vectors(SAMPLES))
        for make in (run.ema, run.swa):
            with pytest.raises(UserError, match='in mode="hybrid" groups have different ones; use mode="sync"'):
                make()
        run.close()

    with shard_servers(Policy(scaling=PushScaling(reference=BATCH, warm_up=100))) as found:
        in_runs(1, on_rank, outer=lambda rank: found.optimizer(0, rank), batch=[BATCH])


def test_groups_without_backups_step_as_one_process() -> None:
    """Both see the same samples here, so that the mean of their gradients is that of one process."""
    members, models, states = [], [make_model() for _ in range(2)], {}
    with shard_servers(make_policy("backup", BATCH, {"backups": 0}, 2)) as found:
        members = [found.optimizer(group, overlaps=True) for group in range(2)]

        def group(number: int) -> None:
            def train(run: Run) -> dict[str, torch.Tensor]:
                return trained(run, models[number], momentum)

            states[number] = in_runs(1, train, outer=lambda _: members[number], batch=[BATCH], stage=0)[0]

        threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        steps = found.servers[0]._shards[0].log.version
    reference, data = make_model(), vectors(SAMPLES)
    stepper = momentum(reference)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    whole = [default_collate(data[start : start + BATCH]) for start in range(0, steps * BATCH, BATCH)]
    plain_run(reference, stepper, whole, cross_entropy, scheduler=halving)
    assert steps == -(-SAMPLES // (2 * BATCH))
    for name, value in reference.state_dict().items():
        for state in states.values():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("overlaps", [False, True])
def test_groups_share_the_samples_of_an_epoch_without_waiting(overlaps: bool) -> None:
    """The second one is slow: the others neither wait for it nor leave it behind."""
    samples = len(vectors(SAMPLES))
    with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
        members = [found.optimizer(group, overlaps=overlaps) for group in range(3)]
        models = [make_model() for _ in range(3)]
        slow = threading.Event()

        def group(number: int) -> dict[str, torch.Tensor]:
            def train(run: Run) -> dict[str, torch.Tensor]:
                if number == 1:
                    slow.wait(0.5)
                return trained(run, models[number], momentum, epochs=6)

            return in_runs(1, train, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)[0]

        threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        ledgers = [service._shards[k].log for k, service in enumerate(found.servers)]
    for ledger in ledgers:
        assert ledger.version == sum(ledger.pushes.values())
        assert 6 * samples <= ledger.samples <= 6 * samples + 2 * 3 * BATCH
    assert ledgers[0].pushes == ledgers[1].pushes
    assert members[0].stats.pushes > 0


def batches_of(data: list[Any], epochs: int) -> list[Any]:
    return [default_collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)] * epochs


def row_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters() if each.requires_grad])


def put(model: nn.Module, row: torch.Tensor) -> None:
    learning = [each for each in model.parameters() if each.requires_grad]
    for each, part in zip(learning, torch.split(row, [each.numel() for each in learning]), strict=True):
        each.data.copy_(part.view_as(each))


@pytest.mark.parametrize(("ranks", "stage"), [((6,), 0), ((4, 2), 1), ((5, 1), 3)])
@pytest.mark.parametrize("name", ["local", "rounds", "elastic"])
def test_local_and_elastic_steps_match_their_formulas(name: str, ranks: tuple[int, ...], stage: int) -> None:
    """A single group, three local steps between pushes; its parameters and the server's are written out."""
    rounds = {"rounds": True} if name == "rounds" else {}
    chosen = make_policy("local" if rounds else name, BATCH, {"local_steps": 3, **rounds})
    reference, plain = make_model(), adamw
    stepper = plain(reference)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    common = row_of(reference).clone()
    velocity = torch.zeros_like(common)
    for start in range(0, 2 * 7, 3):
        batches = batches_of(vectors(SAMPLES), 2)[start : start + 3]
        plain_run(reference, stepper, batches, cross_entropy, scheduler=halving)
        if len(batches) < 3:
            break
        here = row_of(reference)
        if name == "local":
            common = common - 0.7 * (common - here)
            put(reference, common)
        elif name == "rounds":
            velocity = 0.9 * velocity + (common - here)
            common = common - 0.7 * ((common - here) + 0.9 * velocity)
            put(reference, common)
        else:
            way = 0.1 * (common - here)
            common = common - way
            put(reference, here + way)
    models = [make_model() for _ in ranks]
    with shard_servers(chosen) as found:
        states = in_runs(
            len(ranks),
            lambda run: stepped(run, models[run.rank], plain, 14),
            outer=lambda rank: found.optimizer(0, rank),
            batch=list(ranks),
            stage=stage,
            unit_bytes=300,
        )
    for state in states:
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-10)


def stepped(run: Run, model: nn.Module, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
    made = optimizer(model)
    halving = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    model, made, loader, scheduler = run.prepare(
        model, made, vectors(SAMPLES), halving, loss=cross_entropy, shuffle=False
    )
    while run.step < steps:
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            made.step()
            made.zero_grad()
            scheduler.step()
            if run.step == steps:
                break
    found = run.full_state_dict(model)
    run.close()
    return found


def test_bounded_groups_wait_for_the_slowest() -> None:
    """One group waits for a signal in mid-run: the other reaches its bound, and waits."""
    with shard_servers(make_policy("bounded", BATCH, {"max_staleness": 2})) as found:
        members = [found.optimizer(group) for group in range(2)]
        models = [make_model() for _ in range(2)]
        goes_on, both = threading.Event(), threading.Barrier(2)

        def train(run: Run) -> None:
            number = run.settings.seed
            made = momentum(models[number])
            model, made, loader = run.prepare(models[number], made, vectors(3 * SAMPLES), loss=cross_entropy)
            both.wait(20)
            for batch in loader:
                if number == 1 and run.step == 3:
                    goes_on.wait(20)
                run.backward(cross_entropy(model, batch))
                made.step()
                made.zero_grad()
            run.close()

        def group(number: int) -> None:
            in_runs(1, train, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)

        threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        ledger = found.servers[0]._shards[0].log
        assert ledger.pushes == {0: 6, 1: 3}
        goes_on.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert members[0].stats.waited_s > 0.5


def in_a_group(each: Any, batches: tuple[int, ...] = (BATCH,), **more: Any) -> Any:
    """Return what `each` gives on the ranks of one group."""
    with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
        return in_runs(len(batches), each, outer=lambda rank: found.optimizer(0, rank), batch=list(batches), **more)


@pytest.mark.parametrize("batches", [(6,), (6, 0), (4, 2)])
def test_logs_schedulers_and_saves_are_complete_after_an_epoch(batches: tuple[int, ...], tmp_path: Any) -> None:
    """What was logged, the scheduler's last step, and a checkpoint in the last step: also to a rank without data."""
    models = [make_model() for _ in batches]

    def train(run: Run) -> tuple[list[int], list[float]]:
        made = momentum(models[run.rank])
        halving = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        model, stepper, loader, scheduler = run.prepare(
            models[run.rank], made, vectors(2 * BATCH), halving, loss=cross_entropy
        )
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                stepper.step()
                scheduler.step()
                run.log(loss=1.0)
                if run.step == 4 and not run.in_batch:
                    run.save(tmp_path)
        found = [step for step, _ in run.history], [group["lr"] for group in stepper.param_groups]
        run.close()
        return found

    (steps, rates), *others = in_a_group(train, batches, stage=1)
    assert steps == [0, 1, 2, 3]
    assert all(other == (steps, rates) for other in others)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_break_ends_the_epoch_of_a_group() -> None:
    def train(run: Run) -> tuple[list[int], int, list[int]]:
        model = make_model()
        model, stepper, loader = run.prepare(model, momentum(model), vectors(SAMPLES), loss=cross_entropy)
        seen = []
        for number in run.epochs(3):
            seen.append(number)
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                stepper.step()
                run.log(loss=1.0)
                if run.step >= 2:
                    break
        found = seen, run.step, [step for step, _ in run.history]
        run.close()
        return found

    assert in_a_group(train) == [([0, 1, 2], 4, [0, 1, 2, 3])]


def test_steps_skipped_for_nan_count_towards_the_epoch() -> None:
    def train(run: Run) -> int:
        model = make_model()
        model, stepper, loader = run.prepare(model, momentum(model), vectors(SAMPLES), loss=cross_entropy)
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch) * float("nan"))
                stepper.step()
                assert run.step < 100
        found = run.step
        run.close()
        return found

    assert in_a_group(train, max_grad_norm=1.0) == [14]


def one_alone(chosen: Policy, each: Any) -> Any:
    """Return what `each` gives for a run that is a group of one rank."""
    with shard_servers(chosen) as found:
        return in_runs(1, each, outer=lambda _: found.optimizer(0), batch=[BATCH], stage=0)[0]


@pytest.mark.parametrize("local_steps", [0, 3])
def test_groups_see_each_epoch_number_at_most_once(local_steps: int) -> None:
    """Groups repeat their samples as often as needed, and see an epoch number once."""
    chosen = make_policy("local", BATCH, {"local_steps": 3}) if local_steps else make_policy("large", BATCH, {})
    with shard_servers(chosen) as found:
        members = [found.optimizer(group) for group in range(2)]
        told: list[list[int]] = [[], []]

        def train(run: Run) -> None:
            number = run.settings.seed
            net = make_model()
            model, made, loader = run.prepare(net, momentum(net), vectors(SAMPLES), loss=cross_entropy)
            for epoch in run.epochs(5):
                told[number].append(epoch)
                for batch in loader:
                    run.backward(cross_entropy(model, batch))
                    made.step()
                    made.zero_grad()
            run.close()

        def group(number: int) -> None:
            in_runs(1, train, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)

        threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    for epochs in told:
        assert epochs == sorted(set(epochs))
        assert set(epochs) <= set(range(5))


def test_optimizers_that_are_not_elementwise_are_refused() -> None:
    def begun(run: Run) -> None:
        model = make_model()
        run.prepare(model, torch.optim.Adafactor(model.parameters()), vectors(SAMPLES), loss=cross_entropy)

    with pytest.raises(
        Exception, match="Adafactor does not treat every element by itself, so groups cannot split its state"
    ):
        one_alone(make_policy("large", BATCH, {}), begun)


def test_learning_rate_may_be_a_tensor() -> None:
    states = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        made = partial(_adam, lr)
        states.append(
            one_alone(make_policy("large", BATCH, {}), lambda run, made=made: trained(run, make_model(), made, 1))
        )
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-10)


def _adam(lr: Any, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)
