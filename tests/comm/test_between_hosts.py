"""Two hosts with nothing but a cable in between, each of which resolves its own name to 127.0.1.1, as Debian does."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mimatrix.processes.ports import free_port

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
SCRIPT = Path(__file__).parent / "scripts" / "three_steps.py"
SPACES = [f"mmxh{os.getpid()}{end}" for end in "ab"]
ADDRESSES = ["10.213.8.1", "10.213.8.2"]
MASTER = "lab-a"
RANK_S = 40


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces, named as the ends of the cable; `lab-a` is 127.0.1.1 on the first, its address on the other."""
    with ExitStack() as stack:
        for space in SPACES:
            _ip(f"netns add {space}")
            stack.callback(_ip, f"netns delete {space}")
        _ip(f"link add {SPACES[0]} netns {SPACES[0]} type veth peer name {SPACES[1]} netns {SPACES[1]}")
        for space, address, master in zip(SPACES, ADDRESSES, ("127.0.1.1", ADDRESSES[0]), strict=True):
            _ip(f"-n {space} address add {address}/24 dev {space}")
            _ip(f"-n {space} link set lo up")
            _ip(f"-n {space} link set {space} up")
            # `ip netns exec` mounts this folder's files over those of /etc.
            folder = Path("/etc/netns") / space
            stack.callback(_remove_hosts_file, folder)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{master} {MASTER}\n")
        yield SPACES


def _remove_hosts_file(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def test_host_names_are_loopback_addresses_here(hosts: list[str]) -> None:
    """Otherwise the tests below would show nothing."""
    code = "import socket, sys; print(*(socket.gethostbyname(name) for name in sys.argv[1:]))"
    names = [socket.gethostname(), MASTER]
    resolved = [
        subprocess.run(
            ["ip", "netns", "exec", space, sys.executable, "-c", code, *names],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.split()
        for space in hosts
    ]
    assert resolved == [["127.0.1.1", "127.0.1.1"], ["127.0.1.1", ADDRESSES[0]]]


def test_ranks_of_hosts_whose_names_are_loopback_addresses_train(hosts: list[str], tmp_path: Path) -> None:
    reports = _train(hosts, "sync", tmp_path)
    (alone,) = _train([""], "sync", tmp_path)
    assert [report["gathered"] for report in reports] == [[0, 1], [0, 1]]
    assert [report["steps"] for report in [*reports, alone]] == [3, 3, 3]
    for report in reports:
        for pair in zip(report["parameters"], alone["parameters"], strict=True):
            parameter, wanted = (torch.tensor(values, dtype=torch.float64) for values in pair)
            torch.testing.assert_close(parameter, wanted, rtol=0, atol=1e-10)
    assert reports[0]["parameters"] == reports[1]["parameters"]


@pytest.mark.long
def test_groups_of_hosts_whose_names_are_loopback_addresses_train(hosts: list[str], tmp_path: Path) -> None:
    """In hybrid mode each host is a group with a shard server, which the other group's ranks reach."""
    reports = _train(hosts, "hybrid", tmp_path)
    assert all(report["steps"] > 0 for report in reports)


def _train(spaces: Sequence[str], mode: str, folder: Path) -> list[dict[str, Any]]:
    """Run one rank in each namespace, or in none where its name is empty, and return what they report."""
    outputs, port = [folder / f"{mode}-{len(spaces)}-{rank}.json" for rank in range(len(spaces))], str(free_port())
    with ExitStack() as stack:
        ranks = []
        for rank, space in enumerate(spaces):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(spaces)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": MASTER if space else "127.0.0.1",
                "MASTER_PORT": port,
                "MIMATRIX_CACHE": str(folder / f"cache-{rank}"),
                "OMP_NUM_THREADS": "1",
            }
            log = stack.enter_context(outputs[rank].with_suffix(".log").open("w"))
            # A rank that is still there after the deadline shows where it waits.
            words = ["timeout", "--signal=ABRT", "--kill-after=5", str(RANK_S), sys.executable, "-X", "faulthandler"]
            if space:
                words = ["ip", "netns", "exec", space, *words]
            process = subprocess.Popen(
                [*words, "-W", "ignore", str(SCRIPT), mode, str(outputs[rank])],
                env=os.environ | variables,
                stdout=log,
                stderr=log,
            )
            ranks.append(stack.enter_context(process))
        codes = [process.wait(RANK_S + 10) for process in ranks]
    assert codes == [0] * len(spaces), "\n".join(output.with_suffix(".log").read_text()[-4000:] for output in outputs)
    return [json.loads(output.read_text()) for output in outputs]


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=20)
    if done.returncode and "add" in words:
        pytest.skip(f"`ip {words}` failed: {done.stderr.strip()}")
