"""How groups find each other: through the job's store, once. After that the store may be lost."""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.collectives.shares import Shares
from mimatrix.comm.addresses import HostAddress, choose_address
from mimatrix.comm.endpoint import own_host
from mimatrix.core import environment
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.files import write_atomic
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.net import Address, Connection, Header, connect
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server.process import ServerSpec, spawn
from mimatrix.hybrid.server.replication import replica_order

_POLL_S = 0.02
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """What a group needs to rejoin: the secret of the run, its servers, and what they serve."""

    token: str
    addresses: tuple[Address, ...]
    model: str
    """A description of the optimizer and the number of parameters."""

    def to_json(self) -> str:
        """Return one line of JSON."""
        addresses = [address.to_json() for address in self.addresses]
        return json.dumps({"version": _FORMAT, "token": self.token, "addresses": addresses, "model": self.model})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RendezvousInfo":
        """Restore it from `to_json`."""
        encoded = json.loads(text)
        if not isinstance(encoded, dict) or encoded.get("version") != _FORMAT:
            raise UserError(
                "the groups that run use another version of MiMatrix; start the lost group with the same version"
            )
        addresses = tuple(Address(*address) for address in encoded["addresses"])
        return cls(encoded["token"], addresses, encoded["model"])

    @classmethod
    def read(cls, path: Path) -> "RendezvousInfo":
        """Read it from the file that the groups wrote."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"a lost group cannot rejoin without {path} ({error.strerror}); restart all groups"
            ) from None


@dataclass(frozen=True, kw_only=True)
class GroupRendezvous:
    """How the first rank of one group meets those of the others."""

    store: Store
    group: int
    groups: int
    policy: Policy
    host: str
    """The address by which other hosts reach this one; if it is a loopback address, that of the route to them."""
    timeout_s: float
    path: Path | None = None
    """A file for groups that rejoin; None: they use the store, which must then still exist."""
    is_rejoining: bool = False
    """Whether this group rejoins; only with a file."""

    def connect(self, layout: FlatLayout, flat: torch.Tensor) -> ShardsClient:
        """Start this group's server and find the others, or rejoin them; return the client of all shards."""
        store = PrefixStore("hybrid", self.store)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        info, own_server = self._read_info(store), None
        if info is None:
            info = self._meet(store, layout, flat)
        elif info.model != _describe(layout):
            raise UserError(
                f"group {self.group} rejoins with {_describe(layout)}, but the others train {info.model}; use the same "
                "model"
            )
        else:
            addresses, own_server = self._rejoin(info, layout, flat)
            info = replace(info, addresses=addresses)
        self._write_info(store, info)
        orders = [replica_order(shard, info.addresses, self.groups) for shard in range(self.groups)]
        return ShardsClient(
            self.group,
            layout.numel,
            Shares.equal(self.groups),
            orders,
            info.token,
            timeout_s=self.timeout_s,
            own_server=own_server,
        )

    def _rejoin(
        self, info: RendezvousInfo, layout: FlatLayout, flat: torch.Tensor
    ) -> tuple[tuple[Address, ...], Connection | None]:
        """Return all servers; if this group's server was lost, start an empty one to which shards can be replicated."""
        own, own_server = info.addresses[self.group], None
        if not self._is_reachable(own, info.token):
            servers = [HostAddress(str(address), address.host) for address in info.addresses]
            host = choose_address([HostAddress(own_host(), self.host), *servers], 0)
            own = spawn(replace(self._server_spec(layout, flat, info.token, host), shards={}))
            own_server = connect(own, info.token, self.timeout_s, group=self.group)
        addresses, others = list(info.addresses), 0
        for address in info.addresses:
            with suppress(OSError):
                peers = self._request(address, info.token, {"type": "welcome", "address": own.to_json()})["addresses"]
                addresses += [peer for peer in (Address(*encoded) for encoded in peers) if peer not in addresses]
                others += address != own
        if not others and self.groups > 1:
            raise UserError(f"group {self.group} cannot rejoin, since no other group is left; restart all groups")
        if own_server and own not in addresses:
            addresses.append(own)
        if own_server:
            encoded = [address.to_json() for address in addresses]
            _request(own_server, {"type": "set_peers", "addresses": encoded, "groups": self.groups})
        return tuple(addresses), own_server

    def _is_reachable(self, address: Address, token: str) -> bool:
        try:
            connect(address, token, self.timeout_s).close()
        except OSError:
            return False
        return True

    def _request(self, address: Address, token: str, header: Header) -> Header:
        connection = connect(address, token, self.timeout_s)
        try:
            return _request(connection, header)
        finally:
            connection.close()

    def _meet(self, store: Store, layout: FlatLayout, flat: torch.Tensor) -> RendezvousInfo:
        """Start this group's server, exchange addresses with the others, and begin to replicate."""
        self._check_same(store, layout, flat)
        token = _derived_token() or self._published_token(store)
        own = self._start_server(store, layout, flat, token, self._find_host(store))
        self._wait_for_all(store, "address")
        addresses = [Address(*json.loads(store.get(f"address/{other}"))) for other in range(self.groups)]
        if self.groups > 1:
            self._replicate(own, addresses, token)
        store.set(f"ready/{self.group}", "")
        self._wait_for_all(store, "ready")
        return RendezvousInfo(token, tuple(addresses), _describe(layout))

    def _published_token(self, store: Store) -> str:
        """Return a random token, for jobs whose ranks share no secret; a process that reads the store has it too."""
        if self.group == 0:
            # If group 0 was restarted in the middle of this, the token of its first start stays.
            store.compare_set("token", "", secrets.token_hex(16))
        return store.get("token").decode()

    def _find_host(self, store: Store) -> str:
        """Return the address by which the hosts of the other groups reach this one."""
        store.set(f"candidate/{self.group}", json.dumps(asdict(HostAddress(own_host(), self.host))))
        self._wait_for_all(store, "candidate")
        hosts = [HostAddress(**json.loads(store.get(f"candidate/{other}"))) for other in range(self.groups)]
        return choose_address(hosts, self.group)

    def _wait_for_all(self, store: Store, key: str) -> None:
        """Wait until all groups have set a key.

        Raises:
            WorldError: Some did not in time; it names them.
        """
        deadline = time.monotonic() + self.timeout_s
        missing = list(range(self.groups))
        while missing and time.monotonic() < deadline:
            try:
                missing = [other for other in missing if not store.check([f"{key}/{other}"])]
            except RuntimeError as error:  # how torch.distributed reports a lost store
                raise WorldError(
                    f"the job's store at rank 0 was lost before all groups had met ({error}); see the output of rank 0"
                ) from None
            if missing:
                time.sleep(_POLL_S)
        if missing:
            names = ", ".join(f"group {other}" for other in missing)
            raise WorldError(f"{names} did not join within {self.timeout_s:g} s; see its output")

    def _start_server(self, store: Store, layout: FlatLayout, flat: torch.Tensor, token: str, host: str) -> Address:
        """Start a server process, unless an earlier start of this group has done so and the others know it."""
        key = f"address/{self.group}"
        if not store.check([key]):
            store.set(key, json.dumps(spawn(self._server_spec(layout, flat, token, host)).to_json()))
        return Address(*json.loads(store.get(key)))

    def _read_info(self, store: Store) -> RendezvousInfo | None:
        if self.path:
            return RendezvousInfo.read(self.path) if self.is_rejoining else None
        if not store.check(["info"]):
            return None
        info = RendezvousInfo.from_json(store.get("info"))
        return replace(info, token=info.token or _derived_token())

    def _write_info(self, store: Store, info: RendezvousInfo) -> None:
        if self.path:
            write_file(self.path, info.to_json())
        else:
            is_derived = info.token == _derived_token()
            store.set("info", (replace(info, token="") if is_derived else info).to_json())

    def _server_spec(self, layout: FlatLayout, flat: torch.Tensor, token: str, host: str) -> ServerSpec:
        """Describe a server with this group's shard, and the replica of the previous group's."""
        shares = Shares.equal(self.groups)
        parts = torch.split(flat, list(shares.cut(layout.numel)))
        numbers = {self.group, (self.group - 1) % self.groups}
        return ServerSpec(
            host=host,
            token=token,
            groups=self.groups,
            scaling=self.policy.scaling,
            shards={number: parts[number].clone() for number in numbers},
            optimizers=tuple(layout.optimizer_specs(shares, self.policy.outer)),
            timeout_s=self.timeout_s,
        )

    def _replicate(self, own: Address, addresses: Sequence[Address], token: str) -> None:
        """Let this group's server replicate its shard at the next group's."""
        encoded = [address.to_json() for address in addresses]
        at = (self.group + 1) % self.groups
        self._request(own, token, {"type": "replicate", "shard": self.group, "at": at, "addresses": encoded})

    def _check_same(self, store: Store, layout: FlatLayout, flat: torch.Tensor) -> None:
        """Refuse a group that starts with other parameters than group 0."""
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        own = f"{_describe(layout)}, {digest}"
        store.set(f"digest/{self.group}", own)
        first = store.get("digest/0").decode()
        if first != own:
            raise UserError(
                f"group {self.group} starts with other parameters or another optimizer than group 0; seed "
                "all ranks alike before the model is made (torch.manual_seed), or load the same weights in all groups"
            )


def write_file(path: Path, text: str) -> None:
    """Write a file for groups that rejoin; on a node where it cannot be written, no group will rejoin."""
    with suppress(OSError):
        write_atomic(path, text, mode=0o600)


def _derived_token() -> str:
    """Return a token that the ranks of a job need not tell each other; empty if they share no secret."""
    secret = environment.JOB_SECRET.get()
    return hmac.new(secret.encode(), b"mimatrix shard servers", "sha256").hexdigest() if secret else ""


def _request(connection: Connection, header: Header) -> Header:
    connection.send(header)
    reply, _ = connection.receive()
    if "error" in reply:
        raise WorldError(f"a shard server refused to {header['type']} ({reply['error']}); see its output")
    return reply


def _describe(layout: FlatLayout) -> str:
    return f"{type(layout.optimizer).__name__} on {layout.numel} elements"
