"""The fast twin of repacking.reference_ik: one compiled kernel per layout of ik_llama.cpp and direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from refimpl.errors import LayoutError
from refimpl.kernels import _vector, ik_bits, ik_whole, llama_chunks
from refimpl.kernels._jit import fingerprint, kernel
from refimpl.kernels._vector import WIDTH, Emitter
from refimpl.kernels.llama_repack import REPACK, REPACK_STREAMED, STREAMED_BYTES, UNPACK, fence
from refimpl.layouts import base, ik, llama
from refimpl.layouts.ik import IK_LAYOUTS, IkLayout

FINGERPRINT = fingerprint(_vector, ik_bits, ik_whole, llama_chunks, base, ik, llama)


@dataclass(frozen=True)
class Walk:
    """How a kernel goes through a row group; all sizes in bytes, `columns` in blocks.

    Each row begins with `row_head`; the target group with `group_head`, the first four bytes of each row's head.
    A step takes `row_step` of every row, `columns` blocks, and writes `target_step`; what is left when the blocks are
    no multiple of that goes by steps of `rest_columns`.
    """

    row_head: int
    group_head: int
    row_step: int
    target_step: int
    columns: int = 1
    rest_columns: int = 1


def walk(layout: IkLayout) -> Walk:
    """The walk of one layout."""
    n, size, meta = layout.rows, layout.source_type.block_bytes, layout.source_type.row_meta_bytes
    if layout.whole in ("bf16", "f16"):
        return Walk(0, 0, 16, 16 * n, 8, 2)
    if layout.whole == "q8_K":
        return Walk(0, 0, size, 2064)
    return Walk(meta, 4 * n if meta else 0, size, n * size)


_STEPS: dict[str, tuple[Callable[..., None], Callable[..., None] | None]] = {
    "bf16": (ik_whole.columns_of_halves, ik_whole.columns_of_halves_back),
    "f16": (ik_whole.columns_of_f16, None),
    "q8_K": (ik_whole.q8_k_block, None),
    "q8_KV": (ik_whole.q8_kv_columns, None),
}
_RESTS: dict[str, tuple[Callable[..., None], Callable[..., None] | None]] = {
    "bf16": (ik_whole.row_heads, ik_whole.row_heads_back),  # two columns are four bytes of each row
    "f16": (ik_whole.two_columns_of_f16, None),
}
HEAD, STEP, REST = 0, 1, 2


def _functions(layout: IkLayout, piece: int, backwards: bool) -> list[Callable[..., None]]:
    """What emits a piece of a group; nothing where a layout has no such piece."""
    if piece == HEAD:
        return [ik_whole.row_heads_back if backwards else ik_whole.row_heads] if walk(layout).group_head else []
    if layout.whole == "bits":
        function = ik_bits.unpack if backwards else ik_bits.pack
        return [partial(function, layout=layout)] if piece == STEP else []
    chosen = (_STEPS if piece == STEP else _RESTS).get(layout.whole, (None, None))[backwards]
    return [chosen] if chosen else []


def steps_together(layout: IkLayout) -> int:
    """How many steps make a multiple of 16 bytes: what one turn of the streamed kernel writes."""
    return WIDTH // math.gcd(WIDTH, walk(layout).target_step)


@intrinsic(prefer_literal=True)
def _emit(typingctx: Any, index: Any, mode: Any, piece: Any, sources: Any, packed: Any, first: Any, stride: Any) -> Any:
    """One piece of a group: its head, a step, or a rest step. `first` is the address in the first row."""
    layout, direction, what = IK_LAYOUTS[index.literal_value], mode.literal_value, piece.literal_value
    backwards = direction == UNPACK

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed, first, stride = args[4:]
        streamed = direction == REPACK_STREAMED and what == STEP
        emit = Emitter(builder, packed if streamed else None)
        path = walk(layout)
        for number in range(steps_together(layout) if streamed else 1):
            emit.base = number * path.target_step
            rows = [builder.add(first, builder.mul(stride, stride.type(r))) for r in range(layout.rows)]
            for function in _functions(layout, what, backwards):
                function(emit, rows, packed)
            first = builder.add(first, first.type(path.row_step))
        return context.get_dummy_value()

    return types.void(index, mode, piece, sources, types.int64, types.int64, types.int64), codegen


@cache
def compiled(index: int, mode: int) -> Any:
    """The kernel of layout number `index`: f(interleaved address, row address, groups, blocks)."""
    layout, sources = IK_LAYOUTS[index], FINGERPRINT
    path = walk(layout)
    n, size, meta = layout.rows, layout.source_type.block_bytes, layout.source_type.row_meta_bytes
    row_head, group_head, row_step, target_step = path.row_head, path.group_head, path.row_step, path.target_step
    columns, rest_columns = path.columns, path.rest_columns
    together = steps_together(layout) if mode == REPACK_STREAMED else 1
    rest_bytes, rest_target = rest_columns * size, rest_columns * size * n

    @kernel
    def run(packed: int, rows: int, groups: int, blocks: int) -> None:
        stride = meta + blocks * size
        for g in range(groups):
            place, at = packed + g * n * stride, rows + g * n * stride
            _emit(index, mode, HEAD, sources, place, at, stride)
            place += group_head
            at += row_head
            for _ in range(blocks // columns // together):
                _emit(index, mode, STEP, sources, place, at, stride)
                place += together * target_step
                at += together * row_step
            for _ in range(blocks % columns // rest_columns):
                _emit(index, mode, REST, sources, place, at, stride)
                place += rest_target
                at += rest_bytes
        fence()

    return run


def repack_groups(
    layout: IkLayout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """Interleave row groups; arguments as in repacking.reference_ik.repack_groups, but without overlap."""
    path, group_bytes = walk(layout), layout.group_bytes(blocks)
    columns = blocks // path.columns
    aligned = target.ctypes.data % WIDTH == 0 and group_bytes % WIDTH == 0 and path.group_head % WIDTH == 0
    streamed = aligned and target.size >= STREAMED_BYTES and columns % steps_together(layout) == 0
    mode = REPACK_STREAMED if streamed else REPACK
    compiled(IK_LAYOUTS.index(layout), mode)(target.ctypes.data, source.ctypes.data, groups, blocks)
    written = layout.written_bytes(blocks)
    if groups and written < group_bytes:  # the rest of the place keeps the source's bytes
        target.reshape(groups, -1)[:, written:] = source.reshape(groups, -1)[:, written:]


def unpack_groups(
    layout: IkLayout, source: NDArray[np.uint8], target: NDArray[np.uint8], groups: int, blocks: int
) -> None:
    """The inverse of repack_groups. LayoutError E_LAYOUT_INVERSE where there is none."""
    if not layout.invertible:
        raise LayoutError("E_LAYOUT_INVERSE", f"{layout.source_type.name} cannot be had back from {layout.name}")
    compiled(IK_LAYOUTS.index(layout), UNPACK)(source.ctypes.data, target.ctypes.data, groups, blocks)
