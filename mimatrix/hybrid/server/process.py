"""`python -m mimatrix.hybrid.server.process`: the process that serves the shards of a group. It outlives its group.

It reads what to serve from standard input and prints the port on which it listens. It exits when all groups have left,
or when no group has been connected for a while.
"""

import os
import pickle
import select
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.logs import configure_logging
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, Shard
from mimatrix.hybrid.server.state import ShardState

_IDLE_TIMEOUT_S = 10.0
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What a server process is to serve."""

    host: str
    """The address to listen on."""
    token: str
    groups: int
    """How many groups will connect."""
    scaling: PushScaling
    shards: dict[int, torch.Tensor]
    """The initial parameters of the shards to serve, by number."""
    optimizers: tuple[OptimizerSpec, ...]
    """For every shard of the run, since replicas of others may be stored here, too."""
    timeout_s: float

    def make_shard(self, number: int, values: torch.Tensor) -> Shard:
        """Make a shard that starts with these values."""
        return Shard(values, self.optimizers[number], self.scaling)

    def make_replica(self, number: int, state: ShardState) -> Shard:
        """Make a copy of a shard that is served elsewhere."""
        shard = self.make_shard(number, state.values)
        shard.load(state)
        return shard


def spawn(spec: ServerSpec) -> Address:
    """Start a server process on this machine and return its address.

    Raises:
        UserError: The optimizer's class cannot be pickled.
        WorldError: The process exited, or was not ready in time.
    """
    kinds = {optimizer.kind for optimizer in spec.optimizers}
    try:
        pickled = pickle.dumps(spec)
        if any(kind.__module__ == "__main__" for kind in kinds):
            raise TypeError("its class is defined in the script")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the optimizer cannot be sent to the shard server ({error}); define its class in a module"
        ) from None
    process = subprocess.Popen(
        [sys.executable, "-m", "mimatrix.hybrid.server.process"],
        # The server must be able to import whatever the script can import.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    with process.stdin as stdin:
        stdin.write(pickled)
    with process.stdout as stdout:
        ready, _, _ = select.select([stdout], [], [], spec.timeout_s)
        port = stdout.readline().strip() if ready else b""
    if not ready:
        process.kill()
        raise WorldError(f"the shard server was not ready within {spec.timeout_s:g} s; see its output above")
    if not port:
        raise WorldError(f"the shard server exited with code {process.wait(10)}; see its output above")
    return Address(spec.host, int(port))


def main() -> None:
    """Serve until the groups are gone."""
    configure_logging()
    torch.set_num_threads(1)
    spec: ServerSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the process that started this one)
    shards = {number: spec.make_shard(number, values) for number, values in spec.shards.items()}
    server = ShardServer.open(shards, spec.token, spec.host, timeout_s=spec.timeout_s, make_shard=spec.make_replica)
    sys.stdout.write(f"{server.address.port}\n")
    sys.stdout.flush()
    sys.stdout.close()
    # Its own group connects once all groups have met, which may take as long as they wait for each other.
    last_s, idle_timeout_s = time.monotonic(), max(_IDLE_TIMEOUT_S, spec.timeout_s)
    while time.monotonic() - last_s < idle_timeout_s and (len(server.left) < spec.groups or server.connected_groups):
        time.sleep(_POLL_S)
        if server.connected_groups:
            last_s, idle_timeout_s = time.monotonic(), _IDLE_TIMEOUT_S
    server.close()


if __name__ == "__main__":
    main()
