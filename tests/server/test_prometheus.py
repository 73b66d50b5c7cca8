"""Prometheus itself, where it is installed: it accepts the figures, and all queries of the Grafana file find data."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from support.servers import server

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed"),
    pytest.mark.timeout(150),
]


def test_it_is_scraped_and_every_panel_has_data(tmp_path: Path) -> None:
    with server(tmp_path / "data") as there:
        token = (there.data / "token").read_text().strip()
        there.submit("seen.py", "--devices", "2", "--", "profile")
        address = f"127.0.0.1:{there.port}"
        text = _awaited(lambda: _got(f"http://{address}/metrics", token), "mimatrix_job_predicted_step_seconds{")
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False, timeout=30
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        with _prometheus(address, token, tmp_path) as prometheus:
            for query in _queries():
                asked = f"{prometheus}/api/v1/query?{urlencode({'query': query})}"
                _awaited(lambda asked=asked: _got(asked), '"value":')  # type: ignore[misc]


def _queries() -> list[str]:
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@contextmanager
def _prometheus(target: str, token: str, folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "token").write_text(token)
    settings: dict[str, Any] = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "mimatrix",
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def _got(address: str, token: str = "") -> str:
    try:
        with urlopen(Request(address, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        return str(error)


def _awaited(ask: Callable[[], str], wanted: str) -> str:
    deadline = time.monotonic() + 60
    while wanted not in (text := ask()):
        assert time.monotonic() < deadline, f"{wanted} did not come: {text[:2000]}"
        time.sleep(0.5)
    return text
