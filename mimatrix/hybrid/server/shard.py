"""A slice of the flat parameters with its optimizer: pushes update it, pulls copy it."""

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
"""Of one parameter group of the optimizer: `lr` and the like."""
Replication = Callable[[], AbstractContextManager[object]]
"""A scope in which the replica applies the same change; when it exits, the replica has applied it."""
MOMENTUM_KEYS = ("momentum_buffer",)
"""Keys of optimizer state that has the magnitude of a step."""


class MovedError(WorldError):
    """The shard is served elsewhere now."""


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """Parameters of one version, which do not change any more."""

    values: torch.Tensor
    version: int
    samples: int
    """Samples applied up to this version."""


@dataclass(frozen=True, slots=True)
class ParamSpan:
    """The part of one parameter that lies in a shard."""

    parameter: int
    group: int
    """The parameter group of the optimizer."""
    numel: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """How to step a shard: the class of the optimizer, its hyperparameters, and the spans in order."""

    kind: type[Optimizer]
    hyperparameters: tuple[Hyperparameters, ...]
    spans: tuple[ParamSpan, ...]

    def build(self, flat: torch.Tensor) -> tuple[Optimizer, dict[int, nn.Parameter]]:
        """Build the optimizer on views of a flat tensor; also return these views by parameter number."""
        views = torch.split(flat, [span.numel for span in self.spans])
        params = {span.parameter: nn.Parameter(view) for span, view in zip(self.spans, views, strict=True)}
        groups = [
            {**hyperparameters, "params": [params[span.parameter] for span in self.spans if span.group == number]}
            for number, hyperparameters in enumerate(self.hyperparameters)
        ]
        return self.kind(groups), params  # type: ignore[call-arg]  # the defaults of subclasses have defaults


