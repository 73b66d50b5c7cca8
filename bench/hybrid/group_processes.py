"""Groups as processes under quotas, and a service for each of their runs, all on this machine.

Processes stay for many runs, since each takes seconds to import torch. The service is in the calling process.
"""

import multiprocessing
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from support.hybrid_tasks import TASKS
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.engine.mode import Membership
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.client.group_optimizer import GroupOptimizer
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import make_policy
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import Shard
from mimatrix.launch.throttle.cpu_quota import quotas

_TOKEN = "bench"
_READY_S, _RUN_S = 120.0, 180.0


@dataclass(frozen=True)
class RunSetup:
    """The settings of one run."""

    task: str
    seed: int
    policy: str = "large"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 64
    """Of a push."""
    overlaps: bool = False
    """Whether groups compute while they push; what they compute then is later by all the others' pushes."""


@dataclass(frozen=True)
class GroupResult:
    """The result of one run in one group."""

    ended_s: float
    accuracy: float
    """In percent, of what this group had in the end."""
    staleness: float
    waited_s: float
    pushes: int


class GroupProcesses:
    """One process for each group, under a CPU quota, as a context manager."""

    def __init__(self, cpus: tuple[float, ...]) -> None:
        self._cpus, self._stack = cpus, ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> "GroupProcesses":
        joins = self._stack.enter_context(quotas(dict(enumerate(self._cpus))))
        context = multiprocessing.get_context("spawn")
        for number in range(len(self._cpus)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_runs, args=(number, len(self._cpus), theirs), daemon=True)
            process.start()
            self._stack.callback(process.kill)
            self._pipes.append(ours)
            joins[number].write_text(str(_receive(ours, _READY_S)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, setup: RunSetup) -> list[GroupResult]:
        """Train in all groups; return their results in the order in which they ended."""
        for pipe in self._pipes:
            pipe.send(setup)
        shards, *_ = [_receive(pipe, _READY_S) for pipe in self._pipes]
        rules = make_policy(setup.policy, setup.batch, setup.options).scaling
        made = {number: Shard(torch.from_numpy(values), how, rules) for number, (values, how) in shards.items()}
        service = ShardServer.open(made, _TOKEN)
        try:
            for pipe in self._pipes:
                pipe.send(service.address)
            return sorted((_receive(pipe, _RUN_S) for pipe in self._pipes), key=lambda each: each.ended_s)
        finally:
            service.close()


def _receive(pipe: Connection, within_s: float) -> Any:
    if not pipe.poll(within_s):
        raise TimeoutError(f"a group has said nothing for {within_s:g} s")
    found = pipe.recv()
    if isinstance(found, BaseException):
        raise found
    return found


def _serve_runs(number: int, groups: int, pipe: Connection) -> None:
    """Train as one group, run after run, until the pipe is closed."""
    torch.set_num_threads(1)
    pipe.send(multiprocessing.current_process().pid)
    while True:
        try:
            setup: RunSetup = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_train(setup, number, groups, pipe))
        except Exception as error:  # noqa: BLE001 (raised where it was asked for)
            pipe.send(error)


def _train(setup: RunSetup, number: int, groups: int, pipe: Connection) -> GroupResult:
    task = TASKS[setup.task](setup.seed)
    chosen = make_policy(setup.policy, setup.batch, setup.options)

    def connect(layout: FlatLayout, row: torch.Tensor) -> ShardsClient:
        shares = Shares.equal(groups)
        parts, steppings = (
            torch.split(row, list(shares.cut(layout.numel))),
            layout.optimizer_specs(shares, chosen.outer),
        )
        # As arrays: tensors would be sent by descriptors.
        pipe.send({each: (parts[each].numpy(), steppings[each]) for each in range(groups)} if number == 0 else {})
        place: Address = _receive(pipe, _READY_S)
        return ShardsClient(number, layout.numel, shares, [[place]] * groups, _TOKEN)

    member = GroupOptimizer(connect, chosen, group=number, overlaps=setup.overlaps)
    settings = Settings(global_batch=setup.batch, seed=setup.seed * 100 + number, quiet=True)
    run = Run(Membership(World.join(settings, outer=member)))
    net = task.model(setup.seed)
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9)
    model, optimizer, loader = run.prepare(net, sgd, torch.utils.data.TensorDataset(*task.train))
    late: list[float] = []
    for _ in run.epochs(task.epochs):
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            late.append(member.stats.staleness)
    run.close()
    ended_s = time.monotonic()
    return GroupResult(ended_s, task.accuracy(model), statistics.mean(late or [0.0]), member.stats.waited_s, len(late))
