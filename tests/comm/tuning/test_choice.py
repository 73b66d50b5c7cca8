import pytest

from mimatrix.collectives import Collective
from mimatrix.comm.calls import SHARDED
from mimatrix.comm.tuning.choice import C10D, LISTS, PADDED, AlgorithmChoice, Carriers, Message, candidates
from mimatrix.core.errors import UserError

ONE_HOST = Carriers(windows=True, send_recv=False, native=True)
HOSTS = Carriers(windows=False, send_recv=True, native=True)
HOSTS_WITH_WINDOWS = Carriers(windows=True, send_recv=True, native=True)
NCCL = Carriers(windows=False, send_recv=True, native=True, native_lists=True)


def offered(carriers: Carriers, collective: Collective, size: int, *, uneven: bool, empty: bool = False) -> list[str]:
    message = Message(
        collective=collective, bytes=size, world_size=4, is_uneven=uneven, has_empty_shards=uneven and empty
    )
    return [str(choice) for choice in candidates(message, carriers)]


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("size", [0, 64, 1 << 20, 1 << 30])
@pytest.mark.parametrize("carriers", [ONE_HOST, HOSTS, HOSTS_WITH_WINDOWS, NCCL])
def test_the_c10d_collective_is_always_a_candidate(collective: Collective, size: int, carriers: Carriers) -> None:
    names = offered(carriers, collective, size, uneven=False)
    assert str(C10D) in names
    assert len(names) == len(set(names)) > 1


@pytest.mark.parametrize("collective", SHARDED)
@pytest.mark.parametrize("carriers", [HOSTS, HOSTS_WITH_WINDOWS, NCCL])
def test_uneven_shards_between_hosts_have_a_padded_c10d_candidate(collective: Collective, carriers: Carriers) -> None:
    names = offered(carriers, collective, 1 << 20, uneven=True)
    assert str(PADDED) in names
    assert str(C10D) not in names
    assert len(names) == len(set(names)) > 1


@pytest.mark.parametrize("collective", SHARDED)
def test_uneven_shards_on_one_host_without_nccl_go_through_windows(collective: Collective) -> None:
    assert offered(ONE_HOST, collective, 1 << 20, uneven=True) == ["windows gdraa"]


@pytest.mark.parametrize("collective", SHARDED)
def test_lists_are_a_candidate_of_nccl_if_no_shard_is_empty(collective: Collective) -> None:
    assert str(LISTS) in offered(NCCL, collective, 1 << 20, uneven=True)
    assert str(LISTS) not in offered(NCCL, collective, 1 << 20, uneven=True, empty=True)
    assert str(LISTS) not in offered(HOSTS, collective, 1 << 20, uneven=True)


@pytest.mark.parametrize(
    "text", ["windows gdraa", "windows gdraa/8", "send_recv ring", "c10d", "c10d lists", "c10d padded"]
)
def test_choice_is_parsed_from_what_it_prints(text: str) -> None:
    assert str(AlgorithmChoice.parse(text)) == text


@pytest.mark.parametrize("text", ["", "windows", "messages ring", "windows gdraa/x", "c10d ring", "windows rings"])
def test_choice_refuses_other_words_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r'; (write for example "send_recv ring"|did you mean "ring"|known are)'):
        AlgorithmChoice.parse(text)
