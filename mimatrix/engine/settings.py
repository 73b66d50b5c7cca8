"""What `mimatrix.init` was given, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError, nearest
from mimatrix.engine.save_interval import SaveInterval
from mimatrix.planner.model.plan import Plan

Batch = Literal["auto"] | int | Sequence[int] | Mapping[int | str, int]
PRECISIONS = ("fp32", "bf16", "fp16")
PLANS = ("auto", "profile", "online")
"""What `plan` may name besides a file."""
_UNIT, _LARGE_UNIT = 8 << 20, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `mimatrix.init`, the same on every rank."""

    global_batch: int | None = None
    batch: Batch = "auto"
    micro_batch: int | Sequence[int] | None = None
    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    shares: Sequence[float] | None = None
    seed: int = 0
    precision: str | Mapping[int | str, str] = "fp32"
    max_grad_norm: float | None = None
    sync_batchnorm: bool = True
    unit_bytes: int | None = None
    quiet: bool = False
    plan: Plan | Path | str | None = None
    rebalance: bool | None = None
    checkpoint_every: float | str | None = None
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        if self.global_batch is not None and (not _is_count(self.global_batch) or self.global_batch < 1):
            raise UserError(f"global_batch is {self.global_batch!r}; give the number of samples in a step, at least 1")
        if self.stage not in ("auto", 0, 1, 2, 3) or isinstance(self.stage, bool):
            raise UserError(f'stage is {self.stage!r}; use 0, 1, 2, 3 or "auto"')
        if not _is_count(self.seed):
            raise UserError(f"seed is {self.seed!r}; give a whole number")
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise UserError(f"max_grad_norm is {self.max_grad_norm!r}; give a number above 0, or leave it out")
        if self.unit_bytes is not None and not (_is_count(self.unit_bytes) and self.unit_bytes > 0):
            raise UserError(f"unit_bytes is {self.unit_bytes!r}; give a number of bytes above 0, or leave it out")
        if self.shares is not None and not _are_numbers(self.shares):
            raise UserError(f"shares is {self.shares!r}; give a list with a number for each rank, such as [0.75, 0.25]")
        if not _is_count(self.max_failed_saves) or self.max_failed_saves < 1:
            raise UserError(
                f"max_failed_saves is {self.max_failed_saves!r}; give after how many failed saves in a row training "
                "stops, at least 1"
            )
        SaveInterval.parse(self.checkpoint_every)
        self._check_plan()
        names = self.precision.values() if isinstance(self.precision, Mapping) else [self.precision]
        for name in names:
            if name not in PRECISIONS:
                raise UserError(f'unknown precision "{name}"{nearest(str(name), PRECISIONS)}')

    @property
    def save_interval(self) -> SaveInterval | None:
        """How often the run saves by itself; None if it does not."""
        return SaveInterval.parse(self.checkpoint_every)

    @property
    def follows(self) -> bool:
        """Whether batches follow the speed that ranks show while training."""
        return self.rebalance if self.rebalance is not None else self.plan in PLANS

    def plan_with(self, *, has_loss: bool) -> Plan | Path | str | None:
        """Return `plan`, with "auto" decided: devices can be measured if `run.prepare` was given the loss."""
        if self.plan != "auto":
            return self.plan
        return "profile" if has_loss else "online"

    def _check_plan(self) -> None:
        if not isinstance(self.rebalance, bool | None):
            raise UserError(f"rebalance is {self.rebalance!r}; use True or False, or leave it out")
        if self.plan is None:
            if self.rebalance:
                raise UserError('rebalance needs a plan to begin with; use plan="auto", "online" or "profile"')
            return
        if self.batch != "auto":
            raise UserError("a plan sets how many samples each rank takes; leave out either plan or batch")
        if self.plan not in PLANS and (self.micro_batch is not None or self.shares is not None):
            what = "shares" if self.micro_batch is None else "micro_batch"
            raise UserError(f"a stored plan sets how batches and states are split; leave out either plan or {what}")
        if self.global_batch is None:
            raise UserError("a plan splits a global batch; set global_batch")

    def shares_for(self, world_size: int) -> Shares:
        """Return the part of the states that each rank owns: as given, otherwise equal."""
        if self.shares is None:
            return Shares.equal(world_size)
        if len(self.shares) != world_size:
            raise UserError(f"shares has {len(self.shares)} numbers for {world_size} ranks; give one for each rank")
        try:
            return Shares(tuple(float(share) for share in self.shares))
        except UserError:
            total = sum(self.shares)
            raise UserError(f"shares = {list(self.shares)} sums to {total:.6g}; shares must sum to 1") from None

    def stage_for(self) -> int:
        """Return the ZeRO stage; `auto` is 0 until a plan chooses."""
        return 0 if self.stage == "auto" else int(self.stage)

    def unit_bytes_for(self, stage: int, devices: Sequence[str]) -> int:
        """Return the size of a unit: as given, otherwise a good one for a stage and its devices.

        Units are large if a CPU has little to compute during a collective, and nothing is gathered for use.
        """
        large = stage <= 1 and all(device == "cpu" for device in devices)
        return self.unit_bytes or (_LARGE_UNIT if large else _UNIT)

    def precision_for(self, rank: int, device: str) -> str:
        """Return the precision of one rank: by its number, or by a part of its device's name."""
        if isinstance(self.precision, str):
            return self.precision
        for key, name in self.precision.items():
            if key == rank or (isinstance(key, str) and key.lower() in device.lower()):
                return name
        return "fp32"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for comparing what ranks were given."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Plan | Path):
        return str(value)
    return value if isinstance(value, str | int | float | None) else list(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: object) -> bool:
    return isinstance(values, Sequence) and all(_is_number(value) for value in values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
