"""Who a worker is, and which variables its script finds."""

import os
from unittest import mock

import pytest

from mimatrix.api.models import Rendezvous
from mimatrix.core.errors import UserError, WorldError
from mimatrix.worker.rendezvous import WorkerIdentity, own_address, set_environment, take_token

ENVIRON = {
    "MIMATRIX_SERVER": "http://127.0.0.1:7700",
    "MIMATRIX_TOKEN": "secret",
    "MIMATRIX_JOB": "7",
    "MIMATRIX_GENERATION": "2",
    "MIMATRIX_RANK": "1",
}


def test_the_identity_of_a_worker_is_read_from_the_environment() -> None:
    identity = WorkerIdentity.read(ENVIRON | {"MIMATRIX_REJOINS": "3"})
    assert (identity.server, identity.token) == ("http://127.0.0.1:7700", "secret")
    assert (identity.job, identity.generation, identity.rank, identity.rejoins) == (7, 2, 1, 3)
    assert WorkerIdentity.read(ENVIRON).rejoins == 0


@pytest.mark.parametrize("name", list(ENVIRON))
def test_a_worker_started_by_hand_is_told_what_is_missing(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is not set.*; use mimatrix submit"):
        WorkerIdentity.read({key: value for key, value in ENVIRON.items() if key != name})


def test_an_identity_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="start it with mimatrix submit"):
        WorkerIdentity.read(ENVIRON | {"MIMATRIX_RANK": "first"})


def test_a_script_finds_the_variables_of_torchrun() -> None:
    before = dict(os.environ)
    joined = Rendezvous(generation=2, ranks=4, local_rank=0, local_ranks=2, master_address="10.0.0.7", master_port=1234)
    try:
        set_environment(joined, WorkerIdentity.read(ENVIRON | {"MIMATRIX_REJOINS": "3"}))
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        assert [os.environ[name] for name in names] == ["1", "4", "0", "10.0.0.7", "1234", "4"]
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_workers_of_one_generation_share_a_secret() -> None:
    """It does not reveal the token of the job server, and is another one in the next generation."""
    joined = Rendezvous(generation=2, ranks=4, local_rank=0, local_ranks=2, master_address="10.0.0.7", master_port=1234)
    seen = []
    for more in ({}, {"MIMATRIX_RANK": "2"}, {"MIMATRIX_GENERATION": "3"}, {"MIMATRIX_JOB": "8"}):
        with mock.patch.dict(os.environ):
            set_environment(joined, WorkerIdentity.read(ENVIRON | more))
            seen.append(os.environ["MIMATRIX_JOB_SECRET"])
    first, of_another_rank, later, of_another_job = seen
    assert first == of_another_rank
    assert len({first, later, of_another_job}) == 3
    assert ENVIRON["MIMATRIX_TOKEN"] not in first


def test_the_own_address_is_the_one_towards_the_server() -> None:
    assert own_address("http://127.0.0.1:7700") == "127.0.0.1"
    with pytest.raises(WorldError, match=r"cannot be reached .*; check the network"):
        own_address("http://no-such-host.invalid:7700")


def test_a_worker_reads_its_token_from_a_pipe_once() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"from a pipe")
    os.close(writes)
    environ = {key: value for key, value in ENVIRON.items() if key != "MIMATRIX_TOKEN"}
    environ["MIMATRIX_TOKEN_FD"] = str(reads)
    assert WorkerIdentity.read(take_token(environ)).token == "from a pipe"
    with pytest.raises(UserError, match="the token of this worker cannot be read"):
        take_token(environ)
    assert WorkerIdentity.read(take_token(ENVIRON)).token == "secret"
