"""What a run has before `run.prepare` was called."""

from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements


class NoPlans:
    """Stands in for the plans of a run until there can be any."""

    current: Plan | None = None
    changes: tuple[tuple[int, Plan, str], ...] = ()
    measured: Measurements | None = None


class NotPrepared:
    """Stands in for the training loop until `run.prepare` was called."""

    in_batch = False
    step = 0
    position = DataPosition(0, 0)
    stats: tuple[StepStats, ...] = ()
    strategy: ShardingStrategy | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.split = world.split
        self.plans = NoPlans()
        self.metrics = MetricLog(shows=False)
        self.stage, self.shares = world.settings.stage_for(), world.settings.shares_for(world.world_size)

    def check_between_batches(self, call: str) -> None:
        """Allow any call: there is no global batch."""

    def require_all_ranks(self, call: str) -> None:
        """Allow any call: no rank is in a loop."""

    def close(self) -> None:
        """Release what the run holds."""
        if self._world.outer:
            self._world.outer.close()
        self._world.close()
