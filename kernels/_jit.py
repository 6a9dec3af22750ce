"""The one place for Numba's flags, and for what makes a compiled kernel on disk out of date."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba

_CACHE = os.environ.get("REFIMPL_KERNEL_CACHE", "1") != "0"


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first call: no GIL while it runs, no fast-math, no wrap-around indexing, result kept on disk."""
    return numba.njit(nogil=True, cache=_CACHE, fastmath=False, boundscheck=False)(function)


def _fingerprint() -> int:
    """A number that changes with any source that shapes a kernel.

    Numba's cache looks only at the file that defines a function, not at the emitters and tables it was made from;
    kernels close over this number, so a change anywhere in them misses the cache.
    """
    here = Path(__file__).parent
    from refimpl import layouts

    sources = [*sorted(here.glob("*.py")), Path(layouts.__file__)]
    return int.from_bytes(sha256(b"".join(path.read_bytes() for path in sources)).digest()[:6], "little")


FINGERPRINT = _fingerprint()
