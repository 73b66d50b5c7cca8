"""A client of the job server."""

from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx

from mimatrix.api import models as m
from mimatrix.api.keepalive import KeepAliveConnection, is_direct
from mimatrix.core import environment
from mimatrix.core.errors import UserError, WorldError

T = TypeVar("T", bound=m.Message)
_TIMEOUT_S = 15.0
_TIMEOUT = httpx.Timeout(_TIMEOUT_S, connect=5.0)
_LATER = (408, 429)
"""May go well a little later."""
_WORDS = {
    401: "this token is not known to the job server; set MIMATRIX_TOKEN to what mimatrix up printed",
    403: "this token may not do that; ask for one of the role user",
    429: "the job server has seen too many wrong tokens from here; try again in a minute",
}
ADDRESS_FILE, TOKEN_FILE = "address", "token"


def data_folder() -> Path:
    """Where a server of this user keeps its data, unless it is told otherwise."""
    return Path(environment.DATA.get() or Path.home() / ".local" / "share" / "mimatrix")


def find_server() -> tuple[str, str]:
    """Address and token: from the environment, or as a server of the same user left them in its folder."""
    address, token = environment.SERVER.get(), environment.TOKEN.get()
    left = _left(data_folder() / ADDRESS_FILE)
    # What is in the folder is for the server of that folder, and for nobody elsewhere.
    own = _left(data_folder() / TOKEN_FILE) if address in ("", left) else ""
    return address or left, token or own


