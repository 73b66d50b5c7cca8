"""A part of the parameters with its optimizer: pushes change it, pulls copy it."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.hold import ShardHold, missing_pushes
from mimatrix.hybrid.server.push_log import AppliedPush, Push, PushLog
from mimatrix.hybrid.server.state import ShardState

Hyperparameters = Mapping[str, Any]
"""Of one of the optimizer's groups of parameters: `lr` and the like."""
Replication = Callable[[], AbstractContextManager[object]]
"""While it lasts the mirror does the same; at its end the mirror has done so."""
MOMENTUM_KEYS = ("momentum_buffer",)
"""What optimizers keep that has the size of a step."""


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """Parameters of one version; nobody changes them any more."""

    values: torch.Tensor
    version: int
    samples: int
    """That were pushed for it."""


@dataclass(frozen=True, slots=True)
class ParamSpan:
    """What a shard has of one parameter."""

    parameter: int
    group: int
    """Of the optimizer's groups."""
    count: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """How a shard is stepped: the class of the user's optimizer, its settings, and the pieces in their order."""

    kind: type[Optimizer]
    settings: tuple[Hyperparameters, ...]
    pieces: tuple[ParamSpan, ...]

    def made(self, flat: torch.Tensor) -> tuple[Optimizer, dict[int, nn.Parameter]]:
        """An optimizer of that class on parts of a flat tensor, and these by the numbers of their parameters."""
        parts = torch.split(flat, [piece.count for piece in self.pieces])
        leaves = {piece.parameter: nn.Parameter(part) for piece, part in zip(self.pieces, parts, strict=True)}
        groups = [
            {**settings, "params": [leaves[piece.parameter] for piece in self.pieces if piece.group == number]}
            for number, settings in enumerate(self.settings)
        ]
        return self.kind(groups), leaves  # type: ignore[call-arg]  # the defaults of subclasses have defaults


