"""Groups as processes under quotas, and a service for each of their runs, all on this machine.

Processes stay for many runs, since each takes seconds to import torch. The service is in the process that asks.
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
from mimatrix.launch.quotas import quotas

_TOKEN = "bench"
_READY_S, _RUN_S = 120.0, 180.0


@dataclass(frozen=True)
class Wanted:
    """One run."""

    task: str
    seed: int
    policy: str = "large"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 64
    """Of a push."""
    overlaps: bool = False
    """Whether groups compute while they push; what they compute then is later by all the others' pushes."""


@dataclass(frozen=True)
class Trained:
    """What became of it in one group."""

    ended_s: float
    accuracy: float
    """In percent, of what this group had in the end."""
    staleness: float
    waited_s: float
    pushes: int


class Town:
    """So many processors for each group; `with` it."""

    def __init__(self, cpus: tuple[float, ...]) -> None:
        self._cpus, self._stack = cpus, ExitStack()
        self._lines: list[Connection] = []

    def __enter__(self) -> "Town":
        joins = self._stack.enter_context(quotas(dict(enumerate(self._cpus))))
        context = multiprocessing.get_context("spawn")
        for number in range(len(self._cpus)):
            mine, theirs = context.Pipe()
            process = context.Process(target=_live, args=(number, len(self._cpus), theirs), daemon=True)
            process.start()
            self._stack.callback(process.kill)
            self._lines.append(mine)
            joins[number].write_text(str(_heard(mine, _READY_S)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trained(self, wanted: Wanted) -> list[Trained]:
        """All groups train; in the order in which they ended."""
        for line in self._lines:
            line.send(wanted)
        shards, *_ = [_heard(line, _READY_S) for line in self._lines]
        rules = make_policy(wanted.policy, wanted.batch, wanted.options).scaling
        made = {number: Shard(torch.from_numpy(values), how, rules) for number, (values, how) in shards.items()}
        service = ShardServer.open(made, _TOKEN)
        try:
            for line in self._lines:
                line.send(service.address)
            return sorted((_heard(line, _RUN_S) for line in self._lines), key=lambda each: each.ended_s)
        finally:
            service.close()


def _heard(line: Connection, within_s: float) -> Any:
    if not line.poll(within_s):
        raise TimeoutError(f"a group has said nothing for {within_s:g} s")
    found = line.recv()
    if isinstance(found, BaseException):
        raise found
    return found


def _live(number: int, groups: int, line: Connection) -> None:
    """A group: trains whatever is wanted, until nobody wants anything."""
    torch.set_num_threads(1)
    line.send(multiprocessing.current_process().pid)
    while True:
        try:
            wanted: Wanted = line.recv()
        except EOFError:
            return
        try:
            line.send(_trained(wanted, number, groups, line))
        except Exception as error:  # noqa: BLE001 (raised where it was asked for)
            line.send(error)


def _trained(wanted: Wanted, number: int, groups: int, line: Connection) -> Trained:
    task = TASKS[wanted.task](wanted.seed)
    chosen = make_policy(wanted.policy, wanted.batch, wanted.options)

    def connect(layout: FlatLayout, row: torch.Tensor) -> ShardsClient:
        shares = Shares.equal(groups)
        parts, steppings = (
            torch.split(row, list(shares.cut(layout.numel))),
            layout.optimizer_specs(shares, chosen.outer),
        )
        # As arrays: tensors would be sent by descriptors.
        line.send({each: (parts[each].numpy(), steppings[each]) for each in range(groups)} if number == 0 else {})
        place: Address = _heard(line, _READY_S)
        return ShardsClient(number, layout.numel, shares, [[place]] * groups, _TOKEN)

    member = GroupOptimizer(connect, chosen, group=number, overlaps=wanted.overlaps)
    settings = Settings(global_batch=wanted.batch, seed=wanted.seed * 100 + number, quiet=True)
    run = Run(Membership(World.join(settings, outer=member)))
    net = task.model(wanted.seed)
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
    return Trained(ended_s, task.accuracy(model), statistics.mean(late or [0.0]), member.stats.waited_s, len(late))
