"""`mimatrix.init(mode="hybrid")`: groups of ranks that do not wait for each other."""

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.registration import register
from mimatrix.core import environment
from mimatrix.core.addresses import local_address
from mimatrix.core.errors import UserError
from mimatrix.engine.api import GroupFactory
from mimatrix.engine.api import init as init
from mimatrix.engine.outer_optimizer import MODES
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.hybrid.client.group_optimizer import GroupOptimizer
from mimatrix.hybrid.groups import Groups, check_groups, group_by_host, locate_rank
from mimatrix.hybrid.policy import Policy, make_policy
from mimatrix.hybrid.rendezvous import Rendezvous, RendezvousInfo


@dataclass(frozen=True)
class GroupPlacement:
    """What a process needs to join its group's run."""

    settings: Settings
    further: GroupFactory | None
    rank: int
    ranks: int
    member: GroupOptimizer


MOST_GROUPS = 1 << 20
"""Used to check a policy while the number of groups is unknown."""


@dataclass(frozen=True)
class Hybrid:
    """Groups of ranks that train asynchronously; `options` are those of the policy (`hybrid.policy`)."""

    groups: Sequence[Sequence[int]] | None = None
    """The ranks of each group; by default those of `mimatrix run --groups`, or the ranks of each host."""
    policy: str = "large"
    options: Mapping[str, Any] = field(default_factory=dict)
    overlaps: bool = False
    """Whether a group computes while its push is in flight: more samples per second, but every push is staler."""

    def run(self, settings: Settings, device: torch.device, timeout_s: float) -> Run:
        """Join the run of this process's group."""
        self.check(settings)
        rank, ranks = job_rank()
        store = job_store(rank, ranks, timeout_s)
        if not is_rejoining():
            self._check_same(store, rank)
        seat = self.seat(settings, store, self.resolve_groups(store, rank, ranks), rank, timeout_s)
        return Run(seat.settings, seat.further, rank=seat.rank, ranks=seat.ranks, device=device, outer=seat.member)

    def seat(self, settings: Settings, store: Store, groups: Groups, rank: int, timeout_s: float) -> GroupPlacement:
        """Return the placement of a rank in its group, and connect the ranks of the group."""
        chosen = self.check(settings, len(groups))
        number, me = locate_rank(groups, rank)
        rendezvous = Rendezvous(
            store=store,
            group=number,
            groups=len(groups),
            policy=chosen,
            host=environment.ADDRESS.get() or _own_address(),
            timeout_s=timeout_s,
            path=rendezvous_file(),
            is_rejoining=is_rejoining(),
        )
        overlaps = self.overlaps and len(groups) > 1
        member = GroupOptimizer(
            rendezvous.connect, chosen, group=number, is_first=me == 0, overlaps=overlaps, timeout_s=timeout_s
        )
        # Every group visits the samples in its own order.
        own = replace(settings, seed=settings.seed + number)
        size = len(groups[number])
        if size == 1:
            return GroupPlacement(own, None, 0, 1, member)
        register()
        timeout = timedelta(seconds=timeout_s)
        # A restarted group must not find keys that its previous start has left in the store.
        apart = PrefixStore(f"group/{number}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("mimatrix", store=apart, rank=me, world_size=size, timeout=timeout)
        return GroupPlacement(own, GroupFactory(timeout), me, size, member)

    def check(self, settings: Settings, groups: int = MOST_GROUPS) -> Policy:
        """Return the policy for this number of groups.

        Raises:
            UserError: There is no global batch, or the policy or its options are wrong.
        """
        if settings.global_batch is None:
            raise UserError("a group pushes after every global batch; set global_batch")
        return make_policy(self.policy, settings.global_batch, self.options, groups)

    def resolve_groups(self, store: Store, rank: int, ranks: int) -> Groups:
        """Return the groups of the script or of the launcher; without either, those of the hosts. A collective.

        Raises:
            UserError: The script and the launcher disagree.
        """
        launched = launched_groups(ranks)
        if self.groups is not None:
            own = check_groups(self.groups, ranks)
            if launched and own != launched:
                raise UserError(
                    f"the script has groups {_format_groups(own)} and the job was started with "
                    f"{_format_groups(launched)}; give one of them"
                )
            return own
        if launched:
            return launched
        store.set(f"hybrid/host/{rank}", own_host())
        return group_by_host([store.get(f"hybrid/host/{other}").decode() for other in range(ranks)])

    def _check_same(self, store: Store, rank: int) -> None:
        """Refuse a rank that was given another mode than rank 0: each shard would follow another policy."""
        own = json.dumps(
            {"groups": self.groups, "policy": self.policy, "options": dict(self.options), "overlaps": self.overlaps},
            sort_keys=True,
            default=str,
        )
        store.set(f"hybrid/asked/{rank}", own)
        first = store.get("hybrid/asked/0").decode()
        if first != own:
            raise UserError(f"rank {rank} was given the mode {own} and rank 0 {first}; give all ranks the same")


def _format_groups(groups: Groups) -> str:
    return "/".join(",".join(map(str, group)) for group in groups)


def launched_groups(ranks: int) -> Groups:
    """Return the groups that the launcher was given, or none."""
    encoded = environment.GROUPS.get()
    return check_groups(json.loads(encoded), ranks) if encoded else ()


def rendezvous_file() -> Path | None:
    """Return the file through which a restarted group finds the others, if the launcher named one."""
    path = environment.RENDEZVOUS.get()
    return Path(path) if path else None


def is_rejoining() -> bool:
    """Return whether this group was lost and restarted: the launcher says so, or the others have met already."""
    path = rendezvous_file()
    if path is None:
        return False
    rejoins = environment.REJOINS.get()
    return rejoins != "0" if rejoins else path.exists()


def job_rank() -> tuple[int, int]:
    """Return the rank of this process in its job, and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def job_store(rank: int, ranks: int, timeout_s: float) -> Store:
    """Return the store at `MASTER_ADDR`, which rank 0 hosts unless torchrun does; a group that rejoins has its own."""
    if is_rejoining():
        return _group_store(rank, ranks, timeout_s)
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        address,
        port,
        ranks,
        is_master=rank == 0 and not by_agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _group_store(rank: int, ranks: int, timeout_s: float) -> Store:
    """Return a store for the ranks of one group, which share a host: a file whose name no other run uses."""
    groups, path = launched_groups(ranks), rendezvous_file()
    number, _ = locate_rank(groups, rank)
    if len(groups[number]) == 1:
        return HashStore()
    assert path, "a group that rejoins has this file"
    run = hashlib.sha256(RendezvousInfo.read(path).token.encode()).hexdigest()[:16]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = FileStore(f"{tempfile.gettempdir()}/mimatrix-{run}-{number}-{restarts}")
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _own_address() -> str:
    """Return the address from which the master is reached, and by which others most likely reach this host."""
    return local_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), family=socket.AF_INET)


MODES["hybrid"] = Hybrid