def _left(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Client:
    """Speaks with one server, as whoever the token belongs to."""

    def __init__(self, address: str, token: str) -> None:
        if not address:
            raise UserError("no job server is known; start one with mimatrix up, or set MIMATRIX_SERVER")
        self._address, self._is_direct = address, is_direct(address)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=address, headers=self._headers, timeout=_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f'"{address}" is no address ({error}); write for example http://127.0.0.1:7700') from None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go."""
        self._http.close()
        if "_line" in self.__dict__:
            self._line.close()

    # For people

    def has_code_archive(self, digest: str) -> bool:
        """Whether an archive need not be uploaded."""
        return self._sent("HEAD", f"/api/code-archives/{digest}", refuses=(404,)).status_code == 200

    def upload(self, digest: str, archive: Path) -> None:
        """Store an archive."""
        with archive.open("rb") as data:
            self._sent("PUT", f"/api/code-archives/{digest}", content=data)

    def submit(self, job: m.Submission) -> m.Job:
        """Hand a job in."""
        return self._post(m.Job, "/api/jobs", job)

    def dry_run(self, job: m.Submission) -> m.DryRunResult:
        """What would become of it now."""
        return self._post(m.DryRunResult, "/api/jobs/dry-run", job)

    def jobs(self, before: int | None = None, most: int = 50, states: tuple[str, ...] = (), user: str = "") -> m.Jobs:
        """A page of jobs, the newest first."""
        asked: dict[str, Any] = {"most": most, "state": list(states)}
        asked |= {"before": before} if before is not None else {}
        asked |= {"user": user} if user else {}
        return self._got(m.Jobs, "/api/jobs", asked)

    def job(self, number: int) -> m.Job:
        """One of them."""
        return self._got(m.Job, f"/api/jobs/{number}")

    def events(self, number: int) -> list[m.Event]:
        """All that happened to it, in order."""
        return [m.Event.model_validate(each) for each in self._sent("GET", f"/api/jobs/{number}/events").json()]

    def log(self, number: int, rank: int, offset: int, generation: int | None = None) -> m.Log:
        """Output of a rank from `offset` on; below 0 counted from its end."""
        asked = {"rank": rank, "offset": offset} | ({} if generation is None else {"generation": generation})
        return self._got(m.Log, f"/api/jobs/{number}/log", asked)

    def ranks(self, number: int) -> m.Ranks:
        """Its ranks as they are now, and who holds the others up."""
        return self._got(m.Ranks, f"/api/jobs/{number}/ranks")

    def history(self, number: int, points: int = 300) -> m.History:
        """How it went."""
        return self._got(m.History, f"/api/jobs/{number}/history", {"points": points})

    def checkpoints(self, number: int) -> list[m.Checkpoint]:
        """What it has saved, the newest first."""
        return [
            m.Checkpoint.model_validate(each) for each in self._sent("GET", f"/api/jobs/{number}/checkpoints").json()
        ]

    def act(self, number: int, action: str) -> m.Job:
        """`cancel` or `retry`."""
        return m.Job.model_validate_json(self._sent("POST", f"/api/jobs/{number}/{action}").content)

    def change(self, number: int, change: m.JobUpdate) -> m.Job:
        """Another priority."""
        sent = self._sent("PATCH", f"/api/jobs/{number}", json=change.model_dump(mode="json"))
        return m.Job.model_validate_json(sent.content)

    def nodes(self) -> list[m.Node]:
        """The machines."""
        return [m.Node.model_validate(each) for each in self._sent("GET", "/api/nodes").json()]

    def tokens(self) -> list[m.Token]:
        """Those that people have."""
        return [m.Token.model_validate(each) for each in self._sent("GET", "/api/tokens").json()]

    def create_token(self, wanted: m.TokenCreate) -> m.Token:
        """A new one, with its secret."""
        return self._post(m.Token, "/api/tokens", wanted)

    def revoke_token(self, number: int) -> None:
        """Its bearer is let in no more."""
        self._sent("DELETE", f"/api/tokens/{number}")

    # For workers

    def join(self, job: int, said: m.RendezvousRequest) -> m.Rendezvous:
        """A worker is there."""
        return self._post(m.Rendezvous, f"/api/jobs/{job}/join", said)

    def report(self, job: int, said: m.Report) -> m.ReportReply:
        """What a worker has to say."""
        path, body = f"/api/jobs/{job}/report", said.model_dump_json(exclude_none=True)
        return m.ReportReply.model_validate_json(
            self._told(path, body) if self._is_direct else self._written(path, body)
        )

    def store(self, job: int, what: str, said: m.Message) -> None:
        """`profile`, `plan` or `checkpoints`."""
        self._sent("PUT", f"/api/jobs/{job}/{what}", json=said.model_dump(mode="json"))

    # Inside

    def _got(self, kind: type[T], path: str, asked: dict[str, Any] | None = None) -> T:
        return kind.model_validate_json(self._sent("GET", path, params=asked).content)

    def _post(self, kind: type[T], path: str, said: m.Message) -> T:
        return kind.model_validate_json(self._sent("POST", path, json=said.model_dump(mode="json")).content)

    @cached_property
    def _line(self) -> KeepAliveConnection:
        return KeepAliveConnection(self._address, self._headers, _TIMEOUT_S, httpx.create_ssl_context)

    def _told(self, path: str, body: str) -> bytes:
        """The answer to what is said again and again."""
        try:
            status, content = self._line.post(path, body)
        except (OSError, HTTPException) as error:
            raise self._silence(error) from None
        if status >= 400:
            raise _objection(status, content)
        return content

    def _written(self, path: str, body: str) -> bytes:
        return self._sent("POST", path, content=body, headers={"Content-Type": "application/json"}).content

    def _sent(self, method: str, path: str, refuses: tuple[int, ...] = (), **what: Any) -> httpx.Response:
        try:
            found = self._http.request(method, path, **what)
        except httpx.TransportError as error:
            raise self._silence(error) from None
        if found.status_code >= 400 and found.status_code not in refuses:
            raise _objection(found.status_code, found.content)
        return found

    def _silence(self, error: Exception) -> WorldError:
        said = str(error) or type(error).__name__
        return WorldError(f"the job server at {self._address} does not answer ({said}); is mimatrix up running there?")


def _objection(status: int, content: bytes) -> Exception:
    try:
        detail = m.Problem.model_validate_json(content).detail
    except ValueError:
        unknown = f"the job server answered {status}; is there another program at this address?"
        detail = _WORDS.get(status, unknown)  # an answer to HEAD has no words of its own
    return WorldError(detail) if status in _LATER or status >= 500 else UserError(detail)
