"""The files of the dashboard: anybody gets them, from here alone, and nothing beside them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import AppServer, app_server

from mimatrix.server.web.static import FOLDER

OURS = sorted(path for path in FOLDER.rglob("*") if path.is_file() and "vendor" not in path.parts)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with app_server(tmp_path_factory.mktemp("pages")) as found:
        yield found


def test_the_page_needs_no_token_and_its_data_do(there: AppServer) -> None:
    answer = there.ask("", "GET", "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert there.ask("", "HEAD", "/").status_code == 200
    assert there.ask("", "GET", "/api/jobs").status_code == 401


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("css/base.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
        ("vendor/uplot/uPlot.esm.js", "text/javascript; charset=utf-8"),
        ("vendor/uplot/LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_files_say_what_they_are_and_are_sent_once(there: AppServer, name: str, kind: str) -> None:
    answer = there.ask("", "GET", f"/dashboard/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = there.http.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_lets_nothing_in_from_elsewhere(there: AppServer) -> None:
    policy = dict(part.strip().split(" ", 1) for part in there.ask("", "GET", "/").headers[POLICY].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"


POLICY = "content-security-policy"


@pytest.mark.parametrize("path", ["../pages.py", "..%2fpages.py", "%2e%2e/pages.py", "/etc/passwd", "nothing.js", ""])
def test_no_path_leads_out(there: AppServer, path: str) -> None:
    assert there.ask("", "GET", f"/dashboard/{path}").status_code == 404


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_our_files_name_no_other_host_and_only_files_that_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9]+\.[a-z]", text)
    imported = [path.parent / name for name in re.findall(r'from "(\.{1,2}/[^"]+)"', text)]
    linked = [FOLDER / name for name in re.findall(r'(?:href|src)="dashboard/([^"]+)"', text)]
    assert [str(file) for file in imported + linked if not file.is_file()] == []
