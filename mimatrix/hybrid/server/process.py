"""`python -m mimatrix.hybrid.server.process`: the process beside a group that serves shards. It outlives its group.

What to serve comes on standard input; where it listens is said on standard output. It ends when all groups have
said goodbye, or when nobody has been connected for a while.
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
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.server import ShardServer
from mimatrix.hybrid.server.shard import OptimizerSpec, Shard
from mimatrix.hybrid.server.state import ShardState

_LINGERS_S = 10.0
_LOOKS_S = 0.5


@dataclass(frozen=True)
class ServerSpec:
    """What a process is to serve."""

    address: str
    token: str
    groups: int
    """How many will come."""
    rules: PushScaling
    shards: dict[int, torch.Tensor]
    """In the beginning."""
    steppings: tuple[OptimizerSpec, ...]
    """Of all shards: others may come to lie here, too."""
    timeout_s: float

    def shard(self, number: int, values: torch.Tensor) -> Shard:
        """One that begins with these values."""
        return Shard(values, self.steppings[number], self.rules)

    def copied(self, number: int, kept: ShardState) -> Shard:
        """One that is elsewhere, too."""
        found = self.shard(number, kept.values)
        found.load(kept)
        return found


def spawn(order: ServerSpec) -> Address:
    """Where a new process of this machine serves it."""
    kinds = {stepping.kind for stepping in order.steppings}
    try:
        told = pickle.dumps(order)
        if any(kind.__module__ == "__main__" for kind in kinds):
            raise TypeError("its class is in the script")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the optimizer cannot be sent to the process that steps for all ({error}); put its class into a module"
        ) from None
    process = subprocess.Popen(
        [sys.executable, "-m", "mimatrix.hybrid.server.process"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # what the script finds, it finds
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    with process.stdin as stdin:
        stdin.write(told)
    with process.stdout as stdout:
        came, _, _ = select.select([stdout], [], [], order.timeout_s)
        port = stdout.readline().strip() if came else b""
    if not came:
        process.kill()
        raise WorldError(f"the process that serves shards did not come up within {order.timeout_s:g} s")
    if not port:
        raise WorldError(f"the process that serves shards ended with {process.wait(10)}; see what it said above")
    return Address(order.address, int(port))


def main() -> None:
    """Serve until nobody comes any more."""
    torch.set_num_threads(1)
    order: ServerSpec = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the process that started this one)
    shards = {number: order.shard(number, values) for number, values in order.shards.items()}
    service = ShardServer(shards, order.token, order.address, timeout_s=order.timeout_s, say=_say, makes=order.copied)
    sys.stdout.write(f"{service.place.port}\n")
    sys.stdout.flush()
    sys.stdout.close()
    # Its own group comes when all have met, and that may take as long as they wait for each other.
    last, lingers_s = time.monotonic(), max(_LINGERS_S, order.timeout_s)
    while time.monotonic() - last < lingers_s and (len(service.left) < order.groups or service.visitors):
        time.sleep(_LOOKS_S)
        if service.visitors:
            last, lingers_s = time.monotonic(), _LINGERS_S
    service.close()


def _say(sentence: str) -> None:
    sys.stderr.write(f"mimatrix: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
