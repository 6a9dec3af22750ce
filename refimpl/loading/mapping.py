"""A model file in the address space: whole, shared, read-only (specification: load.md 3)."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import MachineError, ModelError, OpenError
from refimpl.gguf.files import file_identity

MADV_POPULATE_READ = 22
"""Linux 5.14: map and read the pages of a range now. Python's mmap module has no name for it yet."""


class FileMapping:
    """The mapping of one file. `bytes` is a read-only uint8 array over all of it.

    Views handed out keep the memory alive, so closing never pulls it from under a reader: close() drops this
    object's own hold, and the pages go with the last view.
    """

    def __init__(
        self, path: str | os.PathLike[str], expected_size: int, identity: tuple[int, ...] | None = None
    ) -> None:
        """Map `path`. OpenError E_OPEN, MachineError E_PERMISSION or E_IO, ModelError E_CHANGED if the size differs, or
        the `identity` of the file whose header was read.

        They are compared after mapping: access beyond the end of a truncated file kills the process.
        """
        try:
            with open(path, "rb") as file:
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found = file_identity(file.fileno())
                with suppress(OSError, AttributeError):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except FileNotFoundError:
            raise OpenError("E_OPEN", f"{os.fspath(path)} is gone") from None
        except PermissionError as error:
            raise MachineError("E_PERMISSION", f"{os.fspath(path)}: {error.strerror}") from None
        except (OSError, ValueError) as error:
            raise MachineError("E_IO", f"cannot map {os.fspath(path)}: {error}") from None
        self.size = len(self._map)
        size = found[2]
        if not self.size == size == expected_size or identity not in (None, found):
            self.close()
            text = f"{os.fspath(path)} was changed or replaced while it was opened"
            raise ModelError("E_CHANGED", text, expected=expected_size, found=size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def advise(self, advice: int, start: int, length: int) -> None:
        """madvise on a page-aligned range. OSError as the kernel says."""
        if self._map is None:
            raise ValueError("mapping is closed")
        self._map.madvise(advice, start, length)

    def prefetch(self, start: int, end: int) -> bool:
        """Bring [start, end), widened to pages, into memory now; False where the system offers no such call."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        for advice in (MADV_POPULATE_READ, getattr(mmap, "MADV_WILLNEED", None)):
            if advice is not None and hasattr(mmap.mmap, "madvise"):
                with suppress(OSError):
                    self.advise(advice, first, min(end, self.size) - first)
                    return True
        return False

    def close(self) -> None:
        """Let go of the mapping; idempotent."""
        self.bytes = np.empty(0, np.uint8)
        mapping, self._map = self._map, None
        if mapping is not None:
            with suppress(BufferError):  # views are still out: the mapping goes when they do
                mapping.close()
