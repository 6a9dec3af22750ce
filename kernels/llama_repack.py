"""The fast twin of repacking.reference for llama.cpp's layouts: one compiled kernel per layout and direction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray
from refimpl.kernels import llama_chunks, llama_nibbles, llama_scales
from refimpl.kernels._jit import FINGERPRINT, kernel
from refimpl.kernels._vector import WIDTH, Emitter

from refimpl.layouts import LAYOUTS, Layout, Rule

_RULES: dict[Rule, tuple[Callable[..., None], Callable[..., None]]] = {
    "chunks": (llama_chunks.interleave, llama_chunks.separate),
    "k-scales-packed": (llama_scales.pack, llama_scales.unpack),
    "k-scales-split": (llama_scales.split, llama_scales.join),
    "nibbles": (llama_nibbles.interleave, llama_nibbles.separate),
}

REPACK, UNPACK, REPACK_NONTEMPORAL = 0, 1, 2

NONTEMPORAL_BYTES = 8 << 20
"""From this size on the result does not fit a core's share of the cache, and writing past it pays."""


@intrinsic(prefer_literal=True)
def _super_block(typingctx: Any, index: Any, mode: Any, fingerprint: Any, packed: Any, rows: Any, stride: Any) -> Any:
    """Emit one super-block of layout number `index`: `packed` its address, `rows` that of the first source block."""
    if not all(isinstance(x, types.IntegerLiteral) for x in (index, mode)):
        raise TypingError("layout and mode are compile-time constants")
    layout, direction = LAYOUTS[index.literal_value], mode.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, first, stride = args[3:]
        emit = Emitter(builder, nontemporal=direction == REPACK_NONTEMPORAL)
        rows = [builder.add(first, builder.mul(stride, stride.type(r))) for r in range(layout.rows)]
        for field in layout.fields:
            _RULES[field.rule][direction == UNPACK](emit, field, rows, packed)
        return context.get_dummy_value()

    return types.void(index, mode, fingerprint, types.int64, types.int64, types.int64), codegen


@cache
def compiled(index: int, mode: int) -> Any:
    """The kernel of layout number `index`: f(interleaved address, row address, groups, blocks)."""
    n, size, fingerprint = LAYOUTS[index].rows, LAYOUTS[index].source_type.block_bytes, FINGERPRINT

    @kernel
    def run(packed: int, rows: int, groups: int, blocks: int) -> None:
        stride = blocks * size
        for _ in range(groups):
            for x in range(blocks):
                _super_block(index, mode, fingerprint, packed, rows + x * size, stride)
                packed += n * size
            rows += n * stride

    return run


def repack_groups(
    layout: Layout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """Interleave row groups; arguments as in refimpl.repacking.reference.repack_groups, but without overlap."""
    aligned = target.ctypes.data % WIDTH == 0 and layout.super_block_bytes % WIDTH == 0
    mode = REPACK_NONTEMPORAL if aligned and target.size >= NONTEMPORAL_BYTES else REPACK
    compiled(LAYOUTS.index(layout), mode)(target.ctypes.data, source.ctypes.data, groups, blocks)


def unpack_groups(
    layout: Layout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """The inverse of repack_groups."""
    compiled(LAYOUTS.index(layout), UNPACK)(source.ctypes.data, target.ctypes.data, groups, blocks)
