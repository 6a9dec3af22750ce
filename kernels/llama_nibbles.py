"""The nibble interleave of q1_0_4x4, both ways (specification: repack-llama.md 3.9)."""

from __future__ import annotations

from collections.abc import Sequence

from refimpl.kernels._vector import WIDTH, Emitter, Value
from refimpl.layouts.llama import Field


def interleave(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """Two rows share a byte, and the bytes of the two pairs alternate."""
    pairs = []
    for first in (0, 2):
        even, odd = (emit.load(rows[first + i], field.source_offset) for i in range(2))
        low = emit.any(emit.masked(even, 0x0F), emit.masked(odd, 0x0F, 4))  # nibbles 0, 2, 4, ... of both rows
        high = emit.any(emit.masked(even, 0xF0, -4), emit.masked(odd, 0xF0))  # nibbles 1, 3, 5, ...
        pairs.append(emit.zip(low, high, 1))
    both = [z for a, b in zip(*pairs, strict=True) for z in emit.zip(a, b, 1)]
    for i, vector in enumerate(both):
        emit.store(packed, field.target_offset + WIDTH * i, vector)


def separate(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """The inverse: 64 bytes [nibble parity p][pair] by byte index 4*c + 2*p + pair, back to 16 bytes per row."""
    loaded = [emit.load(packed, field.target_offset + WIDTH * i) for i in range(4)]
    # Byte index 4*c + 2*p + pair: the four top bits (c) move to the bottom, one vector per (p, pair).
    low_01, low_23, high_01, high_23 = emit.rotate(loaded, 1, 4)
    for first, low, high in ((0, low_01, high_01), (2, low_23, high_23)):
        even = emit.any(emit.masked(low, 0x0F), emit.masked(high, 0x0F, 4))
        odd = emit.any(emit.masked(low, 0xF0, -4), emit.masked(high, 0xF0))
        emit.store(rows[first], field.source_offset, even)
        emit.store(rows[first + 1], field.source_offset, odd)
