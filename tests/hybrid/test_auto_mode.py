"""`mode="auto"` as real processes: what is chosen is what runs, on every rank, and it says why."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mimatrix
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.hybrid_price import GroupPrice, HybridPrice
from mimatrix.planner.mode_choice import ModeChoice
from mimatrix.planner.model.plan import Plan, RankPlan
from mimatrix.planner.model.split import Split
from mimatrix.processes.ports import free_port

SCRIPT = str(Path(__file__).parent / "scripts" / "auto.py")
pytestmark = pytest.mark.timeout(150)


def told(folder: Path, count: int, **more: str) -> tuple[list[dict[str, Any]], str]:
    """Return what `count` ranks, each on its own host, report, and what rank 0 writes for people."""
    known = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), **more}
    known |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "MIMATRIX_CACHE": str(folder / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(folder)],
            env=known | {"RANK": str(rank), "MIMATRIX_HOST": f"host{rank}"},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * count, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)], said[0]


def learnt(losses: list[float]) -> bool:
    return all(map(math.isfinite, losses)) and min(losses) < losses[0]


@pytest.mark.long
def test_auto_mode_runs_what_it_chose(tmp_path: Path) -> None:
    """Which it is depends on what else this machine does: that is for bench/hybrid/auto_mode.py."""
    ranks, said = told(tmp_path, 2)
    (chosen,) = {(each["mode"], each["ranks"]) for each in ranks}
    assert chosen in {("sync", 2), ("hybrid", 1)}
    assert ranks[0]["reason"] == ranks[1]["reason"] == ranks[0]["because"]
    assert ranks[0]["reason"].startswith(f"{chosen[0]}: ")
    assert said.count(ranks[0]["reason"]) == 1
    assert learnt(ranks[0]["losses"])


def test_auto_mode_refuses_settings_per_rank() -> None:
    with pytest.raises(UserError, match="leave out batch"):
        mimatrix.init(16, batch=[8, 8], mode="auto")
    with pytest.raises(UserError, match="set global_batch"):
        mimatrix.init(mode="auto")


def test_auto_mode_with_one_rank_is_sync() -> None:
    assert mimatrix.init(16, mode="auto", quiet=True).status.mode == "sync"


def test_a_lost_group_rejoins_in_the_chosen_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = tmp_path / "meeting"
    part = RankPlan(name="cpu", busy_s=0.1, idle_s=0.0, memory_bytes=1, room_bytes=2)
    plan = Plan(
        stage=0,
        split=Split.of((16,)),
        shares=Shares.equal(1),
        parts=(part,),
        step_s=0.1,
        communication_s=0.0,
        reasons=("why",),
    )
    groups = tuple(GroupPrice((rank,), plan, 0.01, 0.2, 1.0, steps=7) for rank in range(2))
    choice = ModeChoice("hybrid", "so it is", plan, HybridPrice(groups, False, 1e6, local_steps=7))
    word.touch()
    (tmp_path / "meeting-choice").write_text(json.dumps({"version": 2, "choice": choice.to_json()}))
    known = {"RANK": "1", "WORLD_SIZE": "2", "MIMATRIX_GROUPS": "[[0], [1]]", "MIMATRIX_RENDEZVOUS": str(word)}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    run = mimatrix.init(16, mode="auto", quiet=True)
    assert (run.status.mode, run.status.group, run.rank, run.world_size) == ("hybrid", 1, 0, 1)
    assert run.mode_choice == choice
    monkeypatch.setenv("MIMATRIX_REJOINS", "1")
    (tmp_path / "meeting-choice").write_text(json.dumps({"version": 0, "choice": choice.to_json()}))
    with pytest.raises(UserError, match="written by another version"):
        mimatrix.init(16, mode="auto", quiet=True)
    word.unlink()
    (tmp_path / "meeting-choice").unlink()
    with pytest.raises(UserError, match="the chosen mode cannot be read"):
        mimatrix.init(16, mode="auto", quiet=True)
