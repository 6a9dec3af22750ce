"""Giving dead source pages back (specification: load.md 9, 10; llama.cpp pull request 24156).

A repacked tensor's pages of the file mapping are never read again. Dropping them costs nothing and loses nothing:
the mapping stays, and a later read faults the same bytes in again.
"""

from __future__ import annotations

import mmap
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal

from refimpl.units import pages_inside

Policy = Literal["progressive", "end", "never"]
Advise = Callable[[int, int, int], None]

FOLIO_BYTES = 2 << 20
"""How far around a range that was read to drop again: a fault maps a whole page-cache folio, up to 2 MiB, so reading
one range can bring dropped neighbours back."""


class Reclaimer:
    """Drops page ranges of one mapping and keeps the account.

    `dead` are the byte ranges of the copied tensors that nobody reads in place. Each is rounded inward to whole
    pages, so that an in-place neighbour keeps the page it shares. `reclaimed` counts every range once. After the
    first failure there is one warning and no further call.
    """

    def __init__(
        self,
        advise: Advise,
        policy: Policy,
        dead: Iterable[tuple[int, int]],
        *,
        page: int = mmap.PAGESIZE,
        supported: bool | None = None,
    ) -> None:
        self._advise = advise
        self._page = page
        self._lock = threading.Lock()
        self._dead = sorted(dead)
        self.policy: Policy = policy
        self.reclaimed = 0
        self.calls = 0
        self.warnings: list[str] = []
        if supported is None:
            supported = sys.platform.startswith("linux") and hasattr(mmap.mmap, "madvise")
        self._active = policy != "never" and supported
        if policy != "never" and not supported:
            self.warnings.append("reclaim: this system has no way to drop pages of a mapping; nothing is given back")

    def behind(self, tensor: tuple[int, int], start: int, end: int) -> None:
        """Progressive: the slice [start, end) of a tensor has been copied."""
        if self.policy == "progressive" and self._is_dead(tensor):
            low, high = pages_inside(*tensor, self._page)
            self._drop(max(low, self._down(start - FOLIO_BYTES)), min(high, self._down(end)))

    def finished(self, tensor: tuple[int, int]) -> None:
        """Progressive: the whole tensor has been copied. It is dropped once more, and counted."""
        if self.policy == "progressive" and self._is_dead(tensor):
            self._count(tensor)

    def beside(self, in_place: tuple[int, int]) -> None:
        """Progressive: an in-place range was read after all copies; drop the dead pages that came with it."""
        if self.policy != "progressive":
            return
        low, high = in_place[0] - FOLIO_BYTES, in_place[1] + FOLIO_BYTES
        first = max(0, bisect_left(self._dead, (low, 0)) - 1)
        for start, end in islice(self._dead, first, None):
            if start >= high:
                break
            inside = pages_inside(start, end, self._page)
            self._drop(max(inside[0], self._down(low)), min(inside[1], self._down(high)))

    def at_end(self) -> None:
        """After everything: `end` drops and counts; `progressive` sweeps again what late faults brought back."""
        for tensor in self._dead:
            if self.policy == "end":
                self._count(tensor)
            elif self.policy == "progressive":
                self._drop(*pages_inside(*tensor, self._page))

    def _is_dead(self, tensor: tuple[int, int]) -> bool:
        place = bisect_left(self._dead, tensor)
        return place < len(self._dead) and self._dead[place] == tensor

    def _down(self, offset: int) -> int:
        return offset // self._page * self._page

    def _count(self, tensor: tuple[int, int]) -> None:
        first, last = pages_inside(*tensor, self._page)
        if self._drop(first, last):
            with self._lock:
                self.reclaimed += last - first

    def _drop(self, first: int, last: int) -> bool:
        if not self._active or last <= first:
            return False
        try:
            self._advise(mmap.MADV_DONTNEED, first, last - first)
        except OSError as error:
            with self._lock:
                if self._active:
                    self._active = False
                    self.warnings.append(
                        f"reclaim: madvise failed ({error.strerror or error}); no more pages are given back"
                    )
            return False
        with self._lock:
            self.calls += 1
        return True
