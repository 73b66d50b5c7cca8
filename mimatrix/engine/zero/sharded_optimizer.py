"""The user's optimizer, given for every parameter the slice that this rank owns. Its class and settings stay."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.strategy import ParamShard

_LR = 0.1


class ShardedOptimizer:
    """An optimizer whose parameters are slices; or the parameters themselves where nothing is cut."""

    def __init__(self, optimizer: Optimizer, slices: Iterable[ParamShard], known: Collection[nn.Parameter]) -> None:
        self.optimizer = optimizer
        _check_known(optimizer, known)
        self._slices = {shard.param.parameter: shard for shard in slices}
        self.given = [list(group["params"]) for group in optimizer.param_groups]
        """The model's own parameters, by the optimizer's groups."""
        self.leaves: dict[nn.Parameter, nn.Parameter] = {}
        """The tensor that the optimizer has for a parameter of the model."""
        for group in optimizer.param_groups:
            group["params"] = [self._leaf(each) for each in group["params"] if each in self._slices]
        shards = ((self._slices[parameter], leaf) for parameter, leaf in self.leaves.items())
        self._assigned = [(shard.param.index, leaf, shard.grad) for shard, leaf in shards if shard.grad is not None]

    def slice_of(self, parameter: nn.Parameter) -> ParamShard | None:
        """What this rank owns of a parameter, if it steps it."""
        return self._slices.get(parameter) if parameter in self.leaves else None

    def give(self, touched: Collection[int]) -> None:
        """Let the optimizer see the gradients of the parameters with these numbers."""
        for index, leaf, grad in self._assigned:
            leaf.grad = grad if index in touched else None

    def take_away(self) -> None:
        """No gradient any more, so that the next backward pass begins with none."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def state_bytes(self) -> int:
        """What the optimizer keeps."""
        states = self.optimizer.state.values()
        return sum(
            value.numel() * value.element_size()
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        found = self._slices[parameter]
        leaf = parameter if found.value is parameter else nn.Parameter(found.value)
        self.leaves[parameter] = leaf
        state = self.optimizer.state.pop(parameter, None)
        if state:
            self.optimizer.state[leaf] = {key: _cut(value, parameter, found) for key, value in state.items()}
        return leaf


def _cut(value: Any, parameter: nn.Parameter, found: ParamShard) -> Any:
    """A slice of what an optimizer keeps for each element; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or found.value is parameter:
        return value
    return value.detach().reshape(-1)[found.start : found.stop].clone()


def _check_known(optimizer: Optimizer, known: Collection[nn.Parameter]) -> None:
    ids = {id(parameter) for parameter in known}
    strangers = sum(id(each) not in ids for group in optimizer.param_groups for each in group["params"])
    if strangers:
        raise UserError(
            f"the optimizer has {strangers} tensors that are no parameters of the model; "
            "make it from model.parameters() of the model that you prepare"
        )


def check_steps(optimizer: Optimizer) -> None:
    """Refuse an optimizer that runs the model by itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(optimizer).__name__} runs the model several times in a step, which ranks cannot do together; "
            "use an optimizer whose step takes no closure"
        )


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Refuse an optimizer that does something else with a tensor's two halves than with the whole.

    It is tried: on a tensor of its own, with its own settings, then on the halves.
    """
    name = type(optimizer).__name__
    way_out = f"use stage 0, where it gets whole tensors, or another optimizer (stage is {stage})"
    groups, state = optimizer.param_groups, optimizer.state
    kept = [dict(group) for group in groups]
    sample = next((each for group in kept for each in group["params"]), None)
    if sample is None:
        return
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    start, *gradients = (each.to(sample.device, sample.dtype) for each in made)
    try:
        for group in groups:
            whole = _tried(optimizer, group, [(slice(None), start)], gradients)
            flat = start.reshape(-1)
            halves = _tried(
                optimizer,
                group,
                [(slice(0, 11), flat[:11].clone()), (slice(11, None), flat[11:].clone())],
                [gradient.reshape(-1) for gradient in gradients],
            )
            if not torch.allclose(whole, halves, rtol=1e-4, atol=1e-6):
                raise UserError(
                    f"{name} does not treat every element by itself, so its tensors cannot be cut; {way_out}"
                )
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} cannot step a part of a tensor ({error}); {way_out}") from error
    finally:
        optimizer.state = state
        for group, before in zip(groups, kept, strict=True):
            group.update(before)


def _tried(
    optimizer: Optimizer,
    group: dict[str, Any],
    parts: list[tuple[slice, torch.Tensor]],
    gradients: list[torch.Tensor],
) -> torch.Tensor:
    """Two steps of one param group on tensors of our own; what they end with, flat."""
    leaves = [(where, nn.Parameter(value.clone())) for where, value in parts]
    optimizer.state = defaultdict(dict)
    for each in optimizer.param_groups:
        each["params"] = [leaf for _, leaf in leaves] if each is group else []
        # With the 0 of a warm-up, or very little, nothing would be seen.
        if "lr" in each:
            each["lr"] = torch.full_like(each["lr"], _LR) if isinstance(each["lr"], torch.Tensor) else _LR
    step: Callable[[Optimizer], Any] = type(optimizer).step
    for gradient in gradients:
        for where, leaf in leaves:
            leaf.grad = gradient[where].clone()
        step(optimizer)
    return torch.cat([leaf.detach().reshape(-1) for _, leaf in leaves])
