"""Copying tensors through the repack kernels, slice by slice and in file order (specification: load.md 4, 10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import RefimplError
from refimpl.layouts import Layout
from refimpl.loading.reclaim import Reclaimer

SLICE_BYTES = 4 << 20
"""What one thread copies at a time: small enough for the peak, large enough to keep the threads busy."""

Progress = Callable[[int, int], bool | None]
Bytes = NDArray[np.uint8]


class LoadCancelled(RefimplError):
    """E_CANCELLED: the progress callback said no. Everything has been freed."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor to be repacked: where it lies in which file, its shape in row groups, and its place in memory."""

    file: Bytes
    reclaimer: Reclaimer
    layout: Layout
    source: tuple[int, int]
    groups: int
    blocks: int
    target: Bytes


class Steps:
    """Calls of the progress callback: before each tensor and once at the end, in-place tensors first (load.md 4)."""

    def __init__(self, in_place: Iterable[int], copied: Iterable[int], callback: Progress | None) -> None:
        """`in_place` and `copied` are the tensors' sizes in bytes."""
        in_place = list(in_place)
        self._callback = callback
        self._done = 0
        self._total = sum(in_place) + sum(copied)
        for nbytes in in_place:
            self.before(nbytes)

    def before(self, nbytes: int) -> None:
        """One tensor of `nbytes` comes next."""
        self._call()
        self._done += nbytes

    def end(self) -> None:
        """All is done."""
        self._call()

    def _call(self) -> None:
        if self._callback is not None and self._callback(self._done, self._total) is False:
            raise LoadCancelled("E_CANCELLED", f"cancelled after {self._done} of {self._total} bytes")


def copy_all(
    copies: list[Copy],
    repack_groups: Callable[..., None],
    threads: int,
    steps: Steps,
) -> None:
    """Repack all tensors, slice by slice in file order, never more than two slices per thread under way."""

    def run(copy: Copy, first: int, count: int) -> None:
        group_bytes = copy.blocks * copy.layout.super_block_bytes
        low, high = first * group_bytes, (first + count) * group_bytes
        start = copy.source[0]
        source = copy.file[start + low : start + high]
        repack_groups(copy.layout, source, copy.target[low:high], count, copy.blocks)
        copy.reclaimer.behind(copy.source, start + low, start + high)

    def finish(copy: Copy, parts: list[Future[None]]) -> None:
        for part in parts:
            part.result()
        copy.reclaimer.finished(copy.source)

    with ThreadPoolExecutor(threads, thread_name_prefix="refimpl-load") as pool:
        running: deque[tuple[Copy, list[Future[None]]]] = deque()
        try:
            slots: deque[Future[None]] = deque()
            for copy in copies:
                while running and all(part.done() for part in running[0][1]):
                    finish(*running.popleft())
                steps.before(copy.target.nbytes)
                parts: list[Future[None]] = []
                running.append((copy, parts))
                step = max(1, SLICE_BYTES // (copy.blocks * copy.layout.super_block_bytes))
                for first in range(0, copy.groups, step):
                    if len(slots) >= 2 * threads:
                        slots.popleft().result()
                    part = pool.submit(run, copy, first, min(step, copy.groups - first))
                    parts.append(part)
                    slots.append(part)
            while running:
                finish(*running.popleft())
            steps.end()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
