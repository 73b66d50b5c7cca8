"""The ranks of a run as one of them sees them: what all were given, what they compute on, and how they talk."""

from collections.abc import Callable

import torch

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.modules.precision import Precision
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepTimer
from mimatrix.planner.split import Split, resolve_batches


class World:
    """One rank and its peers. `group` gives further groups of the same ranks by name; without, there is one rank."""

    def __init__(
        self, settings: Settings, group: Callable[[str], Group] | None, rank: int, ranks: int, device: torch.device
    ) -> None:
        self.settings, self.rank, self.ranks, self.device = settings, rank, ranks, device
        self._group = group if ranks > 1 else None
        self._further: list[Group] = []
        self.main = self._group("reduce") if self._group else None
        """In which gradients are summed; None where there is one rank."""
        self.exchange = RankExchange(self.main)
        self.watch = StepTimer((self.main,) if self.main else (), device=device)
        self.devices = self._agree()
        """The kinds of all ranks' devices."""
        self.split = Split.of(
            resolve_batches(settings.batch, settings.global_batch, self.devices), settings.micro_batch
        )
        """How the settings cut a global batch; a plan may cut it otherwise."""
        self.precisions = [settings.precision_for(rank, device) for rank, device in enumerate(self.devices)]
        self.precision = Precision(self.precisions[rank], device)

    def further(self, name: str) -> Group:
        """Another group of all ranks, with a thread of its own."""
        assert self._group
        self._further.append(self._group(name))
        return self._further[-1]

    def further_watched(self, name: str) -> Group:
        """The same; what it takes is part of a step."""
        group = self.further(name)
        self.watch.groups = (*self.watch.groups, group)
        return group

    def close(self) -> None:
        """Give back the further groups; the main one is the process's."""
        for group in self._further:
            group.close()
        self._further.clear()

    def _agree(self) -> list[str]:
        """What devices there are; and that all were given the same settings."""
        mine = self.settings.described()
        said = self.exchange.all({"device": _name_of(self.device), "settings": mine})
        for rank, message in enumerate(said):
            for name, value in message["settings"].items():
                if value != mine[name] and name not in ("quiet",):
                    raise UserError(
                        f"rank {rank} was given {name} = {value!r} and rank {self.rank} {mine[name]!r}; "
                        "give all ranks the same"
                    )
        return [message["device"] for message in said]


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
