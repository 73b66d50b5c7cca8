"""Run a command for every rank of a lab, with its environment."""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence

from mimatrix.core import environment as env
from mimatrix.core.errors import UserError
from mimatrix.lab.ip_commands import namespace
from mimatrix.lab.layout import Seat
from mimatrix.lab.state import Lab
from mimatrix.lab.system import check_machine, run_tool, within
from mimatrix.processes.cgroups import cpu_cgroups
from mimatrix.processes.group import Command, run_process_group
from mimatrix.processes.group_exit import GroupExit

_FREE_PORT = "import socket, sys; s = socket.socket(); s.bind((sys.argv[1], 0)); print(s.getsockname()[1])"


def run(lab: Lab, words: Sequence[str], *, grace_s: float = 10.0, timeout_s: float | None = None) -> GroupExit:
    """Run `words` once for every rank, each in its node's namespace and quota, and wait for all."""
    check_machine()
    if not shutil.which(words[0]):
        raise UserError(f'there is no command "{words[0]}"; write it as `mimatrix lab run -- python train.py`')
    port = _free_port(lab)
    groups = cpu_cgroups() if lab.cpus else None
    commands, secret = [], secrets.token_hex(32)
    for seat in lab.layout.seats:
        space = namespace(lab.name, seat.node)
        variables = dict(os.environ) | environment(lab, seat, port, os.environ) | {env.JOB_SECRET.name: secret}
        commands.append(
            Command(
                f"{seat.rank} {seat.node}",
                tuple(within(space, *words)),
                variables,
                groups.join_file(space) if groups else None,
            )
        )
    return run_process_group(commands, sys.stdout.buffer, sys.stderr.buffer, grace_s=grace_s, timeout_s=timeout_s)


def environment(lab: Lab, seat: Seat, port: int, outside: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun, the interface to use, and the location of this rank."""
    first = lab.layout.seats[0]
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(len(lab.layout.seats)),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(seat.node_index),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": seat.interface,
        "UCX_NET_DEVICES": seat.interface,
        # All nodes share one memory here, and perhaps an RDMA card, which would bypass the links.
        "UCX_TLS": outside.get("UCX_TLS", "tcp"),
        env.HOST.name: seat.node,
        env.ADDRESS.name: seat.address,
        env.CLUSTER.name: str(lab.cluster_file),
        "OMP_NUM_THREADS": outside.get("OMP_NUM_THREADS", "1"),
    }


def _free_port(lab: Lab) -> int:
    """Return a port that is free at rank 0's address."""
    first = lab.layout.seats[0]
    space = namespace(lab.name, first.node)
    return int(run_tool(within(space, sys.executable, "-I", "-S", "-c", _FREE_PORT, first.address)))
