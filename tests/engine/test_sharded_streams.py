"""Streams that shard themselves, in real processes: as users write them, and those of WebDataset and Hugging Face."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "sharded_stream.py"


def write_shards(folder: Path) -> None:
    for shard in range(6):
        rows = [{"number": number} for number in range(10 * shard, 10 * shard + 10)]
        (folder / f"{shard:06}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
            for row in rows:
                text = json.dumps(row).encode()
                entry = tarfile.TarInfo(f"{row['number']:06}.json")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))


def launch(kind: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", "2", str(SCRIPT), kind, str(folder), *words]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=settings)


@pytest.mark.parametrize(
    "kind",
    ["plain", pytest.param("webdataset", marks=pytest.mark.long), pytest.param("datasets", marks=pytest.mark.long)],
)
def test_each_sample_of_a_sharded_stream_is_used_once(kind: str, tmp_path: Path) -> None:
    if kind != "plain":
        pytest.importorskip(kind)
    write_shards(tmp_path)
    seen = seen_by_ranks(kind, tmp_path, "per-rank")
    assert sorted(seen[0] + seen[1]) == list(range(60))
    assert all(seen)


@pytest.mark.long
def test_a_resumed_stream_of_ranks_and_loader_processes_goes_on_with_the_rest(tmp_path: Path) -> None:
    whole = seen_by_ranks("plain", tmp_path, "per-rank")
    until = seen_by_ranks("plain", tmp_path, "until-3")
    rest = seen_by_ranks("plain", tmp_path, "rest")
    assert [len(numbers) for numbers in until] == [15, 9]
    assert [ones + others for ones, others in zip(until, rest, strict=True)] == whole


def seen_by_ranks(kind: str, folder: Path, part: str) -> list[list[int]]:
    """Return the numbers of the samples that each rank trained on."""
    done = launch(kind, folder, part)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "webdataset", "datasets"])
def test_a_sharded_stream_is_refused_where_all_ranks_must_read_the_same(kind: str, tmp_path: Path) -> None:
    if kind != "plain":
        pytest.importorskip(kind)
    write_shards(tmp_path)
    done = launch(kind, tmp_path)
    assert done.returncode != 0
    assert "rank 1 reads other samples from the stream than rank 0" in done.stderr
    assert not list(tmp_path.glob("seen-*"))
