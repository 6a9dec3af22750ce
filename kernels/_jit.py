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
    options = {"nogil": True, "fastmath": False, "boundscheck": False}
    if _CACHE:
        try:
            dispatcher = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written
            return numba.njit(**options)(function)
        if getattr(dispatcher, "_cache", None) is not None:
            dispatcher._cache = _Forgiving(dispatcher._cache)
        return dispatcher
    return numba.njit(**options)(function)


class _Forgiving:
    """Numba's cache of one function, where a damaged file or a full disk means compiling, not failing."""

    def __init__(self, cache: Any) -> None:
        self._wrapped = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return self._wrapped.load_overload(signature, target)
        except Exception:  # whatever unpickling damaged bytes raises
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            self._wrapped.save_overload(signature, data)
        except Exception:
            return


def fingerprint(*modules: ModuleType) -> int:
    """A number that changes with the source of any of these modules.

    Numba's cache looks only at the file that defines a function, not at the emitters and tables it was made from; a
    kernel that closes over this number misses the cache when one of them changes.
    """
    sources = (Path(str(module.__file__)).read_bytes() for module in modules)
    return int.from_bytes(sha256(b"".join(sources)).digest()[:6], "little")
