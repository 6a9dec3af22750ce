"""The 6-bit scales of q4_K and q5_K, both ways (specification: repack-llama.md 3.1 - 3.8).

Four rows at a time: a vector holds [row k][sub-block j] bytes for j = 0..3 (low) or 4..7 (high), so that all the bit
moves of the specification work on whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refimpl.kernels._vector import WIDTH, Emitter, Value
from refimpl.layouts.llama import Field


@dataclass(frozen=True)
class Scales:
    """The 6-bit scales and mins of four rows, as [row][sub-block] bytes of the low and the high four sub-blocks."""

    sc_low: Value
    sc_high: Value
    mn_low: Value
    mn_high: Value


def _decode(emit: Emitter, z0: Value, z1: Value, z2: Value) -> Scales:
    """From the three 4-byte words of the 12 bytes."""
    return Scales(
        sc_low=emit.masked(z0, 63),
        mn_low=emit.masked(z1, 63),
        sc_high=emit.any(emit.masked(z2, 0x0F), emit.masked(z0, 0xC0, -2)),
        mn_high=emit.any(emit.masked(z2, 0xF0, -4), emit.masked(z1, 0xC0, -2)),
    )


def _encode(emit: Emitter, s: Scales) -> tuple[Value, Value, Value]:
    """The inverse of _decode."""
    return (
        emit.any(s.sc_low, emit.masked(s.sc_high, 0x30, 2)),
        emit.any(s.mn_low, emit.masked(s.mn_high, 0x30, 2)),
        emit.any(emit.masked(s.sc_high, 0x0F), emit.masked(s.mn_high, 0x0F, 4)),
    )


def _load_words(emit: Emitter, field: Field, rows: Sequence[Value]) -> list[Value]:
    """The three words of four rows. The 4 bytes before the scales belong to the same block, so 16 may be loaded."""
    return emit.transpose4([emit.load(row, field.source_offset - 4) for row in rows])[1:]


def _store_words(emit: Emitter, field: Field, rows: Sequence[Value], words: Sequence[Value]) -> None:
    for i, word in enumerate(words):
        emit.scatter(rows, field.source_offset + 4 * i, 4, word)


def pack(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """N = 8: rows take the place of sub-blocks, in the type's own 12-byte packing."""
    a, b = (_decode(emit, *_load_words(emit, field, rows[i : i + 4])) for i in (0, 4))
    halves = ((a.sc_low, b.sc_low, a.mn_low, b.mn_low), (a.sc_high, b.sc_high, a.mn_high, b.mn_high))
    for half, (sc_a, sc_b, mn_a, mn_b) in enumerate(halves):
        words = _encode(emit, Scales(sc_low=sc_a, sc_high=sc_b, mn_low=mn_a, mn_high=mn_b))
        first, second, third = (emit.transpose4_bytes(word) for word in words)  # [sub-block][row]
        # Twelve bytes per sub-block: a word of each of the three in turn.
        for i, picks in enumerate(((0, 4, 8, 1), (5, 9, 2, 6), (10, 3, 7, 11))):
            emit.store(
                packed, field.target_offset + 48 * half + WIDTH * i, _pick_words(emit, (first, second, third), picks)
            )


def unpack(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """The inverse of pack."""
    halves = []
    for half in range(2):
        loaded = [emit.load(packed, field.target_offset + 48 * half + WIDTH * i) for i in range(3)]
        words = [_pick_words(emit, loaded, range(i, 12, 3)) for i in range(3)]
        halves.append(_decode(emit, *(emit.transpose4_bytes(word) for word in words)))
    low, high = halves
    a = Scales(sc_low=low.sc_low, sc_high=high.sc_low, mn_low=low.mn_low, mn_high=high.mn_low)
    b = Scales(sc_low=low.sc_high, sc_high=high.sc_high, mn_low=low.mn_high, mn_high=high.mn_high)
    for first, scales in ((0, a), (4, b)):
        _store_words(emit, field, rows[first : first + 4], _encode(emit, scales))


def split(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """N = 16: 128 bytes of low nibbles, then 64 bytes of high pairs."""
    quads = [_decode(emit, *_load_words(emit, field, rows[i : i + 4])) for i in range(0, 16, 4)]
    low = [emit.any(emit.masked(s.sc_low, 15), emit.masked(s.mn_low, 15, 4)) for s in quads]
    high = [emit.any(emit.masked(s.sc_high, 15), emit.masked(s.mn_high, 15, 4)) for s in quads]
    pairs = [
        emit.any(
            emit.masked(s.sc_low, 0x30, -4),
            emit.masked(s.mn_low, 0x30, -2),
            emit.masked(s.sc_high, 0x30),
            emit.masked(s.mn_high, 0x30, 2),
        )
        for s in quads
    ]
    for block, vectors in enumerate((low, high, pairs)):
        for j, vector in enumerate(_rows_together(emit, vectors)):
            emit.store(packed, field.target_offset + 64 * block + WIDTH * j, vector)


def join(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """The inverse of split."""
    low, high, pairs = (
        _rows_apart(emit, [emit.load(packed, field.target_offset + 64 * block + WIDTH * j) for j in range(4)])
        for block in range(3)
    )
    for i, (lo, hi, pair) in enumerate(zip(low, high, pairs, strict=True)):
        scales = Scales(
            sc_low=emit.any(emit.masked(lo, 15), emit.masked(pair, 0x03, 4)),
            mn_low=emit.any(emit.masked(lo, 0xF0, -4), emit.masked(pair, 0x0C, 2)),
            sc_high=emit.any(emit.masked(hi, 15), emit.masked(pair, 0x30)),
            mn_high=emit.any(emit.masked(hi, 0xF0, -4), emit.masked(pair, 0xC0, -2)),
        )
        _store_words(emit, field, rows[4 * i : 4 * i + 4], _encode(emit, scales))


def _rows_together(emit: Emitter, quads: Sequence[Value]) -> list[Value]:
    """Four vectors of [4 rows][4 sub-blocks] -> four vectors of one sub-block, 16 rows each."""
    return emit.transpose4([emit.transpose4_bytes(quad) for quad in quads])


def _rows_apart(emit: Emitter, vectors: Sequence[Value]) -> list[Value]:
    """The inverse of _rows_together."""
    return [emit.transpose4_bytes(vector) for vector in emit.transpose4(vectors)]


def _pick_words(emit: Emitter, vectors: Sequence[Value], picks: Sequence[int]) -> Value:
    """Four 4-byte words of three vectors, numbered 0..11, as one vector."""
    a = emit.shuffle(vectors[0], vectors[1], range(2 * WIDTH))
    b = emit.shuffle(vectors[2], vectors[2], range(2 * WIDTH))
    return emit.shuffle(a, b, [4 * pick + k for pick in picks for k in range(4)])
