"""What is served, under which address, with which certificate: refused in a sentence before anything is made."""

import asyncio
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.server.main import bind
from mimatrix.server.settings import Settings, warnings_for, with_reachable_address
from mimatrix.server.web.tls import check_certificate


@pytest.mark.parametrize(
    ("host", "own", "address"),
    [
        ("127.0.0.1", "10.0.0.7", "http://127.0.0.1:7700"),
        ("10.0.0.7", "10.0.0.8", "http://10.0.0.7:7700"),
        ("0.0.0.0", "10.0.0.7", "http://10.0.0.7:7700"),
        ("::", "2a00::7", "http://[2a00::7]:7700"),
        ("::", "10.0.0.7", "http://10.0.0.7:7700"),
    ],
)
def test_all_addresses_are_told_as_one_that_can_be_used(tmp_path: Path, host: str, own: str, address: str) -> None:
    asked = Settings(data=tmp_path, host=host, insecure=True)
    found = with_reachable_address(asked, lambda _: own)
    assert found.address == address
    told = [said for said in warnings_for(found, asked) if "will use" in said]
    assert bool(told) == (host in ("0.0.0.0", "::"))


def test_who_says_what_to_tell_is_not_asked_again(tmp_path: Path) -> None:
    asked = Settings(data=tmp_path, host="0.0.0.0", insecure=True, advertise="https://jobs.example.org")
    assert with_reachable_address(asked, lambda _: "10.0.0.7") is asked


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            Settings(data=Path(), host="0.0.0.0", insecure=True),
            "workers cannot use 0.0.0.0.*--advertise http://NAME:7700",
        ),
        (
            Settings(data=Path(), host="::", tls_cert=Path("x")),
            "a certificate cannot be for ::; give --advertise https://",
        ),
    ],
)
def test_where_no_address_is_known_one_is_asked_for(settings: Settings, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        with_reachable_address(settings, lambda _: "")


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        (Settings(data=Path(), host="10.0.0.7", insecure=True), True),
        (Settings(data=Path(), host="127.0.0.1", insecure=True), False),
        (Settings(data=Path(), host="10.0.0.7", tls_cert=Path("x"), insecure=True), False),
    ],
)
def test_serving_without_tls_is_warned_of(settings: Settings, warns: bool) -> None:
    said = list(warnings_for(settings, settings))
    assert bool(said) == warns
    assert all("10.0.0.7 is served without TLS" in sentence for sentence in said)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, and one key with a password."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        _run(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", folder=folder, name=name)
    words = ["pkey", "-in", "one.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    subprocess.run([openssl, *words], cwd=folder, check=True, timeout=60, capture_output=True)
    lines = (folder / "one.key").read_text().splitlines()
    (folder / "cut.key").write_text("\n".join([*lines[:5], *lines[9:]]))
    (folder / "notes.txt").write_text("remember the milk")
    return folder


def _run(*words: str, folder: Path, name: str) -> None:
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    subprocess.run([*words, *files], cwd=folder, check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize(
    ("cert", "key", "sentence"),
    [
        ("one.crt", "none.key", "is not there; name the file in PEM format"),
        ("notes.txt", "one.key", "holds no certificate in PEM format; give --tls-cert a file that has one"),
        ("one.crt", "notes.txt", "holds no key in PEM format; give --tls-key a file that has one"),
        ("one.key", "one.crt", 'one.key" holds no certificate'),
        ("one.crt", "two.key", "is the key of another certificate than"),
        ("one.crt", "locked.key", "asks for a password; take it off: openssl pkey -in locked.key"),
        ("one.crt", "cut.key", "is damaged or too weak; obtain or create them again"),
    ],
)
def test_certificates_that_cannot_be_used(made: Path, cert: str, key: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        check_certificate(made / cert, made / key)
    assert "SSL:" not in str(refused.value)


def test_one_that_can(made: Path) -> None:
    check_certificate(made / "one.crt", made / "one.key")


def test_the_last_bytes_of_an_answer_wait_for_nothing(tmp_path: Path) -> None:
    async def turned_off(listener: socket.socket) -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nagle = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            found.set_result(bool(nagle))
            writer.close()

        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asyncio.wait_for(found, 10)

    with bind(Settings(data=tmp_path, port=0)) as listener:
        assert asyncio.run(turned_off(listener))
