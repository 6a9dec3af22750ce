"""The one place for Numba's flags, and for what makes a compiled kernel on disk out of date."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numba

_CACHE = os.environ.get("REFIMPL_KERNEL_CACHE", "1") != "0"


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first call: no GIL while it runs, no fast-math, no wrap-around indexing, result kept on disk."""
    return numba.njit(nogil=True, cache=_CACHE, fastmath=False, boundscheck=False)(function)


def fingerprint(*modules: ModuleType) -> int:
    """A number that changes with the source of any of these modules.

    Numba's cache looks only at the file that defines a function, not at the emitters and tables it was made from; a
    kernel that closes over this number misses the cache when one of them changes.
    """
    sources = (Path(str(module.__file__)).read_bytes() for module in modules)
    return int.from_bytes(sha256(b"".join(sources)).digest()[:6], "little")
