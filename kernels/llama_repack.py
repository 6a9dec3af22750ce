"""The fast twin of repacking.reference for llama.cpp's layouts: one compiled kernel per layout and direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

from refimpl.kernels import _vector, llama_chunks, llama_nibbles, llama_scales
from refimpl.kernels._jit import fingerprint, kernel
from refimpl.kernels._vector import WIDTH, Emitter
from refimpl.layouts import base, llama
from refimpl.layouts.llama import LLAMA_LAYOUTS, LlamaLayout, Rule

_RULES: dict[Rule, tuple[Callable[..., None], Callable[..., None]]] = {
    "chunks": (llama_chunks.interleave, llama_chunks.separate),
    "k-scales-packed": (llama_scales.pack, llama_scales.unpack),
    "k-scales-split": (llama_scales.split, llama_scales.join),
    "nibbles": (llama_nibbles.interleave, llama_nibbles.separate),
}

FINGERPRINT = fingerprint(_vector, llama_chunks, llama_nibbles, llama_scales, base, llama)

REPACK, UNPACK, REPACK_STREAMED = 0, 1, 2

STREAMED_BYTES = 8 << 20
"""From this size on the result does not fit a core's share of the cache, and writing past it pays."""


def super_blocks_together(layout: LlamaLayout) -> int:
    """How many super-blocks make a multiple of 16 bytes: what one step of the streamed kernel writes."""
    return WIDTH // math.gcd(WIDTH, layout.super_block_bytes)


@intrinsic(prefer_literal=True)
def _super_block(typingctx: Any, index: Any, mode: Any, sources: Any, packed: Any, rows: Any, stride: Any) -> Any:
    """Emit one step of layout number `index`: `packed` is the target address, `rows` that of the first source block."""
    if not all(isinstance(x, types.IntegerLiteral) for x in (index, mode)):
        raise TypingError("layout and mode are compile-time constants")
    layout, direction = LLAMA_LAYOUTS[index.literal_value], mode.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, first, stride = args[3:]
        emit = Emitter(builder, packed if direction == REPACK_STREAMED else None)
        offset = first.type(layout.source_type.block_bytes)
        for number in range(super_blocks_together(layout) if direction == REPACK_STREAMED else 1):
            emit.base = number * layout.super_block_bytes
            rows = [builder.add(first, builder.mul(stride, stride.type(r))) for r in range(layout.rows)]
            for field in layout.fields:
                _RULES[field.rule][direction == UNPACK](emit, field, rows, packed)
            first = builder.add(first, offset)
        return context.get_dummy_value()

    return types.void(index, mode, sources, types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Streamed stores are not ordered with others: complete them before another thread can hear of the result."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@cache
def compiled(index: int, mode: int) -> Any:
    """The kernel of layout number `index`: f(interleaved address, row address, groups, blocks)."""
    layout, sources = LLAMA_LAYOUTS[index], FINGERPRINT
    n, size = layout.rows, layout.source_type.block_bytes
    step = super_blocks_together(layout) if mode == REPACK_STREAMED else 1

    @kernel
    def run(packed: int, rows: int, groups: int, blocks: int) -> None:
        stride = blocks * size
        for _ in range(groups):
            for x in range(0, blocks, step):
                _super_block(index, mode, sources, packed, rows + x * size, stride)
                packed += step * n * size
            rows += n * stride
        fence()

    return run


def repack_groups(
    layout: LlamaLayout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """Interleave row groups; arguments as in refimpl.repacking.reference.repack_groups, but without overlap."""
    aligned = target.ctypes.data % WIDTH == 0 and blocks % super_blocks_together(layout) == 0
    mode = REPACK_STREAMED if aligned and target.size >= STREAMED_BYTES else REPACK
    compiled(LLAMA_LAYOUTS.index(layout), mode)(target.ctypes.data, source.ctypes.data, groups, blocks)


def unpack_groups(
    layout: LlamaLayout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """The inverse of repack_groups."""
    compiled(LLAMA_LAYOUTS.index(layout), UNPACK)(source.ctypes.data, target.ctypes.data, groups, blocks)
