"""Groups in the user's loop: one alone is exact in every stage; several go on without waiting."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from support.hybrid_groups import BATCH, SAMPLES, make_model, shard_servers
from support.models import adamw, momentum, squared, vectors
from support.plain import plain_run
from support.runs import in_runs
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import default_collate

import mimatrix
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.run import Run
from mimatrix.hybrid.client.flat_layout import split_spans
from mimatrix.hybrid.groups import check_groups
from mimatrix.hybrid.mode import Hybrid
from mimatrix.hybrid.policy import Policy, PushScaling, make_policy
from mimatrix.hybrid.rendezvous import Rendezvous
from mimatrix.hybrid.server.shard import ParamSpan


def trained(run: Run, model: nn.Module, optimizer: Any, epochs: int = 1) -> dict[str, torch.Tensor]:
    stepper = optimizer(model)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    model, stepper, loader, scheduler = run.prepare(
        model, stepper, vectors(SAMPLES), halving, loss=squared, shuffle=False
    )
    for _ in run.epochs(epochs):
        for batch in loader:
            run.backward(squared(model, batch))
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
def test_one_group_alone_gives_what_one_process_gives(batches: tuple[int, ...], stage: int, optimizer: Any) -> None:
    reference = make_model()
    data = vectors(SAMPLES)
    stepper = optimizer(reference)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    whole = [default_collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)]
    plain_run(reference, stepper, whole, squared, scheduler=halving)
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


def test_groups_that_all_wait_step_as_one() -> None:
    """Both see the same samples here, so that the mean of their gradients is that of one process."""
    members, models, states = [], [make_model() for _ in range(2)], {}
    with shard_servers(make_policy("backup", BATCH, {"backups": 0}, 2)) as found:
        members = [found.optimizer(group, overlaps=True) for group in range(2)]

        def group(number: int) -> None:
            def each(run: Run) -> dict[str, torch.Tensor]:
                return trained(run, models[number], momentum)

            states[number] = in_runs(1, each, outer=lambda _: members[number], batch=[BATCH], stage=0)[0]

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
    plain_run(reference, stepper, whole, squared, scheduler=halving)
    assert steps == -(-SAMPLES // (2 * BATCH))
    for name, value in reference.state_dict().items():
        for state in states.values():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("overlaps", [False, True])
def test_several_groups_share_the_samples_of_an_epoch(overlaps: bool) -> None:
    """The second one is slow: the others neither wait for it nor leave it behind."""
    samples = len(vectors(SAMPLES))
    with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
        members = [found.optimizer(group, overlaps=overlaps) for group in range(3)]
        models = [make_model() for _ in range(3)]
        slow = threading.Event()

        def group(number: int) -> dict[str, torch.Tensor]:
            def each(run: Run) -> dict[str, torch.Tensor]:
                if number == 1:
                    slow.wait(0.5)
                return trained(run, models[number], momentum, epochs=6)

            return in_runs(1, each, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)[0]

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
    assert members[0].now.pushes > 0


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
def test_groups_that_step_by_themselves_against_formulas(name: str, ranks: tuple[int, ...], stage: int) -> None:
    """One group alone, three steps of its own between pushes; what it and the service have is written out."""
    rounds = {"rounds": True} if name == "rounds" else {}
    chosen = make_policy("local" if rounds else name, BATCH, {"local_steps": 3, **rounds})
    reference, plain = make_model(), adamw
    stepper = plain(reference)
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    common = row_of(reference).clone()
    velocity = torch.zeros_like(common)
    for start in range(0, 2 * 7, 3):
        batches = batches_of(vectors(SAMPLES), 2)[start : start + 3]
        plain_run(reference, stepper, batches, squared, scheduler=halving)
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
    model, made, loader, scheduler = run.prepare(model, made, vectors(SAMPLES), halving, loss=squared, shuffle=False)
    while run.step < steps:
        for batch in loader:
            run.backward(squared(model, batch))
            made.step()
            made.zero_grad()
            scheduler.step()
            if run.step == steps:
                break
    found = run.full_state_dict(model)
    run.close()
    return found


def test_nobody_is_further_ahead_than_allowed() -> None:
    """One group waits for a signal in mid-run: the other comes so far, and waits."""
    with shard_servers(make_policy("bounded", BATCH, {"max_staleness": 2})) as found:
        members = [found.optimizer(group) for group in range(2)]
        models = [make_model() for _ in range(2)]
        goes_on, both = threading.Event(), threading.Barrier(2)

        def each(run: Run) -> None:
            number = run.settings.seed
            made = momentum(models[number])
            model, made, loader = run.prepare(models[number], made, vectors(3 * SAMPLES), loss=squared)
            both.wait(20)
            for batch in loader:
                if number == 1 and run.step == 3:
                    goes_on.wait(20)
                run.backward(squared(model, batch))
                made.step()
                made.zero_grad()
            run.close()

        def group(number: int) -> None:
            in_runs(1, each, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)

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
    assert members[0].now.waited_s > 0.5


def test_what_is_no_policy() -> None:
    with pytest.raises(UserError, match=r'there is no policy "loca".*local'):
        make_policy("loca", BATCH, {})
    with pytest.raises(UserError, match="backups is 3 of 3 groups; give how many groups are not waited for, 0 to 2"):
        make_policy("backup", 8, {"backups": 3}, 3)
    with pytest.raises(UserError, match='"plain" has no option "staleness_exponent"'):
        make_policy("plain", BATCH, {"staleness_exponent": 1.0})
    with pytest.raises(UserError, match="local_steps is 0"):
        make_policy("local", BATCH, {"local_steps": 0})


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("large", {"staleness_exponent": "x"}, "staleness_exponent is 'x'; give a number from 0"),
        ("large", {"staleness_exponent": None}, "staleness_exponent is None"),
        ("large", {"warm_up": "a"}, "warm_up is 'a'; give a number of samples"),
        ("large", {"reference": 0}, "reference is 0; give the samples that the learning rate was tuned for"),
        ("large", {"lr_scaling": "no"}, "lr_scaling is 'no'; use True or False"),
        ("bounded", {"max_staleness": "3x"}, "max_staleness is '3x'; give the pushes by which"),
        ("bounded", {"max_staleness": -1}, "max_staleness is -1"),
        ("backup", {"backups": None}, "backups is None"),
        ("local", {"momentum": "a"}, "momentum is 'a'; give a number from 0 to below 1"),
        ("local", {"lr": -1}, "lr is -1; give a learning rate above 0"),
        ("elastic", {"local_steps": 2.7}, "local_steps is 2.7"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_policy(name, BATCH, options, 2)


def test_groups_that_are_none() -> None:
    with pytest.raises(UserError, match=r"groups = \[0\] is not a list of lists of ranks"):
        check_groups([0], 1)  # type: ignore[list-item]


def test_ranks_that_ask_for_different_modes() -> None:
    store = HashStore()
    Hybrid(policy="plain")._check_same(store, 0)
    Hybrid(policy="plain")._check_same(store, 1)
    with pytest.raises(UserError, match=r"rank 1 was given the mode .*local.* and rank 0 .*plain.*give all ranks"):
        Hybrid(policy="local")._check_same(store, 1)
    with pytest.raises(UserError, match="give all ranks the same"):
        Hybrid(groups=[[0], [1]], policy="plain")._check_same(store, 1)


def test_the_script_and_who_started_it_have_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_GROUPS", "[[0, 1], [2]]")
    assert Hybrid(groups=[[0, 1], [2]]).resolve_groups(HashStore(), 0, 3) == ((0, 1), (2,))
    with pytest.raises(UserError, match="the script has groups 0/1,2 and the job was started with 0,1/2"):
        Hybrid(groups=[[0], [1, 2]]).resolve_groups(HashStore(), 0, 3)
    with pytest.raises(UserError, match='started with --groups, and in mode="sync" there are none'):
        mimatrix.init(BATCH)


def in_a_group(each: Any, batches: tuple[int, ...] = (BATCH,), **more: Any) -> Any:
    """What `each` gives on the ranks of one group."""
    with shard_servers(Policy(scaling=PushScaling(reference=BATCH))) as found:
        return in_runs(len(batches), each, outer=lambda rank: found.optimizer(0, rank), batch=list(batches), **more)


@pytest.mark.parametrize("batches", [(6,), (6, 0), (4, 2)])
def test_all_is_told_at_the_end_of_an_epoch(batches: tuple[int, ...], tmp_path: Any) -> None:
    """What was logged, the scheduler's last step, and a checkpoint in the last step: also to a rank without data."""
    models = [make_model() for _ in batches]

    def each(run: Run) -> tuple[list[int], list[float]]:
        made = momentum(models[run.rank])
        halving = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        model, stepper, loader, scheduler = run.prepare(
            models[run.rank], made, vectors(2 * BATCH), halving, loss=squared
        )
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(squared(model, batch))
                stepper.step()
                scheduler.step()
                run.log(loss=1.0)
                if run.step == 4 and not run.in_batch:
                    run.save(tmp_path)
        found = [step for step, _ in run.history], [group["lr"] for group in stepper.param_groups]
        run.close()
        return found

    (steps, rates), *others = in_a_group(each, batches, stage=1)
    assert steps == [0, 1, 2, 3]
    assert all(other == (steps, rates) for other in others)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_an_epoch_that_was_left_is_over() -> None:
    def each(run: Run) -> tuple[list[int], int, list[int]]:
        model = make_model()
        model, stepper, loader = run.prepare(model, momentum(model), vectors(SAMPLES), loss=squared)
        seen = []
        for number in run.epochs(3):
            seen.append(number)
            for batch in loader:
                run.backward(squared(model, batch))
                stepper.step()
                run.log(loss=1.0)
                if run.step >= 2:
                    break
        found = seen, run.step, [step for step, _ in run.history]
        run.close()
        return found

    assert in_a_group(each) == [([0, 1, 2], 4, [0, 1, 2, 3])]


