"""Jobs as files: what may be written without quotes, and one sentence for what is wrong."""

from pathlib import Path

import pytest

from mimatrix.cli.jobs.job_file import read_job
from mimatrix.core.errors import UserError


def read(folder: Path, text: str) -> dict[str, object]:
    (folder / "job.toml").write_text(f'script = "train.py"\n{text}\n')
    path, found = read_job(folder / "job.toml")
    assert path == folder / "train.py"
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("devices = 2", {"devices": "2"}),
        ('devices = "2"', {"devices": "2"}),
        ('devices = "a100:2,v100:4"', {"devices": "a100:2,v100:4"}),
        ("max_time = 90", {"max_time_s": 90.0}),
        ('max_time = "90"', {"max_time_s": 90.0}),
        ('max_time = "1h30m"', {"max_time_s": 5400.0}),
        ('groups = "0/1,2"', {"groups": "0/1,2"}),
        ("", {}),
    ],
)
def test_what_is_read(tmp_path: Path, text: str, found: dict[str, object]) -> None:
    assert read(tmp_path, text) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("devices = true", 'line 2, key "devices": wanted a whole number or a text; write devices = 2 or'),
        ("devices = [2]", 'key "devices": wanted a whole number or a text'),
        ('max_time = "soon"', 'line 2, key "max_time": "soon" is not a time; write for example 90s, 2m, 1h30m or 2d'),
        ("device = 2", 'unknown key; did you mean "devices"?'),
        ("devices = ", "job.toml is not TOML: .*; see docs/jobs.md for an example"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        read(tmp_path, text)
