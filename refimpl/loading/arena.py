"""Anonymous memory for repacked tensors: one block for all of them, in large pages where the system has them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import MachineError
from refimpl.units import human, pad

ALIGNMENT = 64
"""Of each tensor in the arena; CPU_REPACK itself asks for 32."""


def _anonymous(nbytes: int) -> mmap.mmap:
    """Private zero pages. Python's default is shared memory, which has no large pages and counts as a file."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


class Arena:
    """One anonymous block, cut into tensors. Freed when the last view of it is gone."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Reserve room for tensors of these sizes in bytes. MachineError E_MEMORY if the system refuses."""
        self.starts: list[int] = []
        total = 0
        for size in sizes:
            self.starts.append(total)
            total += pad(size, ALIGNMENT)
        self._sizes = list(sizes)
        self._map: mmap.mmap | None = None
        if total:
            try:
                self._map = _anonymous(total)
            except (OSError, OverflowError, ValueError) as error:
                raise MachineError("E_MEMORY", f"cannot reserve {human(total)} for repacked tensors: {error}") from None
            # The first touch of small pages costs as much as the copy itself.
            with suppress(OSError, AttributeError):
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def tensor(self, number: int) -> NDArray[np.uint8]:
        """The writable memory of tensor `number`."""
        if self._map is None:
            raise ValueError("arena is closed")
        return np.frombuffer(self._map, np.uint8, self._sizes[number], self.starts[number])

    def close(self) -> None:
        """Let go of the block; it is freed when the last view of it is gone."""
        mapping, self._map = self._map, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()
