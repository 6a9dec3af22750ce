"""Copying tensors through the repack kernels, slice by slice and in file order (specification: load.md 4, 10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import MachineError, RefimplError
from refimpl.layouts import Layout
from refimpl.loading.reclaim import Reclaimer

SLICE_BYTES = 4 << 20
"""What one thread copies at a time: small enough for the peak, large enough to keep the threads busy."""

SMALL_BYTES = 6 << 20
"""Up to this size a tensor's source is dropped at one go: each drop interrupts the other threads' processors."""

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


class _Countdown:
    """Slices of one tensor that are still to be copied, whatever thread copies them."""

    def __init__(self, slices: int) -> None:
        self._left = slices
        self._lock = Lock()

    def last(self) -> bool:
        """One more is done; True for the last of all."""
        with self._lock:
            self._left -= 1
            return self._left == 0


def copy_all(copies: list[Copy], repack_groups: Callable[..., None], threads: int, steps: Steps) -> None:
    """Repack all tensors, slice by slice in file order, never more than two slices per thread under way."""

    def run(copy: Copy, first: int, count: int, slices: _Countdown) -> None:
        group_bytes = copy.layout.group_bytes(copy.blocks)
        low, high = first * group_bytes, (first + count) * group_bytes
        start = copy.source[0]
        source = copy.file[start + low : start + high]
        repack_groups(copy.layout, source, copy.target[low:high], count, copy.blocks)
        if slices.last():
            copy.reclaimer.finished(copy.source)
        elif copy.target.nbytes > SMALL_BYTES:
            copy.reclaimer.behind(copy.source, start + low, start + high)

    with ThreadPoolExecutor(threads, thread_name_prefix="refimpl-load") as pool:
        try:
            slots: deque[Future[None]] = deque()
            for copy in copies:
                steps.before(copy.target.nbytes)
                step = max(1, SLICE_BYTES // copy.layout.group_bytes(copy.blocks))
                firsts = range(0, copy.groups, step)
                slices = _Countdown(len(firsts))
                for first in firsts:
                    if len(slots) >= 2 * threads:
                        slots.popleft().result()
                    slots.append(pool.submit(run, copy, first, min(step, copy.groups - first), slices))
            for slot in slots:
                slot.result()
            steps.end()
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, RuntimeError) and "start new thread" in str(error):
                raise MachineError("E_THREADS", f"the system starts no more threads: {error}") from None
            raise
