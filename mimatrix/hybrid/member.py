"""A group of ranks among others: in place of a step of its optimizer it pushes to the shards, and pulls from them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from mimatrix.comm.group import Group
from mimatrix.engine.binding import Binding
from mimatrix.hybrid.layout import Layout
from mimatrix.hybrid.link import Link, Pulled
from mimatrix.hybrid.shard import Settings

Connect = Callable[[Layout, torch.Tensor], Link]
"""Finds the shards, or makes those that are this group's; only its first rank does."""


@dataclass(frozen=True, slots=True)
class Pushing:
    """How it goes with a group's pushes."""

    pushes: int = 0
    staleness: float = 0.0
    """Of the last push."""


class Member:
    """One rank of a group, as its run sees the others (`engine.outer.Outer`)."""

    def __init__(self, connect: Connect, *, is_first: bool = True, overlaps: bool = False) -> None:
        self._connect, self._is_first, self._overlaps = connect, is_first, overlaps
        self._link: Link | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mimatrix-push")
        self._under_way: Future[Pulled] | None = None
        self._has: Pulled | None = None
        """What the parameters are now; known to the first rank."""
        self.samples = 0
        self.now = Pushing()

    def begin(self, model: nn.Module, binding: Binding, group: Group | None, *, cut: bool) -> None:
        """Meet the others: all begin with the same parameters."""
        del model
        self._group, self._cut = group, cut
        known = [[each for each in part if each.requires_grad] for part in binding.given]
        self._layout = Layout.of(binding, known)
        self._row = torch.zeros(self._layout.count, dtype=self._layout.dtype)
        self._layout.read_values(self._row)
        self._join()
        if self._is_first:
            self._link = self._connect(self._layout, self._row)
            self._has = self._link.pull()
        self._take(self._has)

    def step(self, samples: int, usual: int) -> None:
        """Push this batch's gradient, and go on with what there is then."""
        self._layout.read_gradients(self._row)
        self._join()
        touched = self._layout.touched()
        if self._group and self._cut:
            self._group.all_reduce(touched).wait()
        untouched = (touched == 0).nonzero().flatten().tolist()
        if self._is_first:
            assert self._link
            assert self._has
            seen = self._has.versions
            if self._under_way:
                self._has = self._under_way.result()
            work = (self._row.clone(), samples, usual, self._layout.settings(), seen, untouched)
            self._under_way = self._thread.submit(self._push, *work)
            if not self._overlaps:
                self._has, self._under_way = self._under_way.result(), None
        self._take(self._has)

    def close(self) -> None:
        """Let the last push arrive."""
        if self._under_way:
            self._under_way.result()
        self._thread.shutdown()
        if self._link:
            self._link.close()

    def _push(
        self,
        gradient: torch.Tensor,
        samples: int,
        usual: int,
        settings: list[Settings],
        seen: tuple[int, ...],
        untouched: list[int],
    ) -> Pulled:
        link = self._link
        assert link
        found = link.push(gradient, samples, usual, settings, seen, untouched)
        self.now = Pushing(self.now.pushes + 1, found.staleness)
        return link.pull()

    def _join(self) -> None:
        """Where each rank has a part, all parts: nothing else is added to any of them."""
        if self._group and self._cut:
            self._group.all_reduce(self._row).wait()

    def _take(self, found: Pulled | None) -> None:
        """What the first rank has becomes what all have."""
        if self._group is None:
            assert found
            self._layout.write_values(found.values)
            self.samples = found.samples
            return
        counted = torch.zeros(1, dtype=torch.int64)
        if found:
            self._row.copy_(found.values)
            counted[0] = found.samples
        self._group.broadcast(self._row).wait()
        self._group.broadcast(counted).wait()
        self._layout.write_values(self._row)
        self.samples = int(counted[0])
