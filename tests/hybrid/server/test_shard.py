"""A shard against formulas that are written out: two groups in lock-step, staleness included."""

from dataclasses import replace

import pytest
import torch
from support.hybrid_groups import make_push

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.hybrid.server.state import ShardState

LR, MOMENTUM, B = 0.05, 0.9, 32
SETTINGS = {"lr": LR, "momentum": MOMENTUM}
SGD = OptimizerSpec(torch.optim.SGD, (SETTINGS, SETTINGS), (ParamSpan(0, 0, 3), ParamSpan(1, 1, 3), ParamSpan(2, 1, 1)))
TARGET = torch.linspace(-1, 2, 7, dtype=torch.float64)


def gradient(at: torch.Tensor, group: int) -> torch.Tensor:
    """Of a bowl that each group sees a little differently."""
    return (at - TARGET) * (1 + 0.1 * group) + 0.01 * group


def by_hand(rules: PushScaling, script: list[tuple[str, int, int]]) -> torch.Tensor:
    """Apply the formulas one by one to `script`, which has ("pull", group, _) and ("push", group, samples)."""
    x, v = torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    version = seen = 0
    before: float | None = None
    has: dict[int, tuple[torch.Tensor, int]] = {}
    for what, group, samples in script:
        if what == "pull":
            has[group] = (x.clone(), version)
            continue
        at, since = has[group]
        ratio = samples / B if rules.lr_scaling else 1.0
        if rules.lr_scaling and ratio > 1 and seen < rules.warm_up:
            ratio = 1 + (ratio - 1) * seen / rules.warm_up
        factor = ratio / (1 + version - since) ** rules.staleness_exponent
        if rules.momentum_correction and before is not None:
            v = v * before / factor
        v = MOMENTUM * v + gradient(at, group)
        x = x - LR * factor * v
        version, seen, before = version + 1, seen + samples, factor
    return x


def by_shard(rules: PushScaling, script: list[tuple[str, int, int]]) -> torch.Tensor:
    shard = Shard(torch.zeros(7, dtype=torch.float64), SGD, rules)
    has, numbers = {}, dict.fromkeys(range(4), 0)
    for what, group, samples in script:
        if what == "pull":
            has[group] = shard.pull()
        else:
            numbers[group] += 1
            push = make_push(group, numbers[group], samples, has[group].version)
            shard.push(push, gradient(has[group].values, group))
    return shard.pull().values


LOCK_STEP = [
    step
    for turn in range(12)
    for step in (
        [("pull", 0, 0), ("pull", 1, 0), ("push", 0, 64), ("pull", 0, 0), ("push", 0, 64), ("push", 1, 32)]
        if turn % 3
        else [("pull", 1, 0), ("push", 1, 16), ("pull", 0, 0), ("push", 0, 96)]
    )
]


@pytest.mark.parametrize(
    "rules",
    [
        PushScaling(reference=B),
        PushScaling(reference=B, warm_up=500),
        PushScaling(reference=B, staleness_exponent=0.0),
        PushScaling(reference=B, staleness_exponent=1.0),
        PushScaling(reference=B, momentum_correction=False),
        PushScaling(reference=B, lr_scaling=False),
        PushScaling.unscaled(B),
    ],
)
def test_shard_matches_the_formulas_for_two_groups_in_lock_step(rules: PushScaling) -> None:
    assert torch.equal(by_shard(rules, LOCK_STEP), by_shard(rules, LOCK_STEP))
    assert (by_shard(rules, LOCK_STEP) - by_hand(rules, LOCK_STEP)).abs().max() < 1e-10


def test_shard_with_one_group_steps_like_its_optimizer() -> None:
    script = [step for _ in range(30) for step in (("pull", 0, 0), ("push", 0, B))]
    value = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer = torch.optim.SGD([value], lr=LR, momentum=MOMENTUM)
    for _ in range(30):
        value.grad = gradient(value.detach(), 0)
        optimizer.step()
    assert torch.equal(by_shard(PushScaling(reference=B, warm_up=100), script), value.detach())


def test_duplicate_pushes_are_not_applied_twice() -> None:
    shard = Shard(torch.zeros(7, dtype=torch.float64), SGD, PushScaling(reference=B))
    first = shard.push(make_push(0, 1, B, 0), torch.ones(7, dtype=torch.float64))
    values = shard.pull().values
    again = shard.push(make_push(0, 1, B, 0), torch.ones(7, dtype=torch.float64))
    assert (first.version, first.is_duplicate, again.version, again.is_duplicate) == (1, False, 1, True)
    assert torch.equal(shard.pull().values, values)
    with pytest.raises(WorldError, match="group 0 sent push 3 after push 1"):
        shard.push(make_push(0, 3, B, 1), torch.ones(7, dtype=torch.float64))
    with pytest.raises(WorldError, match="has version 9"):
        shard.push(make_push(1, 1, B, 9), torch.ones(7, dtype=torch.float64))


def test_pulled_parameters_do_not_change() -> None:
    shard = Shard(torch.zeros(7, dtype=torch.float64), SGD, PushScaling(reference=B))
    pulled = shard.pull()
    shard.push(make_push(0, 1, B, 0), torch.ones(7, dtype=torch.float64))
    assert pulled.version == 0
    assert not pulled.values.any()


def test_shard_resumes_from_its_saved_state() -> None:
    one = Shard(torch.zeros(7, dtype=torch.float64), SGD, PushScaling(reference=B))
    for number in range(1, 6):
        one.push(make_push(number % 2, (number + 1) // 2, 40, one.pull().version), gradient(one.pull().values, 0))
    other = Shard(torch.ones(7, dtype=torch.float64), SGD, PushScaling(reference=B))
    other.load(one.save())
    for shard in (one, other):
        shard.push(make_push(1, 4, 16, 3), gradient(TARGET * 2, 1))
    assert torch.equal(one.pull().values, other.pull().values)
    assert PushLog.from_json(one.log.to_json()) == one.log
    kept = one.save()
    again = ShardState.from_tensor(kept.to_tensor())
    assert (again.factor, again.log) == (kept.factor, kept.log)
    assert torch.equal(again.optimizer_state[2]["momentum_buffer"], kept.optimizer_state[2]["momentum_buffer"])


def test_parameters_without_gradient_are_not_stepped() -> None:
    shard = Shard(torch.ones(7, dtype=torch.float64), SGD, PushScaling(reference=B))
    shard.push(make_push(0, 1, B, 0), torch.ones(7, dtype=torch.float64), without_grad=(1,))
    assert (shard.pull().values == 1).tolist() == [False, False, False, True, True, True, False]


def test_late_pushes_of_a_round_do_not_count() -> None:
    shard = Shard(torch.zeros(7, dtype=torch.float64), SGD, replace(PushScaling.unscaled(B), pushes_per_step=2))
    first = shard.pull()
    found = [
        shard.push(make_push(group, 1, samples, first.version), gradient(first.values, group))
        for group, samples in ((2, 32), (0, 64), (1, 32))
    ]
    assert [(each.version, each.staleness) for each in found] == [(0, 0), (1, 0), (1, 1)]
    mean = (32 * gradient(first.values, 2) + 64 * gradient(first.values, 0)) / 96
    torch.testing.assert_close(shard.pull().values, -LR * mean, rtol=0, atol=1e-12)
    assert (shard.log.samples, shard.pull().version) == (96, 1)
    assert shard.push(make_push(1, 1, 32, 0), gradient(first.values, 1)).is_duplicate
