"""Exact reference implementation of how a GGUF model gets into memory in llama.cpp and ik_llama.cpp.

Importing this package loads neither numba nor numpy; each name below is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refimpl.errors import RefimplError
    from refimpl.gguf.header import Header
    from refimpl.gguf.source import open_header as open
    from refimpl.loading.loader import load
    from refimpl.loading.model import LoadedModel
    from refimpl.repacking.tensor import repack, unpack

__version__ = "0.1.0"

_HOME = {
    "Header": ("refimpl.gguf.header", "Header"),
    "LoadedModel": ("refimpl.loading.model", "LoadedModel"),
    "RefimplError": ("refimpl.errors", "RefimplError"),
    "load": ("refimpl.loading.loader", "load"),
    "open": ("refimpl.gguf.source", "open_header"),
    "repack": ("refimpl.repacking.tensor", "repack"),
    "unpack": ("refimpl.repacking.tensor", "unpack"),
}

__all__ = ["Header", "LoadedModel", "RefimplError", "__version__", "load", "open", "repack", "unpack"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'refimpl' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOME[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
