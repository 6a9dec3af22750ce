"""Walks over the strings of a GGUF array as they lie in a file: length (u64), bytes, length, bytes, ..."""

from __future__ import annotations

import numpy as np

from refimpl.kernels._jit import kernel


@kernel
def any_nul(data: np.ndarray, count: int) -> bool:
    """Whether any of `count` strings holds a NUL. `data` is exactly the strings, whose lengths have been checked."""
    place = 0
    for _ in range(count):
        length = np.int64(0)
        for k in range(8):
            length |= np.int64(data[place + k]) << np.int64(8 * k)
        place += 8
        for i in range(length):
            if data[place + i] == 0:
                return True
        place += length
    return False
