"""The dashboard: files that the server has in memory, and hands to any browser. What they show needs a token."""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from mimatrix.server.errors import ApiError

FOLDER = Path(__file__).parents[1] / "dashboard"
_SHOWN = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Not even a script that got into the page could ask anybody else, or be framed by them.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Kept by the browser, and asked for at each visit: another version of the server is another page at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """One of them."""

    content: bytes
    kind: str
    tag: str


def install(app: FastAPI) -> None:
    """Serve the page at /, and what it is made of below /dashboard."""
    files = read(FOLDER)

    def page(request: Request) -> Response:
        return answer(files["index.html"], request.headers)

    def part(name: str, request: Request) -> Response:
        # Only names that were found at the start: no path leads out of the folder.
        if name not in files:
            raise ApiError(404, f'the dashboard has no "{name}"; reload the page')
        return answer(files[name], request.headers)

    for path, route in (("/", page), ("/dashboard/{name:path}", part)):
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)


def read(folder: Path) -> Mapping[str, File]:
    """All files by their paths."""
    return {str(path.relative_to(folder)): _file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def answer(file: File, asked: Mapping[str, str]) -> Response:
    """The file, unless the browser has this very one already."""
    headers = {**_HEADERS, "ETag": file.tag}
    known = {tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")}
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


def _file(path: Path) -> File:
    content = path.read_bytes()
    kind = _SHOWN.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
    return File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
