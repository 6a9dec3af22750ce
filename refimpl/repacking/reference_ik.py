"""The clear version of ik_llama.cpp's run-time repack (specification: repack-ik.md 3-5).

Bits are moved one by one, by the places in layouts/ik.py. Four source types are more than that and stand here in words
of their own. Same names and arguments as the fast twin, refimpl.kernels.ik_repack.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import LayoutError
from refimpl.layouts.ik import IkLayout, bit_sources, sign_code_bytes

Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]

STEP_BITS = 1 << 24
"""Bits that are spread out at a time: the clear version may be slow, but not hungry."""


def repack_groups(layout: IkLayout, source: Bytes, target: Bytes, groups: int, blocks: int) -> None:
    """Interleave `groups` row groups of `blocks` blocks per row.

    `source` and `target` are flat uint8 arrays of groups*layout.group_bytes(blocks) bytes; they may be the same memory.
    Where a target group is shorter than its place (q8_K, q8_KV), the rest keeps the source's bytes.
    """
    rows = source.reshape(groups, layout.rows, -1).copy()
    out = target.reshape(groups, -1)
    if layout.whole == "bits":
        _move_bits(layout, rows, out, blocks)
    elif layout.whole in ("bf16", "f16"):
        values = rows.view("<u2")
        if layout.whole == "f16":
            values = f16_to_bf16(values)
        pairs = values.reshape(groups, layout.rows, -1, 2)  # [group, row k, column pair p, e]
        out[...] = pairs.swapaxes(1, 2).reshape(groups, -1).astype("<u2").view(np.uint8)
    else:
        out[...] = rows.reshape(groups, -1)
        (_q8_k if layout.whole == "q8_K" else _q8_kv)(rows, out, blocks)


def unpack_groups(layout: IkLayout, source: Bytes, target: Bytes, groups: int, blocks: int) -> None:
    """The inverse of repack_groups. LayoutError E_LAYOUT_INVERSE where there is none."""
    if not layout.invertible:
        raise LayoutError("E_LAYOUT_INVERSE", f"{layout.source_type.name} cannot be had back from {layout.name}")
    packed = source.reshape(groups, -1).copy()
    out = target.reshape(groups, layout.rows, -1)
    if layout.whole == "bf16":
        pairs = packed.view("<u2").reshape(groups, -1, layout.rows, 2)
        out[...] = pairs.swapaxes(1, 2).reshape(groups, layout.rows, -1).view(np.uint8)
        return
    _move_bits_back(layout, packed, out, blocks)


def _move_bits(layout: IkLayout, rows: Bytes, out: Bytes, blocks: int) -> None:
    """rows [group, row, byte] -> out [group, byte]: first the rows' metadata, then one target block per column."""
    meta, size = layout.source_type.row_meta_bytes, layout.source_type.block_bytes
    groups, n, _ = rows.shape
    out[:, : n * meta] = rows[:, :, :meta].reshape(groups, -1)
    order, codes = _bit_order(layout)
    columns = rows[:, :, meta:].reshape(groups, n, blocks, size).swapaxes(1, 2).reshape(groups * blocks, -1)
    packed = np.empty_like(columns)
    step = max(1, STEP_BITS // order.size)
    for first in range(0, len(columns), step):
        bits = np.unpackbits(columns[first : first + step], axis=1, bitorder="little")
        packed[first : first + step] = np.packbits(bits[:, order], axis=1, bitorder="little")
    packed[:, codes] = _prefix_parity(packed[:, codes])
    out[:, n * meta :] = packed.reshape(groups, -1)


def _move_bits_back(layout: IkLayout, packed: Bytes, out: Bytes, blocks: int) -> None:
    meta, size = layout.source_type.row_meta_bytes, layout.source_type.block_bytes
    groups, n, _ = out.shape
    out[:, :, :meta] = packed[:, : n * meta].reshape(groups, n, meta)
    order, codes = _bit_order(layout)
    columns = packed[:, n * meta :].reshape(groups * blocks, -1).copy()
    columns[:, codes] = _prefix_parity_inverse(columns[:, codes])
    rows = np.empty_like(columns)
    step = max(1, STEP_BITS // order.size)
    for first in range(0, len(columns), step):
        moved = np.unpackbits(columns[first : first + step], axis=1, bitorder="little")
        bits = np.empty_like(moved)
        bits[:, order] = moved
        rows[first : first + step] = np.packbits(bits, axis=1, bitorder="little")
    out[:, :, meta:] = rows.reshape(groups, blocks, n, size).swapaxes(1, 2).reshape(groups, n, -1)


@cache
def _bit_order(layout: IkLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every target bit the number of its source bit (rows one after the other); the bytes that hold sign codes."""
    block_bits = 8 * layout.source_type.block_bytes
    order = np.array([row * block_bits + bit for row, bit in bit_sources(layout)])
    return order, np.array(sign_code_bytes(layout), np.int64)


def _prefix_parity(values: Bytes) -> Bytes:
    """The sign code map T on bits 1..7 of each byte: bit n becomes the parity of bits 1..n. Bit 0 stays."""
    code = values & 0xFE
    for _ in range(6):
        code = (values & 0xFE) ^ (code << 1)
    result: Bytes = np.bitwise_or(code, values & 1)
    return result


def _prefix_parity_inverse(values: Bytes) -> Bytes:
    code = values & 0xFE
    result: Bytes = np.bitwise_or(code ^ (code << 1), values & 1)
    return result


def f16_to_bf16(halves: Halves) -> Halves:
    """Widened exactly to f32, then the low 16 bits dropped (repack-ik.md 4.25). NaNs become quiet."""
    h = halves.astype(np.uint32)
    sign, exponent, mantissa = (h >> 15) << 15, (h >> 10) & 31, h & 1023
    top = np.zeros_like(mantissa)  # position of the highest set bit
    for bit in range(10):
        top[(mantissa >> bit) != 0] = bit
    subnormal = np.bitwise_or((top + 103) << 7, ((mantissa << (10 - top)) & 1023) >> 3)
    result = np.where(mantissa == 0, 0, subnormal)
    result = np.where(exponent > 0, np.bitwise_or((exponent + 112) << 7, mantissa >> 3), result)
    infinite = np.where(mantissa == 0, 0x7F80, np.bitwise_or(0x7FC0, mantissa >> 3))
    result = np.where(exponent == 31, infinite, result)
    bf16: Halves = np.bitwise_or(sign, result).astype(np.uint16)
    return bf16


def f32_to_f16(floats: NDArray[np.uint32]) -> Halves:
    """f32 bit patterns to f16, nearest even, overflow to infinity, subnormal results kept (repack-ik.md 5.1)."""
    with np.errstate(all="ignore"):
        halves = floats.view("<f4").astype("<f2").view("<u2")
    nan = (floats & 0x7FFFFFFF) > 0x7F800000
    quiet = ((floats >> 16) & 0x8000) | 0x7E00 | ((floats & 0x7FFFFF) >> 13)
    return np.where(nan, quiet, halves).astype(np.uint16)


def _q8_k(rows: Bytes, out: Bytes, blocks: int) -> None:
    """Blocks of d f32, 4 dropped bytes, 256 int8, 32 dropped bytes -> d[8] f16 and the quants in chunks of 4."""
    groups, n, _ = rows.shape
    block = rows.reshape(groups, n, blocks, 296).swapaxes(1, 2)  # [group, column, row, byte]
    d = f32_to_f16(np.ascontiguousarray(block[..., 0:4]).view("<u4")[..., 0])
    qs = block[..., 8:264].reshape(groups, blocks, n, 64, 4).swapaxes(2, 3).reshape(groups, blocks, -1)
    packed = np.concatenate([d.astype("<u2").view(np.uint8).reshape(groups, blocks, -1), qs], axis=2)
    out[:, : packed.shape[1] * packed.shape[2]] = packed.reshape(groups, -1)


def _q8_kv(rows: Bytes, out: Bytes, blocks: int) -> None:
    """Rows of d f32, 4 dropped bytes, ne0 int8 -> d[8] f32 and the quants in chunks of 4."""
    groups, n, _ = rows.shape
    qs = rows[:, :, 8:].reshape(groups, n, -1, 4).swapaxes(1, 2).reshape(groups, -1)
    packed = np.concatenate([rows[:, :, :4].reshape(groups, -1), qs], axis=1)
    out[:, : packed.shape[1]] = packed
