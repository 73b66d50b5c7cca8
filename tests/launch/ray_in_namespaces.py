"""Run inside the head's namespace by test_ray_in_namespaces.py: FOLDER ADDRESS CUT..., the last ends a link."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.launcher_contract import POLITE, codes, eventually, pack, python, runs

from mimatrix.launch.exit_causes import EndedFor
from mimatrix.launch.launcher import Member, Phase, Team
from mimatrix.launch.ray.launcher import RayLauncher

# What a member sees of the network it is in.
WHERE = """
import os, socket, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((os.environ["PEER"], 9))
    print("at", probe.getsockname()[0], os.getpid(), flush=True)
time.sleep(600)
"""
CUT_S = 40.0


def main(folder: Path, address: str, cut: list[str]) -> None:
    launcher = RayLauncher(folder / "server", address)
    eventually(lambda: len(launcher.nodes()) == 3, "three nodes")
    nodes = {node.name: node.address for node in launcher.nodes()}
    archive = pack(folder / "job.tar.gz", {"data/hello.txt": "hello\n"})
    # A member reaches another machine by the address that its node has.
    peers = {"n0": nodes["n1"], "n1": nodes["n0"], "n2": nodes["n0"]}
    members = tuple(Member(name, 0, {"PEER": peers[name]}) for name in ("n2", "n0", "n1"))
    team = Team(name="job-1.g1", command=python(WHERE), members=members, archive=archive, grace_s=2.0)
    ends_well(launcher, replace(team, name="polite", command=python(POLITE)))
    pids = each_is_at_its_node(launcher, team, nodes)
    is_lost(launcher, team, pids, cut)
    launcher.close()


def ends_well(launcher: RayLauncher, team: Team) -> None:
    launcher.start(team)
    for rank in range(3):
        eventually(lambda rank=rank: launcher.read_log(team.name, rank, 0).data == b"up\n", "output")  # type: ignore[misc]
    launcher.end(team.name)
    eventually(lambda: launcher.states()[team.name].has_ended, "the end")
    assert codes(launcher.states()[team.name]) == [5, 5, 5]
    launcher.forget(team.name)
    say("started, read, ended and forgotten on three nodes")


def each_is_at_its_node(launcher: RayLauncher, team: Team, nodes: dict[str, str]) -> list[int]:
    launcher.start(team)
    for rank in range(3):
        eventually(lambda rank=rank: b"\n" in launcher.read_log(team.name, rank, 0).data, "output")  # type: ignore[misc]
    said = [launcher.read_log(team.name, rank, 0).data.decode().split() for rank in range(3)]
    assert [words[1] for words in said] == [nodes[member.node] for member in team.members], said
    say(f"members are at {' '.join(words[1] for words in said)}")
    return [int(words[2]) for words in said]


def is_lost(launcher: RayLauncher, team: Team, pids: list[int], cut: list[str]) -> None:
    subprocess.run(cut, check=True, timeout=10)
    began_s = time.monotonic()
    within(lambda: launcher.states()[team.name].has_ended, "the loss of n2")
    state = launcher.states()[team.name]
    assert state.first_failure == 0
    assert [member.phase for member in state.members] == [Phase.LOST, Phase.EXITED, Phase.EXITED]
    lost, ended = state.members[0].cause, state.members[1].cause
    assert lost
    assert lost.detail.startswith("node n2 is gone")
    assert ended
    assert (ended.ended_for, ended.because_of) == (EndedFor.PEER, 0)
    say(f"lost after {time.monotonic() - began_s:.1f} s: {lost.detail}")
    within(lambda: not any(map(runs, pids)), "the end of the member that was cut off")
    say(f"the one that was cut off has ended after {time.monotonic() - began_s:.1f} s")


def within(happens: object, what: str) -> None:
    deadline = time.monotonic() + CUT_S
    while not happens():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {CUT_S:g} s: {what}"
        time.sleep(0.1)


def say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
