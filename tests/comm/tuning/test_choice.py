import pytest

from mimatrix.collectives import Collective
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice, Transport, candidates
from mimatrix.core.errors import UserError


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("size", [0, 64, 1 << 20, 1 << 30])
@pytest.mark.parametrize("transports", [("windows", "c10d"), ("send_recv", "c10d"), ("windows", "send_recv", "c10d")])
def test_the_c10d_collective_is_always_a_candidate(
    collective: Collective, size: int, transports: tuple[Transport, ...]
) -> None:
    found = list(candidates(collective, size, 4, transports))
    assert C10D in found
    assert len(found) == len(set(map(str, found))) > 1


@pytest.mark.parametrize("text", ["windows gdraa", "windows gdraa/8", "send_recv ring"])
def test_choice_is_parsed_from_what_it_prints(text: str) -> None:
    assert str(AlgorithmChoice.parse(text)) == text


@pytest.mark.parametrize("text", ["", "windows", "messages ring", "windows gdraa/x", "c10d", "windows rings"])
def test_choice_refuses_other_words_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r'; (write for example "send_recv ring"|did you mean "ring"|known are)'):
        AlgorithmChoice.parse(text)
