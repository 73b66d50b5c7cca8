"""What every kind of windows promises. A rank is a process of its own, where the kind reaches that far."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.window_ranks import READ_S, InProcessRank, ProcessRank, RankProcess, WindowRank

from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.comm.memory.nixl import nixl_available
from mimatrix.core.errors import UserError, WorldError

pytestmark = pytest.mark.timeout(60)
BETWEEN_PROCESSES = ["mapped", "nixl", "cuda_ipc"]
KINDS = ["in_process", *BETWEEN_PROCESSES]
MIB = 1 << 20


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest) -> list[WindowRank]:
    """Return the owner of windows and two readers."""
    return company(request, request.param)


@pytest.fixture(params=BETWEEN_PROCESSES)
def separate_ranks(request: pytest.FixtureRequest) -> list[WindowRank]:
    return company(request, request.param)


def company(request: pytest.FixtureRequest, kind: str) -> list[WindowRank]:
    if kind == "in_process":
        shared = InProcessWindows()
        return [InProcessRank(shared) for _ in range(3)]
    if kind == "nixl" and not nixl_available():
        pytest.skip("NIXL is not installed")
    if kind == "cuda_ipc" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    programs: list[RankProcess] = request.getfixturevalue("programs")
    return [ProcessRank(program, kind) for program in programs]


def test_a_new_window_is_zero_and_has_its_size(ranks: list[WindowRank]) -> None:
    window = ranks[0].do("allocate", 5000)
    assert ranks[0].do("shape", window) == ["torch.uint8", [5000], False]


def test_a_window_that_holds_nothing_is_refused(ranks: list[WindowRank]) -> None:
    with pytest.raises(UserError, match="is empty; use 1 or more"):
        ranks[0].do("allocate", 0)


def test_a_handle_is_printable_text(ranks: list[WindowRank]) -> None:
    handle = ranks[0].do("handle", ranks[0].do("allocate", 1))
    assert isinstance(handle, str)
    assert handle.isprintable()
    assert handle.isascii()


def test_ranges_are_read_exactly(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    content = bytes(place * 7 % 251 for place in range(5000))
    window = owner.do("allocate", len(content))
    owner.do("write", window, 0, content.hex())
    peer = reader.do("open", owner.do("handle", window))
    for start, stop in ((0, 1), (0, 10), (2495, 2505), (4096, 4099), (4990, 5000), (4999, 5000), (0, 5000)):
        assert bytes.fromhex(reader.do("read", peer, start, stop)) == content[start:stop], (start, stop)
    for place in (0, 2500, 5000):
        assert reader.do("read", peer, place, place) == ""


def test_writes_after_opening_are_seen(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 100)
    peer = reader.do("open", owner.do("handle", window))
    assert reader.do("read", peer, 0, 4) == "00000000"
    for content in ("01020304", "0a0b0c0d"):
        owner.do("write", window, 50, content)
        assert reader.do("read", peer, 50, 54) == content


def test_a_view_is_in_place_where_there_is_one(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 100)
    peer = reader.do("open", owner.do("handle", window))
    if not reader.do("hold", peer, 10, 14):
        return
    assert reader.do("held", peer) == "00000000"
    owner.do("write", window, 10, "01020304")
    assert reader.do("held", peer) == "01020304"


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (95, 101), (200, 300), (6, 5)])
def test_what_is_outside_is_refused(ranks: list[WindowRank], start: int, stop: int) -> None:
    owner, reader, _ = ranks
    peer = reader.do("open", owner.do("handle", owner.do("allocate", 100)))
    for action in ("read", "hold"):
        with pytest.raises(UserError, match=f"bytes {start} to {stop} are outside the window; use 0 to 100"):
            reader.do(action, peer, start, stop)


def test_windows_of_one_rank_do_not_mix(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    windows = [owner.do("allocate", size) for size in (10, 5000, 70_000)]
    for mark, window in enumerate(windows):
        owner.do("write", window, 3, f"0{mark}")
    peers = [reader.do("open", owner.do("handle", window)) for window in windows]
    assert [reader.do("read", peer, 3, 4) for peer in peers] == ["00", "01", "02"]
    reader.do("close", peers[1])
    owner.do("withdraw", windows[1])
    assert [reader.do("read", peer, 3, 4) for peer in (peers[0], peers[2])] == ["00", "02"]


def test_a_window_may_be_opened_again(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 10)
    handle = owner.do("handle", window)
    first, second = reader.do("open", handle), reader.do("open", handle)
    reader.do("close", first)
    owner.do("write", window, 0, "07")
    assert reader.do("read", second, 0, 1) == "07"
    assert reader.do("read", reader.do("open", handle), 0, 1) == "07"


def test_several_peers_read_at_once(ranks: list[WindowRank]) -> None:
    owner, *readers = ranks
    window = owner.do("allocate", 8 * MIB)
    content, handle = owner.do("fill", window, 1), owner.do("handle", window)
    with ThreadPoolExecutor(len(readers)) as pool:
        seen = pool.map(lambda rank: rank.do("digest", rank.do("open", handle), 0, 8 * MIB), readers, timeout=30)
        assert list(seen) == [content] * len(readers)


def test_ranks_read_from_each_other_at_once(ranks: list[WindowRank]) -> None:
    windows = [rank.do("allocate", 2 * MIB) for rank in ranks]
    contents = [rank.do("fill", window, seed) for seed, (rank, window) in enumerate(zip(ranks, windows, strict=True))]
    handles = [rank.do("handle", window) for rank, window in zip(ranks, windows, strict=True)]

    def read_all(rank: WindowRank) -> list[str]:
        scratch = rank.do("allocate", 2 * MIB)
        return [rank.do("digest", rank.do("open", handle), 0, 2 * MIB, scratch) for handle in handles]

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(read_all, ranks, timeout=30)) == [contents] * len(ranks)


def test_pages_exist_once_touched(separate_ranks: list[WindowRank]) -> None:
    owner, reader, _ = separate_ranks
    before = owner.do("resident")
    window = owner.do("allocate", 256 * MIB)
    peer = reader.do("open", owner.do("handle", window))
    for place in (0, 100 * MIB, 256 * MIB - 2):
        owner.do("write", window, place, "abcd")
        assert reader.do("read", peer, place, place + 2) == "abcd"
    assert owner.do("resident") - before < 32 * MIB
    owner.do("withdraw", window)


def test_a_closed_window_does_not_open(ranks: list[WindowRank]) -> None:
    owner, reader, _ = ranks
    window = owner.do("allocate", 10)
    handle = owner.do("handle", window)
    owner.do("withdraw", window)
    for _ in range(2):
        with pytest.raises(WorldError, match=r"the window .*"):
            reader.do("open", handle)
    owner.do("allocate", 10)
    with pytest.raises(WorldError):
        reader.do("open", handle)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_an_owner_that_is_killed(request: pytest.FixtureRequest, kind: str, victim: RankProcess) -> None:
    _, reader, _ = company(request, kind)
    owner = ProcessRank(victim, kind)
    windows = [owner.do("allocate", 4 * MIB) for _ in range(2)]
    handles = [owner.do("handle", window) for window in windows]
    owner.do("write", windows[0], 0, "abcd")
    peer = reader.do("open", handles[0])
    mapped = reader.do("hold", peer, 0, 2)
    assert owner.do("in_shm") == []
    victim.process.kill()
    victim.process.wait(10)
    if mapped:
        assert reader.do("held", peer) == reader.do("read", peer, 0, 2) == "abcd"
    else:
        _fails_in_time(reader, "read", peer, 0, 4 * MIB)
        _fails_in_time(reader, "read", peer, 0, 4 * MIB)
    for handle in handles:
        _fails_in_time(reader, "open", handle)
    assert reader.do("in_shm") == []


def test_nothing_is_left_behind(separate_ranks: list[WindowRank]) -> None:
    owner, reader, _ = separate_ranks
    before, after = reader.do("open_and_close", owner.do("handle", owner.do("allocate", 100)), 200)
    assert after <= before
    before, after = owner.do("allocate_and_withdraw", 200)
    assert after <= before
    assert owner.do("in_shm") == reader.do("in_shm") == []


def test_a_mapped_window_is_handed_only_to_whoever_knows_its_token(programs: list[RankProcess]) -> None:
    owner, reader, _ = (ProcessRank(program, "mapped") for program in programs)
    handle = owner.do("handle", owner.do("allocate", 100))
    door, _, token = handle.rpartition(":")
    for wrong in (token[:-1] + ("0" if token[-1] != "0" else "1"), token[:-1], token + "0", "", "x" * 1000):
        with pytest.raises(WorldError, match=f"the window {door} "):
            reader.do("open", f"{door}:{wrong}")
    for garbage in (b"\xff\x00" * 40, b"\x00" * 5000, None):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
            visitor.connect(f"\0{door}")
            if garbage:
                visitor.send(garbage)
    assert reader.do("read", reader.do("open", handle), 0, 2) == "0000"


@pytest.mark.parametrize("handle", ["", "nobody:0", "mimatrix-1-0:" + "0" * 32])
def test_a_mapped_window_that_nobody_offers(programs: list[RankProcess], handle: str) -> None:
    with pytest.raises(WorldError, match=r"cannot be opened: .*is its rank still there"):
        ProcessRank(programs[1], "mapped").do("open", handle)


def _fails_in_time(rank: WindowRank, action: str, *arguments: object) -> None:
    started = time.monotonic()
    with pytest.raises(WorldError, match=r"; (is its|it is)"):
        rank.do(action, *arguments)
    assert time.monotonic() - started < READ_S + 2
