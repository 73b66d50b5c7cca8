"""Shared storages next to a mapped window: what peers see of them, and that nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mimatrix.comm.memory.memfd import MemfdPeer, MemfdWindow, MemfdWindows
from mimatrix.comm.memory.shared_storage import STORAGE_SPACE
from mimatrix.core.errors import WorldError

COUNT = 100_000
TINY = """
import torch
from mimatrix.comm.memory.memfd import MemfdWindows
storages, tensor = MemfdWindows().allocate(4096).storages, torch.arange(4.0).repeat(1 << 20)
for _ in range(3):
    storages.share(tensor.untyped_storage())
assert storages.offset_of(tensor.untyped_storage()) is None and tensor[-1] == 3
print(storages.refused)
"""


@pytest.fixture
def pair() -> Iterator[tuple[MemfdWindow, MemfdPeer]]:
    """Yield a window, and the same window as a peer has it."""
    kind = MemfdWindows()
    window = kind.allocate(4096)
    yield window, kind.open(window.handle())
    window.close()
    kind.close()


def share(window: MemfdWindow, tensor: torch.Tensor) -> int:
    """Share a tensor by using it twice; return its offset."""
    for _ in range(2):
        window.storages.share(tensor.untyped_storage())
    offset = window.storages.offset_of(tensor.untyped_storage())
    assert offset is not None
    return offset


def seen(peer: MemfdPeer, offset: int, start: int = 0, stop: int = COUNT) -> torch.Tensor:
    return peer.view(offset + 8 * start, offset + 8 * stop).view(torch.float64)


def open_storages() -> set[str]:
    """Files under shared storages that this process has open; each has a name of its own."""
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return {link for link in links if link.startswith("/dev/shm/torch_")}


def test_a_storage_that_is_used_once_is_not_shared(pair: tuple[MemfdWindow, MemfdPeer]) -> None:
    tensor = torch.ones(COUNT, dtype=torch.float64)
    before = tensor.data_ptr()
    pair[0].storages.share(tensor.untyped_storage())
    assert pair[0].storages.offset_of(tensor.untyped_storage()) is None
    assert tensor.data_ptr() == before


def test_a_peer_reads_a_shared_storage_and_views_follow_it(pair: tuple[MemfdWindow, MemfdPeer]) -> None:
    window, peer = pair
    tensor = torch.arange(COUNT, dtype=torch.float64)
    middle = tensor[10:20].view(2, 5)
    offset = share(window, tensor)
    assert offset >= STORAGE_SPACE
    assert torch.equal(seen(peer, offset), torch.arange(COUNT, dtype=torch.float64))
    middle.fill_(-1)
    assert (seen(peer, offset, 10, 20) == -1).all()
    assert (tensor[10:20] == -1).all()
    assert peer.view(0, 4096).sum() == 0  # the window itself is still there


def test_a_freed_storage_makes_room_for_the_next(pair: tuple[MemfdWindow, MemfdPeer]) -> None:
    window, peer = pair
    first = torch.full((COUNT,), 1.0, dtype=torch.float64)
    others = open_storages()
    offset = share(window, first)
    assert seen(peer, offset)[0] == 1
    files = open_storages() - others
    assert len(files) == 1
    del first
    second = torch.full((COUNT,), 2.0, dtype=torch.float64)
    other = share(window, second)
    assert other != offset
    assert (other // STORAGE_SPACE) % 256 == (offset // STORAGE_SPACE) % 256
    assert seen(peer, other)[0] == 2
    assert not files & open_storages()
    with pytest.raises(WorldError, match="refused"):
        seen(peer, offset)


def test_other_storages_are_not_shared(pair: tuple[MemfdWindow, MemfdPeer]) -> None:
    tensor, other = (torch.ones(COUNT, dtype=torch.float64) for _ in range(2))
    share(pair[0], tensor)
    pair[0].storages.share(tensor.untyped_storage())
    assert len(pair[0].storages) == 1
    assert pair[0].storages.offset_of(other.untyped_storage()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a small /dev/shm")
def test_storages_stay_private_if_shared_memory_is_full(tmp_path: Path) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    small = f"mount -t tmpfs -o size=1m none /dev/shm && {sys.executable} {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", small], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "unable to" in done.stdout
