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
from mimatrix.comm.tcp_store import serve_store
from mimatrix.core import environment
from mimatrix.core.addresses import local_address
from mimatrix.core.errors import UserError
from mimatrix.engine.mode import Membership
from mimatrix.engine.process_groups import GroupFactory
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from mimatrix.hybrid.client.group_optimizer import GroupOptimizer
from mimatrix.hybrid.groups import Groups, check_groups, group_by_host, locate_rank
from mimatrix.hybrid.policy import Policy, make_policy
from mimatrix.hybrid.rendezvous import GroupRendezvous, RendezvousInfo

_ANY_NUMBER_OF_GROUPS = 1 << 20


@dataclass(frozen=True)
class Hybrid:
    """Hybrid mode: ranks of a group step together, and groups do not wait for each other.

    Args:
        groups: The ranks of each group. By default those that `mimatrix run --groups` gave, or one group per host.
        policy: How groups share their parameters; docs/hybrid.md lists the policies.
        options: Options of the policy.
        overlaps: Whether a group keeps computing while its push is in flight: more samples per second, with more
            staleness.
    """

    groups: Sequence[Sequence[int]] | None = None
    policy: str = "large"
    options: Mapping[str, Any] = field(default_factory=dict)
    overlaps: bool = False

    def join(self, settings: Settings, device: torch.device, timeout_s: float) -> Membership:
        """Find the other processes of the job, and join those of this process's group. A collective."""
        self.check(settings)
        rank, world_size = job_rank()
        store = job_store(rank, world_size, timeout_s)
        if not is_rejoining():
            self._check_same(store, rank)
        groups = self.resolve_groups(store, rank, world_size)
        return Membership(self.join_group(settings, store, groups, rank, device, timeout_s))

    def join_group(
        self, settings: Settings, store: Store, groups: Groups, rank: int, device: torch.device, timeout_s: float
    ) -> World:
        """Join the ranks of the group that has rank `rank` of the job. A collective of the group."""
        policy = self.check(settings, len(groups))
        number, group_rank = locate_rank(groups, rank)
        rendezvous = GroupRendezvous(
            store=store,
            group=number,
            groups=len(groups),
            policy=policy,
            host=_own_address(),
            timeout_s=timeout_s,
            path=rendezvous_file(),
            is_rejoining=is_rejoining(),
        )
        outer = GroupOptimizer(
            rendezvous.connect,
            policy,
            group=number,
            is_first=group_rank == 0,
            overlaps=self.overlaps and len(groups) > 1,
            timeout_s=timeout_s,
        )
        # Every group goes through the samples in an order of its own.
        own_settings = replace(settings, seed=settings.seed + number)
        size = len(groups[number])
        if size == 1:
            return World.join(own_settings, device=device, outer=outer)
        register()
        timeout = timedelta(seconds=timeout_s)
        # A group that was restarted must not find what the one before it has left in the store.
        group_store = PrefixStore(f"group/{number}/{_restarts()}", store)
        dist.init_process_group("mimatrix", store=group_store, rank=group_rank, world_size=size, timeout=timeout)
        return World.join(
            own_settings,
            rank=group_rank,
            world_size=size,
            device=device,
            new_group=GroupFactory(timeout),
            outer=outer,
            timeout_s=timeout_s,
        )

    def check(self, settings: Settings, groups: int = _ANY_NUMBER_OF_GROUPS) -> Policy:
        """Return the policy for a number of groups; raise `UserError` if the options do not make one."""
        if settings.global_batch is None:
            raise UserError("a group pushes when it has done a global batch; set global_batch")
        return make_policy(self.policy, settings.global_batch, self.options, groups)

    def resolve_groups(self, store: Store, rank: int, world_size: int) -> Groups:
        """Return the ranks of each group: as given here, as the job was launched, or one group per host."""
        launched = launched_groups(world_size)
        if self.groups is not None:
            own = check_groups(self.groups, world_size)
            if launched and own != launched:
                raise UserError(
                    f"the script has groups {_format(own)} and the job was started with {_format(launched)}; give one "
                    "of them"
                )
            return own
        if launched:
            return launched
        store.set(f"hybrid/host/{rank}", own_host())
        return group_by_host([store.get(f"hybrid/host/{other}").decode() for other in range(world_size)])

    def _check_same(self, store: Store, rank: int) -> None:
        """Check that all ranks were given the same mode; otherwise each shard would follow other rules."""
        own = json.dumps(
            {"groups": self.groups, "policy": self.policy, "options": dict(self.options), "overlaps": self.overlaps},
            sort_keys=True,
            default=str,
        )
        store.set(f"hybrid/asked/{rank}", own)
        first = store.get("hybrid/asked/0").decode()
        if first != own:
            raise UserError(f"rank {rank} was given the mode {own} and rank 0 {first}; give all ranks the same")


def _format(groups: Groups) -> str:
    return "/".join(",".join(map(str, group)) for group in groups)


def launched_groups(world_size: int) -> Groups:
    """Return the groups that the launcher gave; empty if it gave none."""
    text = environment.GROUPS.get()
    return check_groups(json.loads(text), world_size) if text else ()


def rendezvous_file() -> Path | None:
    """Return the file through which a restarted group finds the others, if the launcher has named one."""
    name = environment.RENDEZVOUS.get()
    return Path(name) if name else None


def is_rejoining() -> bool:
    """Return whether this group was lost and restarted: the launcher says so, or else the others have met already."""
    file = rendezvous_file()
    if file is None:
        return False
    rejoins = environment.REJOINS.get()
    return rejoins != "0" if rejoins else file.exists()


def job_rank() -> tuple[int, int]:
    """Return the rank of this process in the job, and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def job_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the store at `MASTER_ADDR`, which rank 0 serves unless torchrun does; a rejoining group has its own."""
    if is_rejoining():
        return _group_store(rank, world_size, timeout_s)
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if own := serve_store():
        own.set_timeout(timedelta(seconds=timeout_s))
        return own
    return TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0 and not by_agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _group_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return a store for the ranks of one group, which are on one host: a file with a name that no other run has."""
    groups, file = launched_groups(world_size), rendezvous_file()
    number, _ = locate_rank(groups, rank)
    if len(groups[number]) == 1:
        return HashStore()
    assert file, "a group that rejoins has this file"
    run = hashlib.sha256(RendezvousInfo.read(file).token.encode()).hexdigest()[:16]
    store = FileStore(f"{tempfile.gettempdir()}/mimatrix-{run}-{number}-{_restarts()}")
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _own_address() -> str:
    """Return the address by which other hosts reach this one: as given, or the one that leads to the master."""
    return environment.ADDRESS.get() or local_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), family=socket.AF_INET)
