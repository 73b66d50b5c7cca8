"""What NIXL's windows promise beyond the contract."""

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from support.window_ranks import ProcessRank, RankProcess

from mimatrix.comm.memory import nixl_agent
from mimatrix.comm.memory.nixl import NixlWindows, nixl_available
from mimatrix.core.errors import UserError, WorldError

pytestmark = pytest.mark.timeout(60)
MIB = 1 << 20
with_nixl = pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed")


@pytest.fixture
def ranks(programs: list[RankProcess]) -> list[ProcessRank]:
    return [ProcessRank(program, "nixl") for program in programs]


@with_nixl
@pytest.mark.parametrize("registered", [True, False])
def test_several_reads_are_in_flight(ranks: list[ProcessRank], registered: bool) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 8 * MIB)
    content = owner.do("fill", window, 3)
    peer = reader.do("open", owner.do("handle", window))
    arena = reader.do("allocate", 8 * MIB) if registered else 0
    for pieces in (1, 7, 64):
        assert reader.do("digest_in_pieces", peer, 8 * MIB, pieces, arena) == content


@with_nixl
def test_a_late_owner_is_named_and_its_bytes_may_be_waited_for_again(ranks: list[ProcessRank]) -> None:
    _, reader, owner = ranks
    program = owner._program
    peer = reader.do("open", owner.do("handle", owner.do("allocate", 4 * MIB)))
    os.kill(program.process.pid, signal.SIGSTOP)
    # Its threads go on until the first of them has seen the signal.
    os.waitid(os.P_PID, program.process.pid, os.WSTOPPED)
    try:
        reader.do("start", peer, 0, 4 * MIB)
        with pytest.raises(
            WorldError, match=rf"/{program.process.pid}/\w+ did not give bytes 0 to 4194304 .* in 0\.\d s"
        ):
            reader.do("wait", 0.3)
    finally:
        os.kill(program.process.pid, signal.SIGCONT)
    reader.do("wait", 10)


@with_nixl
def test_a_reader_that_is_killed_while_it_reads(ranks: list[ProcessRank], victim: RankProcess) -> None:
    owner, other, _ = ranks
    window = owner.do("allocate", 64 * MIB)
    content, handle = owner.do("fill", window, 5), owner.do("handle", window)
    peer = victim.ask("nixl", "open", handle)
    for _ in range(20):
        victim.tell("nixl", "digest_in_pieces", peer, 64 * MIB, 8)
    assert other.do("digest", other.do("open", handle), 0, 64 * MIB) == content
    victim.process.kill()
    victim.process.wait(10)
    assert other.do("digest", other.do("open", handle), 0, 64 * MIB) == content


@with_nixl
def test_who_reads_a_closed_window_gets_zeros_and_its_owner_lives(ranks: list[ProcessRank]) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 64 * MIB)
    owner.do("write", window, 32 * MIB, "ff")
    peer = reader.do("open", owner.do("handle", window))
    owner.do("withdraw", window)
    assert reader.do("read", peer, 32 * MIB, 32 * MIB + 1) == "00"
    owner.do("allocate", 1)


@with_nixl
def test_an_own_window_is_read_like_any_other(ranks: list[ProcessRank]) -> None:
    owner = ranks[0]
    window = owner.do("allocate", 100)
    owner.do("write", window, 0, "abcd")
    assert owner.do("read", owner.do("open", owner.do("handle", window)), 0, 2) == "abcd"


@with_nixl
def test_waiting_for_readers_takes_no_processor(ranks: list[ProcessRank]) -> None:
    owner, reader, _ = ranks
    reader.do("open", owner.do("handle", owner.do("allocate", 100)))
    assert owner.do("busy_s", 0.5) < 0.25


@with_nixl
def test_what_is_no_handle_is_refused(ranks: list[ProcessRank]) -> None:
    owner, reader, _ = ranks
    handle = owner.do("handle", owner.do("allocate", 100))
    assert json.loads(base64.b64decode(handle))["size"] == 100
    for garbage in ("", "mimatrix-1-0:00", base64.b64encode(b"{}").decode(), base64.b64encode(b"[1]").decode()):
        with pytest.raises(UserError, match=r"is not the handle of a NIXL window; pass what its handle\(\) returned"):
            reader.do("open", garbage)


@with_nixl
def test_everything_ends_with_close() -> None:
    script = """
        import pytest, torch
        from mimatrix.comm.memory.nixl import NixlWindows
        from mimatrix.core.errors import UserError
        windows = NixlWindows()
        given = torch.arange(10, dtype=torch.float32)
        window, published = windows.allocate(100), windows.publish(given)
        into = torch.empty(40, dtype=torch.uint8)
        peer = windows.open(published.handle())
        peer.read(0, 40, into)
        assert torch.equal(into.view(torch.float32), given)
        for wrong in (into[:39], into.view(torch.int8), torch.empty(80, dtype=torch.uint8)[::2]):
            with pytest.raises(UserError, match="40 bytes need a contiguous tensor of uint8 of that length"):
                peer.read(0, 40, wrong)
        with pytest.raises(UserError, match="is a window already"):
            windows.publish(given)
        with pytest.raises(UserError, match="contiguous"):
            windows.publish(given[::2])
        peer.close()
        with pytest.raises(UserError, match="closed here; open it again"):
            peer.read(0, 40, into)
        windows.close()
        windows.close()
        window.close()
        with pytest.raises(UserError, match="closed; create new ones"):
            windows.allocate(100)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=30, env={**os.environ, "UCX_TLS": "tcp"}
    )


def test_without_nixl_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nixl_agent, "import_module", missing)
    assert not nixl_available()
    with pytest.raises(UserError, match=r"NIXL is not installed .*; run pip install 'mimatrix\[nixl\]'"):
        NixlWindows()
