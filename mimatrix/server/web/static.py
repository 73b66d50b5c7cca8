"""The files of the dashboard, served from memory. They need no token; the data that they show do."""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from mimatrix.server.errors import ApiError

FOLDER = Path(__file__).parents[1] / "dashboard"
_SHOWN = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Not even an injected script could contact another host, and no other page can embed this one.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Cached, but revalidated at each visit, so that an upgraded server shows its own dashboard at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the dashboard."""

    content: bytes
    kind: str
    tag: str


def install(app: FastAPI) -> None:
    """Serve the page at /, and its files below /dashboard."""
    files = read(FOLDER)

    def page(request: Request) -> Response:
        return answer(files["index.html"], request.headers)

    def part(name: str, request: Request) -> Response:
        # Only names that were read at the start: no path leads out of the directory.
        if name not in files:
            raise ApiError(404, f'the dashboard has no "{name}"; reload the page')
        return answer(files[name], request.headers)

    for path, route in (("/", page), ("/dashboard/{name:path}", part)):
        app.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)


def read(folder: Path) -> Mapping[str, File]:
    """Return all files of a directory by their relative paths."""
    return {str(path.relative_to(folder)): _file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def answer(file: File, asked: Mapping[str, str]) -> Response:
    """Return a file, or status 304 if the browser has this version already."""
    headers = {**_HEADERS, "ETag": file.tag}
    known = {tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")}
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


def _file(path: Path) -> File:
    content = path.read_bytes()
    kind = _SHOWN.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
    return File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
