"""The ranks of a run as one of them sees them: settings, devices, process groups."""

from collections.abc import Callable

import torch

from mimatrix.comm.control.user_calls import Caller
from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.modules.precision import Precision
from mimatrix.engine.outer_optimizer import OuterOptimizer
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepTimer
from mimatrix.planner.mode_choice import ModeChoice
from mimatrix.planner.model.split import Split, resolve_batches
from mimatrix.profiler.fingerprints import device_name

NewGroup = Callable[[str], Group]
"""Gives a further process group of all ranks by name; `reduce` is the first."""


class World:
    """One rank and its peers. `World.join` makes it, together with the other ranks."""

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        device: torch.device,
        devices: list[str],
        main: Group | None,
        new_group: NewGroup | None,
        outer: OuterOptimizer | None = None,
        choice: ModeChoice | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.settings, self.rank, self.device, self.devices = settings, rank, device, devices
        self.main = main
        """The group in which gradients are reduced; None where there is one rank."""
        self.outer = outer
        """Who steps in place of the optimizer, where this run is one group of several."""
        self.timeout_s = timeout_s
        """How long to wait for a peer before it counts as lost."""
        self.choice = choice
        """What `mode="auto"` chose, from what, and why."""
        self.caller = main.endpoint.control.caller if main else Caller()
        """The thread of the user's script."""
        self.exchange = RankExchange(main)
        self.timer = StepTimer((main,) if main else (), device=device)
        self.split = Split.of(resolve_batches(settings.batch, settings.global_batch, devices), settings.micro_batch)
        """How the settings split a global batch; a plan may split it otherwise."""
        self.precisions = [settings.precision_for(number, name) for number, name in enumerate(devices)]
        self.precision = Precision(self.precisions[rank], device)
        self._new_group = new_group
        self._groups: list[Group] = []

    @classmethod
    def join(
        cls,
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        new_group: NewGroup | None = None,
        outer: OuterOptimizer | None = None,
        timeout_s: float = 300.0,
    ) -> "World":
        """Meet the other ranks, and check that all were given the same settings. A collective."""
        device = torch.device(device)
        new_group = new_group if world_size > 1 else None
        main = new_group("reduce") if new_group else None
        devices = _exchange_devices(RankExchange(main), settings, rank, device)
        return cls(
            settings,
            rank=rank,
            device=device,
            devices=devices,
            main=main,
            new_group=new_group,
            outer=outer,
            timeout_s=timeout_s,
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    def with_settings(self, settings: Settings, choice: ModeChoice | None = None) -> "World":
        """Return the same ranks with other settings, before any further group is made; `choice` is `mode="auto"`'s."""
        return World(
            settings,
            rank=self.rank,
            device=self.device,
            devices=self.devices,
            main=self.main,
            new_group=self._new_group,
            outer=self.outer,
            choice=choice,
            timeout_s=self.timeout_s,
        )

    def new_group(self, name: str, *, timed: bool = False) -> Group:
        """Make another group of all ranks, with a thread of its own; `timed`: its collectives are part of a step."""
        assert self._new_group, "a single rank has no groups"
        group = self._new_group(name)
        self._groups.append(group)
        if timed:
            self.timer.add_group(group)
        return group

    def close(self) -> None:
        """Close the further groups; the main one belongs to the process."""
        for group in self._groups:
            group.close()
        self._groups.clear()


def _exchange_devices(exchange: RankExchange, settings: Settings, rank: int, device: torch.device) -> list[str]:
    """Return the device names of all ranks, having compared their settings."""
    described = settings.to_json()
    messages = exchange.all_gather({"device": device_name(device), "settings": described})
    for other, message in enumerate(messages):
        for name, value in message["settings"].items():
            if value != described[name] and name != "quiet":
                raise UserError(
                    f"rank {other} was given {name} = {value!r} and rank {rank} {described[name]!r}; "
                    "give all ranks the same"
                )
    return [message["device"] for message in messages]
