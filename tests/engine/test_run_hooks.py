"""Hooks on runs are called while their context is open, and only then."""

import pytest

from mimatrix.engine.run_hooks import notify, observe_runs


def test_a_hook_sees_every_run_while_it_is_open() -> None:
    runs: list[object] = []
    with observe_runs(runs.append):
        notify("first")
        notify("second")
    notify("third")
    assert runs == ["first", "second"]


def test_a_hook_is_removed_after_an_exception() -> None:
    runs: list[object] = []

    def train() -> None:
        with observe_runs(runs.append):
            notify("first")
            raise RuntimeError("the script failed")

    with pytest.raises(RuntimeError, match="the script failed"):
        train()
    notify("second")
    assert runs == ["first"]


def test_nested_hooks_all_see_a_run() -> None:
    outer: list[object] = []
    inner: list[object] = []
    with observe_runs(outer.append):
        with observe_runs(inner.append):
            notify("first")
        notify("second")
    assert (outer, inner) == (["first", "second"], ["first"])
