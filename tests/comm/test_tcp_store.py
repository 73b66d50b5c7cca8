"""The store of torch.distributed listens on the job's address only, where we can have a say in it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mimatrix.comm.tcp_store import serve_store
from mimatrix.processes.ports import free_port


def listening_addresses(port: int) -> set[str]:
    """Return the addresses, as the kernel prints them, on which this network namespace listens on a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        local.partition(":")[0] for _, local, _, state, *_ in lines if state == "0A" and local.endswith(f":{port:04X}")
    }


def variables(**more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more


def test_store_listens_on_its_address_only() -> None:
    environ = variables()
    store = serve_store(environ)
    assert store
    assert store.port == int(environ["MASTER_PORT"])
    (address,) = listening_addresses(store.port)
    assert socket.inet_ntoa(bytes.fromhex(address)[::-1]) == "127.0.0.1"
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "more",
    [
        {"RANK": "1"},
        {"MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "0.0.0.0"},
        {"MASTER_ADDR": "192.0.2.1"},
        {"MASTER_PORT": "x"},
        {"TORCHELASTIC_USE_AGENT_STORE": "True"},
    ],
)
def test_store_is_left_to_torch_where_it_cannot_be_bound(more: dict[str, str]) -> None:
    assert serve_store(variables(**more)) is None


def test_store_is_left_to_torch_if_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve_store(variables(MASTER_PORT=str(taken.getsockname()[1]))) is None


INIT = """
import sys, mimatrix, torch.distributed as dist
from test_tcp_store import listening_addresses

run = mimatrix.init(global_batch=8, quiet=True)
if run.rank == 0:
    print(*listening_addresses(int(sys.argv[1])))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(100)
def test_init_opens_the_store_on_the_address_of_the_job_only() -> None:
    environ = variables(LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", INIT, environ["MASTER_PORT"]],
            env=os.environ | environ | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0].split() == ["0100007F"], "and not all interfaces"
