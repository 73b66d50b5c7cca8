"""The types of ASGI, for middleware."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]