def test_steps_that_are_left_out_count() -> None:
    def each(run: Run) -> int:
        model = make_model()
        model, stepper, loader = run.prepare(model, momentum(model), vectors(SAMPLES), loss=squared)
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(squared(model, batch) * float("nan"))
                stepper.step()
                assert run.step < 100
        found = run.step
        run.close()
        return found

    assert in_a_group(each, clip_norm=1.0) == [14]


def test_shards_cut_parameters() -> None:
    pieces = (ParamSpan(0, 0, 5), ParamSpan(1, 0, 3), ParamSpan(2, 1, 2))
    assert list(split_spans(pieces, (4, 5, 1))) == [
        (ParamSpan(0, 0, 4),),
        (ParamSpan(0, 0, 1), ParamSpan(1, 0, 3), ParamSpan(2, 1, 1)),
        (ParamSpan(2, 1, 1),),
    ]


def one_alone(chosen: Policy, each: Any) -> Any:
    """What `each` gives of a run that is a group of one rank."""
    with shard_servers(chosen) as found:
        return in_runs(1, each, outer=lambda _: found.optimizer(0), batch=[BATCH], stage=0)[0]


@pytest.mark.parametrize("local_steps", [0, 3])
def test_an_epoch_has_its_number_once(local_steps: int) -> None:
    """Groups go through their samples as often as it takes, and are told of an epoch once."""
    chosen = make_policy("local", BATCH, {"local_steps": 3}) if local_steps else make_policy("large", BATCH, {})
    with shard_servers(chosen) as found:
        members = [found.optimizer(group) for group in range(2)]
        told: list[list[int]] = [[], []]

        def each(run: Run) -> None:
            number = run.settings.seed
            net = make_model()
            model, made, loader = run.prepare(net, momentum(net), vectors(SAMPLES), loss=squared)
            for epoch in run.epochs(5):
                told[number].append(epoch)
                for batch in loader:
                    run.backward(squared(model, batch))
                    made.step()
                    made.zero_grad()
            run.close()

        def group(number: int) -> None:
            in_runs(1, each, outer=lambda _: members[number], batch=[BATCH], stage=0, seed=number)

        threads = [threading.Thread(target=group, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    for epochs in told:
        assert epochs == sorted(set(epochs))
        assert set(epochs) <= set(range(5))


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    def begun(run: Run) -> None:
        model = make_model()
        run.prepare(model, torch.optim.Adafactor(model.parameters()), vectors(SAMPLES), loss=squared)

    with pytest.raises(
        Exception, match="Adafactor does not treat every element by itself, so groups cannot split its state"
    ):
        one_alone(make_policy("large", BATCH, {}), begun)


def test_a_learning_rate_that_is_a_tensor() -> None:
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


def test_a_group_that_does_not_come_is_named() -> None:
    rendezvous = Rendezvous(
        store=HashStore(),
        group=0,
        groups=3,
        policy=make_policy("large", BATCH, {}),
        host="127.0.0.1",
        timeout_s=0.2,
    )
    rendezvous.store.set("address/0", "")
    with pytest.raises(WorldError, match=r"group 1, group 2 did not join within 0.2 s"):
        rendezvous._wait_for_all(rendezvous.store, "address")
