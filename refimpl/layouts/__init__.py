"""The repack layouts of both dialects, as data."""

from __future__ import annotations

from refimpl.errors import UsageError
from refimpl.layouts.base import Layout
from refimpl.layouts.ik import IK_LAYOUTS, IkLayout
from refimpl.layouts.llama import LLAMA_LAYOUTS, LlamaLayout

__all__ = ["IK_LAYOUTS", "LAYOUTS", "LLAMA_LAYOUTS", "IkLayout", "Layout", "LlamaLayout", "layout_by_name"]

LAYOUTS: tuple[Layout, ...] = (*LLAMA_LAYOUTS, *IK_LAYOUTS)


def layout_by_name(name: str, source: str | None = None) -> Layout:
    """The layout of that name, in any letter case; of type `source` where one name serves two (bf16_r16: bf16, f16).

    UsageError E_LAYOUT if there is none.
    """
    named = [layout for layout in LAYOUTS if layout.name.lower() == name.lower()]
    if not named:
        known = ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS))
        raise UsageError("E_LAYOUT", f"no layout is called {name!r}; there are {known}")
    return next((layout for layout in named if source and layout.source_type.name.lower() == source.lower()), named[0])
