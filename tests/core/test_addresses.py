import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mimatrix.core.addresses import interface_of, interface_speed, is_loopback, local_address

SPACE = f"mmxi{os.getpid()}"


def test_the_local_address_towards_loopback_is_loopback() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"


def test_a_host_that_cannot_be_resolved_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"."):
        local_address("no-such-host.invalid")


@pytest.mark.parametrize(
    ("address", "wanted"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a", False)],
)
def test_loopback_addresses_are_known(address: str, wanted: bool) -> None:
    assert is_loopback(address) == wanted


def test_loopback_has_its_interface() -> None:
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize("address", ["192.0.2.77", "::1", "nonsense", ""])
def test_an_address_that_no_interface_has_is_none(address: str) -> None:
    assert interface_of(address) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_secondary_addresses_belong_to_the_real_interface() -> None:
    orders = [
        f"-n {SPACE} link add eth7 type veth peer name eth8",
        f"-n {SPACE} address add 10.213.9.1/24 dev eth7",
        f"-n {SPACE} address add 10.213.9.2/24 dev eth7",
        f"-n {SPACE} address add 10.213.9.3/24 dev eth7 label eth7:1",
        f"-n {SPACE} address add 10.213.9.4/32 dev lo",
        # A router announces this address, which is on both.
        f"-n {SPACE} address add 10.213.9.1/32 dev lo",
    ]
    code = "import sys; from mimatrix.core.addresses import interface_of; print(*map(interface_of, sys.argv[1:]))"
    added = _ip(f"netns add {SPACE}")
    try:
        failed = [done.stderr for done in [added, *map(_ip, orders)] if done.returncode]
        if failed:
            pytest.skip(f"a network namespace cannot be made: {failed[0].strip()}")
        addresses = [f"10.213.9.{number}" for number in range(1, 6)]
        words = ["ip", "netns", "exec", SPACE, sys.executable, "-c", code, *addresses]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    finally:
        _ip(f"netns delete {SPACE}")
    assert done.stdout.split() == ["eth7", "eth7", "eth7", "lo", "None"]


def _ip(words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize(("text", "wanted"), [("25000\n", 25_000), ("-1\n", None), ("", None)])
def test_speed_of_an_interface_is_what_its_driver_knows(tmp_path: Path, text: str, wanted: int | None) -> None:
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "speed").write_text(text)
    assert interface_speed("eth0", tmp_path) == wanted
    assert interface_speed("eth1", tmp_path) is None


def test_loopback_has_no_speed() -> None:
    assert interface_speed("lo") is None
