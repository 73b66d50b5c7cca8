"""A connection for the many small requests of a worker, by `http.client`: it takes a third of the time of httpx."""

import http.client
import ssl
import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def is_direct(address: str) -> bool:
    """Return whether a server is reached without a proxy."""
    parts = urlsplit(address)
    return parts.scheme not in getproxies() or bool(proxy_bypass(parts.netloc))


class KeepAliveConnection:
    """A connection that is kept open; the first request after a failure opens a new one. One request at a time."""

    def __init__(
        self, address: str, headers: Mapping[str, str], timeout_s: float, trust: Callable[[], ssl.SSLContext]
    ) -> None:
        parts = urlsplit(address)
        host = parts.hostname or ""
        self._http = (
            http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=trust())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        )
        self._headers = {**headers, "Content-Type": "application/json"}
        self._path = parts.path.rstrip("/")
        self._turn = threading.Lock()

    def post(self, path: str, body: str) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of the answer.

        Raises:
            OSError: The server cannot be reached, or closed the connection.
            http.client.HTTPException: The answer is not HTTP.
        """
        with self._turn:
            was_open = self._http.sock is not None
            try:
                return self._posted(path, body)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # The server may have closed an idle connection, which shows only at the next request.
                if not was_open:
                    raise
                return self._posted(path, body)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _posted(self, path: str, body: str) -> tuple[int, bytes]:
        try:
            self._http.request("POST", self._path + path, body.encode(), self._headers)
            answer = self._http.getresponse()
            return answer.status, answer.read()
        except BaseException:
            self._http.close()
            raise