class Shard:
    """A contiguous slice of the flat parameters.

    Double-buffered: a push updates one copy while pulls read the other, so that no client sees half an update.
    """

    def __init__(self, values: torch.Tensor, spec: OptimizerSpec, scaling: PushScaling) -> None:
        self._values = values.detach().clone()
        self._optimizer, self._params = spec.build(self._values)
        self._scaling = scaling
        self._factor: float | None = None
        self._default_hyperparameters = spec.hyperparameters
        self._round: list[tuple[int, torch.Tensor, set[int]]] = []
        """Samples, gradients and parameters without gradient of pushes that wait for others (`pushes_per_step`)."""
        self._changed = Condition()
        """Guards everything below; notified of every change that a thread may wait for."""
        self._hold: ShardHold | None = None
        self._is_retired = False
        self.log = PushLog()
        self.origin = ""
        """The checkpoint that the shard was loaded from."""
        self._published = ShardSnapshot(self._values.clone(), 0, 0)

    def pull(self) -> ShardSnapshot:
        """Return the newest complete version."""
        return self._published

    def push(
        self,
        push: Push,
        gradient: torch.Tensor,
        hyperparameters: Sequence[Hyperparameters] = (),
        without_grad: Collection[int] = (),
        replication: Replication = nullcontext,
    ) -> AppliedPush:
        """Step with a group's mean gradient.

        The new version is published after `replication` has exited: what a client has seen must not be lost.

        Args:
            push: The metadata.
            gradient: One value for each element of this shard.
            hyperparameters: What the group's schedulers have set, for each parameter group.
            without_grad: Parameters that had no gradient and are not stepped.
            replication: A scope in which the replica applies the same push.
        """
        arrived_s = time.monotonic()
        with self._changed:
            while (hold := self._active_hold()) and not hold.admits(push, self.log):
                self._changed.wait(hold.remaining_s)
            waited_s = time.monotonic() - arrived_s
            self._check_current()
            duplicate = self.log.find_duplicate(push)
            if duplicate:
                return duplicate
            with replication():
                applied = self._apply(push, gradient, hyperparameters or self._default_hyperparameters, without_grad)
            self._published = ShardSnapshot(self._values.clone(), applied.version, self.log.samples)
            self._changed.notify_all()
            return replace(applied, waited_s=waited_s)

    def hold(self, owner: object, lease_s: float, timeout_s: float) -> PushLog:
        """Block pushes until `release`, or until the lease expires; return what was applied before.

        Raises:
            WorldError: Others have held the shard for longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (other := self._active_hold()) and other.owner is not owner:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise WorldError(f"other groups have held the shard for {timeout_s:g} s; try again")
                self._changed.wait(min(remaining_s, other.remaining_s))
            self._hold = ShardHold(owner, time.monotonic() + lease_s)
            return deepcopy(self.log)

    def copy_at(
        self, owner: object, admitted: Mapping[int, int], disconnected: Collection[int], timeout_s: float
    ) -> ShardState:
        """Apply the pushes that other shards have already, and copy the shard with these and no others.

        Args:
            owner: The client that holds the shard.
            admitted: The last push of each group that any shard has.
            disconnected: Groups that are gone; their missing pushes are given up after `timeout_s`.
            timeout_s: How long to wait for the pushes.
        """
        with self._changed:
            self._require_hold(owner).admitted = admitted
            self._changed.notify_all()
            self._changed.wait_for(lambda: not missing_pushes(admitted, self.log), timeout_s)
            for group in disconnected:
                self.log.give_up(group, admitted[group])
            self._require_hold(owner)
            for group, number in missing_pushes(admitted, self.log).items():
                raise WorldError(
                    f"push {number} of group {group} reached only some shards within {timeout_s:g} s; save again"
                )
            return deepcopy(self._state())

    def release(self, owner: object) -> None:
        """Admit pushes again, if `owner` holds the shard."""
        with self._changed:
            if self._hold and self._hold.owner is owner:
                self._hold = None
                self._changed.notify_all()

    def join(self, group: int, number: int, incarnation: int, replication: Replication = nullcontext) -> None:
        """Let a group join, perhaps again: its next push is the one after `number`."""
        with self._changed:
            self._check_current()
            with replication():
                self.log.join(group, number, incarnation)

    def retire(self, successor: PushLog | None = None) -> bool:
        """Refuse all changes from now on, since another copy takes the place of this one.

        Args:
            successor: What the other copy has applied. If it lacks a push of this copy, nothing changes.

        Returns:
            Whether this copy is retired.
        """
        with self._changed:
            if successor and not successor.contains(self.log):
                return False
            self._is_retired = True
            self._changed.notify_all()
            return True

    def save(self) -> ShardState:
        """Return a copy of the state at one version."""
        with self._changed:
            return deepcopy(self._state())

    @contextmanager
    def locked_state(self) -> Iterator[ShardState | None]:
        """Yield the state while no push can change it; None in the middle of a round, which a copy would not know."""
        with self._changed:
            yield None if self._round else self._state()

    def load(self, state: ShardState, replication: Replication = nullcontext, owner: object = None) -> None:
        """Continue from a saved state.

        Args:
            state: The state.
            replication: A scope in which the replica loads the same state.
            owner: If given, it must hold the shard, so that no push was applied in the meantime.
        """
        with self._changed:
            self._check_current()
            if owner is not None:
                self._require_hold(owner)
            with replication():
                self._values.copy_(state.values)
                self._optimizer.state.clear()
                for number, param_state in deepcopy(state.optimizer_state).items():
                    self._optimizer.state[self._params[number]] = param_state
                self._factor, self.log, self.origin = state.factor, deepcopy(state.log), state.origin
                self._round.clear()
            self._published = ShardSnapshot(self._values.clone(), self.log.version, self.log.samples)

    def _apply(
        self,
        push: Push,
        gradient: torch.Tensor,
        hyperparameters: Sequence[Hyperparameters],
        without_grad: Collection[int],
    ) -> AppliedPush:
        if self._scaling.pushes_per_step:
            return self._apply_to_round(push, gradient, hyperparameters, without_grad)
        factor = self._scaling.factor(push.nominal_samples, self.log.staleness(push), self.log.samples)
        self._step(gradient, factor, hyperparameters, without_grad)
        return self.log.record(push)

    def _apply_to_round(
        self,
        push: Push,
        gradient: torch.Tensor,
        hyperparameters: Sequence[Hyperparameters],
        without_grad: Collection[int],
    ) -> AppliedPush:
        """Step once enough groups have pushed on this version; later pushes are acknowledged but do not count."""
        if self.log.staleness(push):
            return self.log.record(push, 0)
        self._round.append((push.samples, gradient.clone(), set(without_grad)))
        if len(self._round) < self._scaling.pushes_per_step:
            return self.log.record(push, 0)
        samples = sum(count for count, _, _ in self._round)
        mean = torch.stack([pushed * (count / samples) for count, pushed, _ in self._round]).sum(0)
        self._step(mean, 1.0, hyperparameters, set.intersection(*(numbers for _, _, numbers in self._round)))
        self._round.clear()
        return self.log.record(push, samples)

    def _state(self) -> ShardState:
        states = {number: self._optimizer.state.get(param, {}) for number, param in self._params.items()}
        return ShardState(
            values=self._values,
            optimizer_state={number: state for number, state in states.items() if state},
            factor=self._factor,
            log=self.log,
            origin=self.origin,
        )

    def _active_hold(self) -> ShardHold | None:
        """Return the hold unless it has expired."""
        if self._hold and not self._hold.remaining_s:
            self._hold = None
        return self._hold

    def _check_current(self) -> None:
        if self._is_retired:
            raise MovedError("the shard moved to its replica")

    def _require_hold(self, owner: object) -> ShardHold:
        hold = self._active_hold()
        if hold is None or hold.owner is not owner or self._is_retired:
            raise WorldError("the hold on a shard expired, or the shard moved to its replica; try again")
        return hold

    def _step(
        self,
        gradient: torch.Tensor,
        factor: float,
        hyperparameters: Sequence[Hyperparameters],
        without_grad: Collection[int],
    ) -> None:
        self._correct_momentum(self._scaling.correction(self._factor, factor))
        self._factor = factor
        for group, current in zip(self._optimizer.param_groups, hyperparameters, strict=True):
            group.update({name: _like(value, group[name]) for name, value in current.items() if name in group})
            group["lr"] = current["lr"] * factor
        parts = torch.split(gradient, [param.numel() for param in self._params.values()])
        for (number, param), part in zip(self._params.items(), parts, strict=True):
            param.grad = None if number in without_grad else part
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _correct_momentum(self, factor: float) -> None:
        if factor == 1.0:
            return
        for state in self._optimizer.state.values():
            for key in MOMENTUM_KEYS:
                if isinstance(state.get(key), torch.Tensor):
                    state[key].mul_(factor)


def _like(value: Any, current: Any) -> Any:
    """Return a list as a tuple where the optimizer has a tuple; JSON has only lists."""
    return tuple(value) if isinstance(current, tuple) else value
