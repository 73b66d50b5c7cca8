"""Executors for tests, where threads would leave open what has happened by when."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class AtOnce(Executor):
    """Calls functions within `submit`."""

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> "Future[_T]":
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is taken)
            future.set_exception(error)
        return future
