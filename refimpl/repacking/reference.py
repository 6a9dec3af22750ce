"""The clear version of every repack layout and of its inverse, straight from the specification (repack-llama.md 1, 3).

Slow and obvious: index arrays are built from the formulas as they are written there, and NumPy applies them to all
super-blocks at once. Same names and arguments as the fast twin, refimpl.kernels.llama_repack.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refimpl.layouts.llama import Field, Rule
from refimpl.layouts.llama import LlamaLayout as Layout

Bytes = NDArray[np.uint8]


def repack_groups(layout: Layout, source: Bytes, target: Bytes, groups: int, blocks: int) -> None:
    """Interleave `groups` row groups of `blocks` blocks per row.

    `source` and `target` are flat uint8 arrays of groups*blocks*N*S bytes; they may be the same memory.
    """
    n, size = layout.rows, layout.source_type.block_bytes
    rows = source.reshape(groups, n, blocks, size).transpose(0, 2, 1, 3).copy()  # [group, column, row, byte]
    out = target.reshape(groups, blocks, n * size)
    for field in layout.fields:
        part = rows[..., field.source_offset : field.source_offset + field.source_bytes]
        place = slice(field.target_offset, field.target_offset + n * field.source_bytes)
        out[..., place] = _RULES[field.rule][0](part, field)


def unpack_groups(layout: Layout, source: Bytes, target: Bytes, groups: int, blocks: int) -> None:
    """The inverse of repack_groups: `source` interleaved, `target` in rows again."""
    n, size = layout.rows, layout.source_type.block_bytes
    packed = source.reshape(groups, blocks, n * size).copy()
    rows = np.empty((groups, blocks, n, size), np.uint8)
    for field in layout.fields:
        place = slice(field.target_offset, field.target_offset + n * field.source_bytes)
        part = slice(field.source_offset, field.source_offset + field.source_bytes)
        rows[..., part] = _RULES[field.rule][1](packed[..., place], field).reshape(groups, blocks, n, -1)
    target.reshape(groups, n, blocks, size)[...] = rows.transpose(0, 2, 1, 3)


def chunk_sources(field: Field, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each byte of a chunk-interleaved target array: the row it comes from, and the byte of that row's field."""
    i = np.arange(rows * field.source_bytes)
    k = i % field.chunk
    r = i // field.chunk % rows
    c = i // (field.chunk * rows)
    order = np.arange(field.source_bytes // field.chunk) if field.order is None else np.array(field.order)
    return r, order[c] * field.chunk + k


def _interleave_chunks(part: Bytes, field: Field) -> Bytes:
    row, byte = chunk_sources(field, part.shape[2])
    return part[..., row, byte] ^ np.uint8(field.xor)


def _separate_chunks(packed: Bytes, field: Field) -> Bytes:
    rows = packed.shape[-1] // field.source_bytes
    row, byte = chunk_sources(field, rows)
    part = np.empty((*packed.shape[:2], rows, field.source_bytes), np.uint8)
    part[..., row, byte] = packed ^ np.uint8(field.xor)
    return part


def _decode_k_scales(z: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes -> the 6-bit scales and mins of 8 sub-blocks."""
    low_sc, low_mn = z[..., 0:4] & 63, z[..., 4:8] & 63
    high_sc = (z[..., 8:12] & 15) | ((z[..., 0:4] >> 6) << 4)
    high_mn = (z[..., 8:12] >> 4) | ((z[..., 4:8] >> 6) << 4)
    return np.concatenate([low_sc, high_sc], axis=-1), np.concatenate([low_mn, high_mn], axis=-1)


def _encode_k_scales(sc: Bytes, mn: Bytes) -> Bytes:
    """The inverse of _decode_k_scales, also used with the row index in the place of the sub-block index."""
    first = sc[..., 0:4] | ((sc[..., 4:8] >> 4) << 6)
    second = mn[..., 0:4] | ((mn[..., 4:8] >> 4) << 6)
    third = (sc[..., 4:8] & 15) | ((mn[..., 4:8] & 15) << 4)
    return np.concatenate([first, second, third], axis=-1)


def _pack_k_scales(part: Bytes, field: Field) -> Bytes:
    sc, mn = _decode_k_scales(part)  # [.., row, sub-block]
    packed = _encode_k_scales(sc.swapaxes(-1, -2), mn.swapaxes(-1, -2))  # [.., sub-block, 12]
    return packed.reshape(*part.shape[:2], -1)


def _unpack_k_scales(packed: Bytes, field: Field) -> Bytes:
    sc, mn = _decode_k_scales(packed.reshape(*packed.shape[:2], 8, 12))  # [.., sub-block, row]
    return _encode_k_scales(sc.swapaxes(-1, -2), mn.swapaxes(-1, -2))


def _split_k_scales(part: Bytes, field: Field) -> Bytes:
    sc, mn = (x.swapaxes(-1, -2) for x in _decode_k_scales(part))  # [.., sub-block j, row r]
    low = (sc & 15) | ((mn & 15) << 4)
    high = (
        (sc[..., 0:4, :] >> 4)
        | ((mn[..., 0:4, :] >> 4) << 2)
        | ((sc[..., 4:8, :] >> 4) << 4)
        | ((mn[..., 4:8, :] >> 4) << 6)
    )
    return np.concatenate([low, high], axis=-2).reshape(*part.shape[:2], -1)


def _join_k_scales(packed: Bytes, field: Field) -> Bytes:
    rows = packed.shape[-1] // field.source_bytes
    both = packed.reshape(*packed.shape[:2], 12, rows)
    low, high = both[..., 0:8, :], both[..., 8:12, :]
    sc_high: Bytes = np.concatenate([high & 3, (high >> 4) & 3], axis=-2)
    mn_high: Bytes = np.concatenate([(high >> 2) & 3, high >> 6], axis=-2)
    sc: Bytes = np.bitwise_or(low & 15, sc_high << 4)
    mn: Bytes = np.bitwise_or(low >> 4, mn_high << 4)
    return _encode_k_scales(sc.swapaxes(-1, -2), mn.swapaxes(-1, -2))


def _interleave_nibbles(part: Bytes, field: Field) -> Bytes:
    nibbles = np.stack([part & 15, part >> 4], axis=-1).reshape(*part.shape[:3], -1)  # [.., row r, nibble n]
    pairs: Bytes = nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)  # [.., r div 2, n]
    return pairs.swapaxes(-1, -2).reshape(*part.shape[:2], -1)


def _separate_nibbles(packed: Bytes, field: Field) -> Bytes:
    pairs = packed.reshape(*packed.shape[:2], 2 * field.source_bytes, -1).swapaxes(-1, -2)
    rows = np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*packed.shape[:2], -1, 2 * field.source_bytes)
    result: Bytes = rows[..., 0::2] | (rows[..., 1::2] << 4)
    return result


_RULES: dict[Rule, tuple[Callable[[Bytes, Field], Bytes], Callable[[Bytes, Field], Bytes]]] = {
    "chunks": (_interleave_chunks, _separate_chunks),
    "k-scales-packed": (_pack_k_scales, _unpack_k_scales),
    "k-scales-split": (_split_k_scales, _join_k_scales),
    "nibbles": (_interleave_nibbles, _separate_nibbles),
}
