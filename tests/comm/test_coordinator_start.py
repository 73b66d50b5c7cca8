"""How ranks find the coordinator, and what of it lies in a store that everyone can read."""

import json

import pytest
from support.ranks import ARENA_BYTES, together
from torch._C._distributed_c10d import HashStore

from mimatrix.comm import Endpoint
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.core import environment
from mimatrix.core.errors import UserError

SECRET = "what all ranks of this job know"


class RecordingStore:
    """A store that remembers all that was written to it."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.written: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.written.append(f"{key} = {value}")
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        return value


def join(store: RecordingStore, rank: int) -> Endpoint:
    return Endpoint.join(store, rank, 2, {"host": MemfdWindows()}, host="here", arena_bytes=ARENA_BYTES)


def join_all(store: RecordingStore) -> list[tuple[str, ...]]:
    """Join with two ranks, and return what gives access to their memory."""

    def each(rank: int) -> tuple[str, ...]:
        endpoint = join(store, rank)
        handles = tuple(endpoint.locations[rank].windows.values())
        endpoint.close()
        return handles

    return together(2, each)


def test_nothing_secret_is_in_the_store_if_ranks_share_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.JOB_SECRET.name, SECRET)
    store = RecordingStore()
    handles = join_all(store)
    assert all(handles)
    text = "\n".join(store.written)
    assert not any(part in text for own in handles for handle in own for part in handle.split(":"))
    assert SECRET not in text
    (contact,) = (line for line in store.written if line.startswith("mimatrix/coordinator"))
    address, _, published = json.loads(contact.partition(" = ")[2])
    assert (address, published) == ("127.0.0.1", "")


def test_without_a_secret_a_random_token_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under plain torchrun ranks share nothing else; SECURITY.md says so."""
    monkeypatch.delenv(environment.JOB_SECRET.name, raising=False)
    store = RecordingStore()
    join_all(store)
    (contact,) = (line for line in store.written if line.startswith("mimatrix/coordinator"))
    assert len(json.loads(contact.partition(" = ")[2])[2]) == 64


def test_a_secret_that_only_rank_0_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordingStore()
    store.set("mimatrix/endpoint/0", json.dumps({"host": "here", "address": "127.0.0.1"}))
    store.set("mimatrix/coordinator", json.dumps(["127.0.0.1", 9, ""]))
    monkeypatch.delenv(environment.JOB_SECRET.name, raising=False)
    with pytest.raises(UserError, match="rank 0 has MIMATRIX_JOB_SECRET, and rank 1 has not; set it on all ranks"):
        join(store, 1)
