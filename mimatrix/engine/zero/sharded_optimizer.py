"""The user's optimizer on this rank's shards of the parameters. Its class and settings stay."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.strategy import ParamShard

_TRIAL_LR = 0.1


class ShardedOptimizer:
    """An optimizer whose parameters are this rank's shards, or the parameters themselves where nothing is sharded."""

    def __init__(self, optimizer: Optimizer, shards: Iterable[ParamShard]) -> None:
        self.optimizer = optimizer
        self._shards = {shard.param.parameter: shard for shard in shards}
        self.original_params = [list(group["params"]) for group in optimizer.param_groups]
        """The model's own parameters, by the optimizer's param groups."""
        self.shard_params: dict[nn.Parameter, nn.Parameter] = {}
        """The tensor that the optimizer has for a parameter of the model."""
        self._grads: list[tuple[int, nn.Parameter, torch.Tensor]] = []

    @classmethod
    def attach(
        cls, optimizer: Optimizer, shards: Iterable[ParamShard], model_params: Collection[nn.Parameter]
    ) -> "ShardedOptimizer":
        """Replace the parameters of an optimizer by this rank's shards of them.

        Args:
            optimizer: The user's optimizer.
            shards: What this rank steps of each parameter.
            model_params: All parameters of the model: the optimizer may have no others.
        """
        _check_params(optimizer, model_params)
        sharded = cls(optimizer, shards)
        sharded._replace_params()
        return sharded

    def _replace_params(self) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [self._replace_param(param) for param in group["params"] if param in self._shards]
        # Where autograd leaves gradients with the parameters, there is nothing to assign.
        self._grads = [
            (shard.param.index, self.shard_params[parameter], shard.grad)
            for parameter, shard in self._shards.items()
            if parameter in self.shard_params and shard.grad is not None
        ]

    def find_shard(self, parameter: nn.Parameter) -> ParamShard | None:
        """Return what this rank steps of a parameter, if anything."""
        return self._shards.get(parameter) if parameter in self.shard_params else None

    def assign_grads(self, touched: Collection[int]) -> None:
        """Let the optimizer see the gradients of the parameters with these indices, and no others."""
        for index, param, grad in self._grads:
            param.grad = grad if index in touched else None

    def clear_grads(self) -> None:
        """Remove all gradients, so that the next backward pass begins without any."""
        for param in self.shard_params.values():
            param.grad = None

    def state_bytes(self) -> int:
        """Return the size of the optimizer's state."""
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def _replace_param(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer gets for a parameter, with the state that it has already."""
        shard = self._shards[parameter]
        shard_param = parameter if shard.value is parameter else nn.Parameter(shard.value)
        self.shard_params[parameter] = shard_param
        state = self.optimizer.state.pop(parameter, None)
        if state:
            self.optimizer.state[shard_param] = {
                key: _shard_state(value, parameter, shard) for key, value in state.items()
            }
        return shard_param


def _shard_state(value: Any, parameter: nn.Parameter, shard: ParamShard) -> Any:
    """Return the shard of what an optimizer has for each element; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or shard.value is parameter:
        return value
    return value.detach().reshape(-1)[shard.start : shard.stop].clone()


def _check_params(optimizer: Optimizer, model_params: Collection[nn.Parameter]) -> None:
    ids = {id(parameter) for parameter in model_params}
    unknown = sum(id(param) not in ids for group in optimizer.param_groups for param in group["params"])
    if unknown:
        raise UserError(
            f"the optimizer has {unknown} tensors that are not parameters of the model; "
            "create it from model.parameters() of the model that you prepare"
        )


def check_closure(optimizer: Optimizer) -> None:
    """Raise `UserError` for an optimizer that runs the model by itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(optimizer).__name__} runs the model several times in a step, which ranks cannot do together; "
            "use an optimizer whose step takes no closure"
        )


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Raise `UserError` for an optimizer that does not step each element of a tensor by itself.

    It is tried out with its own settings, on a tensor of ours and on the two halves of it.
    """
    name = type(optimizer).__name__
    fix = f"use stage 0, where it gets whole tensors, or another optimizer (stage is {stage})"
    groups, state = optimizer.param_groups, optimizer.state
    saved_groups = [dict(group) for group in groups]
    sample = next((param for group in saved_groups for param in group["params"]), None)
    if sample is None:
        return
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    start, *grads = (tensor.to(sample.device, sample.dtype) for tensor in tensors)
    try:
        for group in groups:
            whole = _try_steps(optimizer, group, [(slice(None), start)], grads)
            flat = start.reshape(-1)
            halves = _try_steps(
                optimizer,
                group,
                [(slice(0, 11), flat[:11].clone()), (slice(11, None), flat[11:].clone())],
                [grad.reshape(-1) for grad in grads],
            )
            if not torch.allclose(whole, halves, rtol=1e-4, atol=1e-6):
                raise UserError(f"{name} does not treat every element by itself, so its state cannot be sharded; {fix}")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} cannot step a part of a tensor ({error}); {fix}") from error
    finally:
        optimizer.state = state
        for group, saved in zip(groups, saved_groups, strict=True):
            group.update(saved)


def _try_steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    parts: list[tuple[slice, torch.Tensor]],
    grads: list[torch.Tensor],
) -> torch.Tensor:
    """Make two steps of one param group on tensors of ours, and return them flat."""
    params = [(where, nn.Parameter(value.clone())) for where, value in parts]
    optimizer.state = defaultdict(dict)
    for other in optimizer.param_groups:
        other["params"] = [param for _, param in params] if other is group else []
        # The learning rate of a warm-up may be 0, and a step would change nothing.
        if "lr" in other:
            is_tensor = isinstance(other["lr"], torch.Tensor)
            other["lr"] = torch.full_like(other["lr"], _TRIAL_LR) if is_tensor else _TRIAL_LR
    step: Callable[[Optimizer], Any] = type(optimizer).step
    for grad in grads:
        for where, param in params:
            param.grad = grad[where].clone()
        step(optimizer)
    return torch.cat([param.detach().reshape(-1) for _, param in params])
