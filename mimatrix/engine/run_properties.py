"""What a run tells of itself: its ranks and devices, where it is, its plan and what it has measured."""

from abc import ABC, abstractmethod

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.availability import TransportStatus
from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.not_prepared import NotPrepared
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.planner.mode_choice import ModeChoice
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements
from mimatrix.planner.model.split import Split


class RunProperties(ABC):
    """What can be read of a `Run`."""

    _world: World
    _loop: TrainLoop | NotPrepared

    @abstractmethod
    def _prepared(self) -> TrainLoop:
        """Return the training loop; refuse if nothing is prepared yet."""

    @property
    def rank(self) -> int:
        """The rank of this process; in hybrid mode within its group."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; in hybrid mode of this group."""
        return self._world.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._world.device

    @property
    def devices(self) -> list[str]:
        """The names of all ranks' devices."""
        return self._world.devices

    @property
    def transports(self) -> tuple[TransportStatus, ...]:
        """What can carry tensors between the ranks, by device, and why the rest cannot; empty for a single process."""
        return self._world.main.transport_status() if self._world.main else ()

    @property
    def settings(self) -> Settings:
        """What `mimatrix.init` was given."""
        return self._world.settings

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._loop.stage

    @property
    def shares(self) -> Shares:
        """The part of the sharded states that each rank owns."""
        return self._loop.shares

    @property
    def step(self) -> int:
        """The number of global batches done."""
        return self._loop.step

    @property
    def position(self) -> DataPosition:
        """The next global batch: its epoch, and its number in the epoch."""
        return self._loop.position

    @property
    def split(self) -> Split:
        """How the next global batch is split over the ranks."""
        return self._loop.split

    @property
    def grad_norm(self) -> float:
        """The norm of the last global batch's gradient, over the whole model and before clipping."""
        norm = self._prepared().grad_norm
        if norm is None:
            raise UserError(
                "the norm of the gradient is not known yet, or not computed; read it after a step, and give "
                'mimatrix.init max_grad_norm=..., or float("inf") to clip nothing'
            )
        return norm

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside a global batch, where collective calls such as `save` are refused."""
        return self._loop.in_batch

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, values) of what was logged, in the order in which it was recorded; a step may have several entries."""
        return self.history_from(0)

    def history_from(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """Return `history` from the `start`-th entry on; negative numbers count from the last."""
        return self._loop.metrics.history(start)

    @property
    def plan(self) -> Plan | None:
        """The plan that was agreed on last, if the run has one."""
        return self._loop.plans.current

    @property
    def plan_changes(self) -> list[tuple[int, Plan, str]]:
        """(step, plan, reason) for each change of the plan."""
        return list(self._loop.plans.changes)

    @property
    def measurements(self) -> Measurements | None:
        """The profiles of all ranks, where they were measured for the plan."""
        return self._loop.plans.measured

    @property
    def mode_choice(self) -> ModeChoice | None:
        """What `mode="auto"` chose in `prepare`, from what, and why."""
        return self._world.choice

    def stats(self) -> list[StepStats]:
        """Return where the time of each step went, for the last thousand steps."""
        return list(self._loop.stats)
