"""The optimizer as the user's loop sees it, and who really steps at the end of a global batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.outer_optimizer import OuterOptimizer
from mimatrix.engine.step_timer import StepTimer


class StepCallback(Protocol):
    """Called for each `optimizer.step` of the user's loop."""

    def __call__(self, *, has_lr_scheduler: bool) -> None:
        """Do what is due; `has_lr_scheduler`: whether an lr scheduler was made of the optimizer."""


class PreparedOptimizer(Optimizer):
    """What `run.prepare` returns for an optimizer: `step` acts at the end of each global batch and at no other time.

    Everything else is the wrapped optimizer's own, which is in `optimizer`: attributes are read and set there.
    `zero_grad` does nothing, because gradients end with the step that used them; where a plain loop would lose a
    gradient by it, it is refused.
    """

    optimizer: Optimizer
    _OWN = ("optimizer", "step", "_on_step", "_on_zero_grad")
    """`step`, because an lr scheduler that is made of it replaces it to count its calls."""

    def __init__(
        self, optimizer: Optimizer, on_step: StepCallback, on_zero_grad: Callable[[], None] = lambda: None
    ) -> None:
        # Not Optimizer's constructor, which would take the parameters over.
        self.optimizer, self._on_step, self._on_zero_grad = optimizer, on_step, on_zero_grad

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being unpickled or copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        raise UserError("a prepared optimizer belongs to its run and cannot be copied; use run.save() and run.load()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's param groups; in stages 1 to 3 they hold this rank's shards."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, of this rank's shards."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step if this rank has done its part of the global batch; otherwise do nothing yet."""
        if closure is not None:
            raise UserError("optimizer.step takes no closure here; call run.backward(loss) before it")
        self._on_step(has_lr_scheduler=self._has_lr_scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (as torch calls it)
        """Do nothing: gradients end with the step that used them. Refuse where one would be lost."""
        self._on_zero_grad()

    @property
    def _has_lr_scheduler(self) -> bool:
        """Whether an lr scheduler was made of this optimizer or of the wrapped one."""
        return any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in (self, self.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 (as torch calls it)
        """Refuse: the parameters are distributed over the ranks already."""
        raise UserError("a param group was added after run.prepare; give the optimizer all of them before")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; refused where it is sharded."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; refused where it is sharded."""
        self.optimizer.load_state_dict(state_dict)


def refuse_sharded_state_dict(optimizer: Optimizer) -> None:
    """Make `state_dict` and `load_state_dict` of an optimizer fail: a rank has only its shards of the state."""

    def refuse_state_dict(*_: Any) -> None:
        raise UserError("the optimizer's state is sharded over the ranks; use run.save() and run.load()")

    def refuse_load_state_dict(*_: Any) -> None:
        raise UserError(
            "the optimizer's state is sharded over the ranks; load it before run.prepare, or use run.load()"
        )

    optimizer.register_state_dict_pre_hook(refuse_state_dict)
    optimizer.register_load_state_dict_pre_hook(refuse_load_state_dict)


class Stepper(Protocol):
    """Updates the parameters at the end of a global batch, when all gradients are there."""

    def step(self, micro: MicroBatch) -> None:
        """Update this rank's parameters."""

    def close(self) -> None:
        """Let go of the user's optimizer."""


class OptimizerStepper:
    """Steps the user's optimizer, and refuses steps that the loop asks of it directly."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_stepping = False
        self._guards: list[RemovableHandle] = []

    @classmethod
    def attach(cls, optimizer: Optimizer) -> "OptimizerStepper":
        """Take an optimizer over: from now on only this object may step it.

        Raises:
            UserError: Another run has it.
        """
        hooks = optimizer._optimizer_step_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), cls) for hook in hooks):
            raise UserError("the optimizer belongs to another run; call close() on that run first")
        stepper = cls(optimizer)
        stepper._guards.append(optimizer.register_step_pre_hook(stepper._refuse))
        return stepper

    def step(self, micro: MicroBatch) -> None:  # noqa: ARG002 (steppers differ)
        """Step the optimizer."""
        self.step_optimizer()

    def step_optimizer(self) -> None:
        """Step the optimizer."""
        with self._stepping():
            self._optimizer.step()

    def close(self) -> None:
        """Let others step the optimizer again."""
        while self._guards:
            self._guards.pop().remove()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _refuse(self, *_: Any) -> None:
        if not self._is_stepping:
            raise UserError(
                "optimizer.step was called on the optimizer that was given to run.prepare; call it on the one that "
                "run.prepare returned"
            )


class OuterStepper:
    """Lets an outer optimizer step, which may let the user's one step first."""

    def __init__(
        self, outer: OuterOptimizer, optimizer: Optimizer, inner: OptimizerStepper, global_batch: int, timer: StepTimer
    ) -> None:
        self._outer, self._optimizer, self._inner = outer, optimizer, inner
        self._global_batch, self._timer = global_batch, timer

    def step(self, micro: MicroBatch) -> None:
        """Step with the other groups."""
        with self._timer.exposed():
            self._outer.step(micro.global_samples, self._global_batch, self._inner.step_optimizer)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # lr schedulers look at it

    def close(self) -> None:
        """Let others step the optimizer again."""
        self._inner.close()