class Shard:
    """Flat parameters from some element on to another.

    Double-buffered: a push is worked into one copy while pulls read the other, so that nobody reads half an update.
    """

    def __init__(self, values: torch.Tensor, stepping: OptimizerSpec, rules: PushScaling) -> None:
        self._values = values.detach().clone()
        self._optimizer, self._leaves = stepping.made(self._values)
        self._rules = rules
        self._factor: float | None = None
        self._usual = stepping.settings
        self._round: list[tuple[int, torch.Tensor, set[int]]] = []
        """Samples, gradients and what they do not touch, of pushes that wait for others."""
        self._changed = Condition()
        """The lock of all that follows; told of whenever somebody may wait for it."""
        self._hold: ShardHold | None = None
        self.ledger = PushLog()
        self.origin = ""
        """The checkpoint that it began from."""
        self._shown = ShardSnapshot(self._values.clone(), 0, 0)

    def pull(self) -> ShardSnapshot:
        """The newest whole version."""
        return self._shown

    def push(
        self,
        push: Push,
        gradient: torch.Tensor,
        settings: Sequence[Hyperparameters] = (),
        untouched: Collection[int] = (),
        mirrored: Replication = nullcontext,
    ) -> AppliedPush:
        """Step by a group's mean gradient; `settings`: what its schedulers say now, for each group of parameters.

        Parameters that are `untouched` had no gradient, and are not stepped.
        Nobody pulls the new version before `mirrored` is over: what was seen must not be lost.
        """
        came_s = time.monotonic()
        with self._changed:
            while (hold := self._held()) and not hold.lets(push, self.ledger):
                self._changed.wait(hold.left_s)
            waited_s = time.monotonic() - came_s
            known = self.ledger.known(push)
            if known:
                return known
            with mirrored():
                found = self._enter(push, gradient, settings or self._usual, untouched)
            self._shown = ShardSnapshot(self._values.clone(), found.version, self.ledger.samples)
            self._changed.notify_all()
            return replace(found, waited_s=waited_s)

    def _enter(
        self, push: Push, gradient: torch.Tensor, settings: Sequence[Hyperparameters], untouched: Collection[int]
    ) -> AppliedPush:
        if self._rules.pushes_per_step:
            return self._gather(push, gradient, settings, untouched)
        factor = self._rules.factor(push.nominal, self.ledger.staleness(push), self.ledger.samples)
        self._step(gradient, factor, settings, untouched)
        return self.ledger.enter(push)

    def hold(self, owner: object, lease_s: float, patience_s: float) -> PushLog:
        """Let no further push in until `release`, or for so long; what came in before."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            while (other := self._held()) and other.owner is not owner:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WorldError(f"others have looked at the shard for {patience_s:g} s; try again")
                self._changed.wait(min(left_s, other.left_s))
            self._hold = ShardHold(owner, time.monotonic() + lease_s)
            return deepcopy(self.ledger)

    def let(self, owner: object, upto: Mapping[int, int], gone: Collection[int], patience_s: float) -> ShardState:
        """Let in what other shards have already, wait for it, and copy the shard with that and nothing else.

        What groups that are `gone` still owe then is given up.
        """
        with self._changed:
            self._held_by(owner).upto = upto
            self._changed.notify_all()
            self._changed.wait_for(lambda: not missing_pushes(upto, self.ledger), patience_s)
            for group in gone:
                self.ledger.forgo(group, upto[group])
            self._held_by(owner)
            for group, number in missing_pushes(upto, self.ledger).items():
                raise WorldError(f"push {number} of group {group} came to some shards only within {patience_s:g} s")
            return deepcopy(self._kept())

    def release(self, owner: object) -> None:
        """Pushes come in again."""
        with self._changed:
            if self._hold and self._hold.owner is owner:
                self._hold = None
                self._changed.notify_all()

    def join(self, group: int, number: int, life: int, mirrored: Replication = nullcontext) -> None:
        """A group comes, perhaps once more: its pushes go on after `number`."""
        with self._changed, mirrored():
            self.ledger.join(group, number, life)

    def save(self) -> ShardState:
        """All of it at one version."""
        with self._changed:
            return deepcopy(self._kept())

    @contextmanager
    def unchanged(self) -> Iterator[ShardState | None]:
        """All of it, which stays so meanwhile; None in the middle of a round, of which others would know nothing."""
        with self._changed:
            yield None if self._round else self._kept()

    def load(self, kept: ShardState, mirrored: Replication = nullcontext, owner: object = None) -> None:
        """Go on from there; an `owner` must hold the shard, or something may have been pushed meanwhile."""
        with self._changed:
            if owner is not None:
                self._held_by(owner)
            with mirrored():
                self._values.copy_(kept.values)
                self._optimizer.state.clear()
                for number, state in deepcopy(kept.states).items():
                    self._optimizer.state[self._leaves[number]] = state
                self._factor, self.ledger, self.origin = kept.factor, deepcopy(kept.ledger), kept.origin
                self._round.clear()
            self._shown = ShardSnapshot(self._values.clone(), self.ledger.version, self.ledger.samples)

    def _gather(
        self, push: Push, gradient: torch.Tensor, settings: Sequence[Hyperparameters], untouched: Collection[int]
    ) -> AppliedPush:
        """Step when enough groups have pushed on this version; who comes later is told so, and not heard."""
        if self.ledger.staleness(push):
            return self.ledger.enter(push, 0)
        self._round.append((push.samples, gradient.clone(), set(untouched)))
        if len(self._round) < self._rules.pushes_per_step:
            return self.ledger.enter(push, 0)
        samples = sum(count for count, _, _ in self._round)
        mean = torch.stack([each * (count / samples) for count, each, _ in self._round]).sum(0)
        self._step(mean, 1.0, settings, set.intersection(*(each for _, _, each in self._round)))
        self._round.clear()
        return self.ledger.enter(push, samples)

    def _kept(self) -> ShardState:
        states = {number: self._optimizer.state.get(leaf, {}) for number, leaf in self._leaves.items()}
        return ShardState(
            self._values,
            {number: state for number, state in states.items() if state},
            self._factor,
            self.ledger,
            self.origin,
        )

    def _held(self) -> ShardHold | None:
        """Who holds pushes back now, if anybody does."""
        if self._hold and not self._hold.left_s:
            self._hold = None
        return self._hold

    def _held_by(self, owner: object) -> ShardHold:
        hold = self._held()
        if hold is None or hold.owner is not owner:
            raise WorldError("the shard was held for too long, or has moved meanwhile; try again")
        return hold

    def _step(
        self, gradient: torch.Tensor, factor: float, settings: Sequence[Hyperparameters], untouched: Collection[int]
    ) -> None:
        self._correct(self._rules.correction(self._factor, factor))
        self._factor = factor
        for group, now in zip(self._optimizer.param_groups, settings, strict=True):
            group.update({name: _like(value, group[name]) for name, value in now.items() if name in group})
            group["lr"] = now["lr"] * factor
        parts = torch.split(gradient, [leaf.numel() for leaf in self._leaves.values()])
        for (number, leaf), part in zip(self._leaves.items(), parts, strict=True):
            leaf.grad = None if number in untouched else part
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _correct(self, by: float) -> None:
        if by == 1.0:
            return
        for state in self._optimizer.state.values():
            for name in MOMENTUM_KEYS:
                if isinstance(state.get(name), torch.Tensor):
                    state[name].mul_(by)


def _like(value: Any, known: Any) -> Any:
    """JSON has lists where optimizers have tuples."""
    return tuple(value) if isinstance(known, tuple) else value
