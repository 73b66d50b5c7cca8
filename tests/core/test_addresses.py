import pytest

from mimatrix.core.addresses import local_address


def test_the_local_address_towards_loopback_is_loopback() -> None:
    assert local_address("127.0.0.1") == "127.0.0.1"


def test_a_host_that_cannot_be_resolved_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"."):
        local_address("no-such-host.invalid")
