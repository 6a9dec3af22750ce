"""Repack and unpack one tensor: the checked doors in front of the clear and the fast version.

Everything is checked before a byte is written (specification: repack-llama.md 1, repack-ik.md 6): the type fits the
layout, the shape is eligible, both buffers have exactly the tensor's size, and they are apart or the very same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import LayoutError, UsageError
from refimpl.layouts import Layout, layout_by_name
from refimpl.types import TensorType, UnknownType, type_by_name

Version = Literal["fast", "clear"]
Bytes = NDArray[np.uint8]
Groups = Callable[[Layout, Bytes, Bytes, int, int], None]

IN_PLACE_BYTES = 1 << 20
"""Scratch memory of an in-place repack, unless one row group alone is larger."""


def repack(
    data: Any,
    type: TensorType | str,
    layout: Layout | str,
    shape: Sequence[int],
    out: Any = None,
    *,
    version: Version = "fast",
) -> Bytes:
    """Interleave a tensor.

    Parameters: `data`, any contiguous buffer of exactly the tensor's bytes (read-only is fine, a mapping too);
    `type` and `shape` of the tensor (elements, fastest dimension first); `layout` or its name; `out`, a writable
    contiguous buffer of the same size, which may be `data` itself (repacked in place, row group by row group).
    Returns the result as a flat uint8 array, a view of `out` if that was given.

    `layout` is one of llama.cpp's (q4_K_8x8) or the interleaved type of ik_llama.cpp's run-time repack (q4_k_r4).

    LayoutError: E_LAYOUT_TYPE, E_LAYOUT_SHAPE, E_LAYOUT_SIZE, E_LAYOUT_BUFFER, E_LAYOUT_OVERLAP; then nothing has been
    written. UsageError: E_TYPE, E_LAYOUT for an unknown name.

    >>> import refimpl
    >>> refimpl.repack(bytes(4608), "q4_0", "q4_0_8x8", (256, 32))[16:20].tolist()
    [136, 136, 136, 136]
    """
    return _run("repack_groups", data, type, layout, shape, out, version)


def unpack(
    data: Any,
    type: TensorType | str,
    layout: Layout | str,
    shape: Sequence[int],
    out: Any = None,
    *,
    version: Version = "fast",
) -> Bytes:
    """The exact inverse of repack(): `data` interleaved in `layout`, the result in rows again.

    Same errors, and E_LAYOUT_INVERSE for the three of ik_llama.cpp that lose something: f16 as bf16_r16, q8_K, q8_KV.
    """
    return _run("unpack_groups", data, type, layout, shape, out, version)


MODULES = {
    ("llama.cpp", "clear"): "refimpl.repacking.reference",
    ("llama.cpp", "fast"): "refimpl.kernels.llama_repack",
    ("ik_llama.cpp", "clear"): "refimpl.repacking.reference_ik",
    ("ik_llama.cpp", "fast"): "refimpl.kernels.ik_repack",
}


def group_function(name: str, layout: Layout, version: Version) -> Groups:
    """`repack_groups` or `unpack_groups` for a layout's dialect. UsageError E_VERSION for another word."""
    module = MODULES.get((layout.dialect, version))
    if module is None:
        raise UsageError("E_VERSION", f"version is 'fast' or 'clear', not {version!r}")
    function: Groups = getattr(import_module(module), name)
    return function


def _run(
    name: str, data: Any, type: TensorType | str, layout: Layout | str, shape: Sequence[int], out: Any, version: Version
) -> Bytes:
    if isinstance(layout, str):
        layout = layout_by_name(layout, type if isinstance(type, str) else type.name)
    tensor_type = type_by_name(type, layout.dialect) if isinstance(type, str) else type
    if isinstance(tensor_type, UnknownType) or tensor_type.name != layout.source_type.name:
        text = f"{layout.name} is a layout of {layout.source_type.name}, not of {tensor_type.name}"
        raise LayoutError("E_LAYOUT_TYPE", text, expected=layout.source_type.name, found=tensor_type.name)
    function = group_function(name, layout, version)
    groups, blocks = layout.geometry(shape)
    nbytes = groups * layout.group_bytes(blocks)
    source = flat_bytes(data, "data", nbytes)
    if out is None:
        target = np.empty(nbytes, np.uint8)
    else:
        target = flat_bytes(out, "out", nbytes)
        if not target.flags.writeable:
            raise LayoutError("E_LAYOUT_BUFFER", "out is read-only", field="out")
    distance = abs(source.ctypes.data - target.ctypes.data)
    if distance >= nbytes:
        function(layout, source, target, groups, blocks)
    elif distance:
        raise LayoutError("E_LAYOUT_OVERLAP", f"data and out overlap, {distance} bytes apart", found=distance)
    else:
        _in_place(function, layout, target, groups, blocks)
    return target


def _in_place(function: Groups, layout: Layout, tensor: Bytes, groups: int, blocks: int) -> None:
    """A row group occupies the same bytes before and after, so a copy of a few groups is all the memory needed."""
    group_bytes = layout.group_bytes(blocks)
    step = max(1, IN_PLACE_BYTES // group_bytes)
    for first in range(0, groups, step):
        count = min(step, groups - first)
        part = tensor[first * group_bytes : (first + count) * group_bytes]
        function(layout, part.copy(), part, count, blocks)


def flat_bytes(buffer: Any, name: str, nbytes: int) -> Bytes:
    """A buffer as a flat uint8 array over the same memory. LayoutError E_LAYOUT_BUFFER, E_LAYOUT_SIZE."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        raise LayoutError("E_LAYOUT_BUFFER", f"{name} has no usable buffer interface", field=name) from None
    if not view.c_contiguous:
        raise LayoutError("E_LAYOUT_BUFFER", f"{name} is not contiguous", field=name)
    if view.nbytes != nbytes:
        text = f"{name} has {view.nbytes} bytes, the tensor takes {nbytes}"
        raise LayoutError("E_LAYOUT_SIZE", text, field=name, expected=nbytes, found=view.nbytes)
    return np.frombuffer(view, np.uint8)
