"""The chunk interleave I(F, L, B) of llama.cpp's layouts, both ways (specification: repack-llama.md 1.5).

`rows` are the addresses of the N source blocks, `packed` that of the super-block. The N x (L/B) matrix of chunks is
transposed in registers, sixteen bytes of every row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refimpl.kernels._vector import WIDTH, Emitter, Value
from refimpl.layouts.llama import Field


def _log2(number: int) -> int:
    return number.bit_length() - 1


def interleave(
    emit: Emitter,
    field: Field,
    rows: Sequence[Value],
    packed: Value,
    change: Callable[[Value], Value] = lambda vector: vector,
) -> None:
    """Rows into the super-block; `change` is applied to every vector before it is stored."""
    n, chunk = len(rows), field.chunk
    if field.source_bytes < WIDTH:  # a scalar per row
        emit.store(packed, field.target_offset, emit.gather(rows, field.source_offset, chunk))
        return
    together = min(n, WIDTH // chunk)  # rows whose chunks meet in one vector
    place = range(field.source_bytes // chunk) if field.order is None else [field.order.index(c) for c in range(16)]
    for column in range(0, field.source_bytes, WIDTH):
        finished = {}
        for first in range(0, n, together):
            loaded = [emit.load(row, field.source_offset + column) for row in rows[first : first + together]]
            for j, vector in enumerate(emit.rotate(loaded, chunk, _log2(together))):
                c, r = divmod(j * WIDTH // chunk, together)
                target = (place[column // chunk + c] * n + first + r) * chunk
                finished[field.target_offset + target] = change(emit.xor(vector, field.xor))
        for target in sorted(finished):  # in ascending order, as streamed stores need
            emit.store(packed, target, finished[target])


def separate(emit: Emitter, field: Field, rows: Sequence[Value], packed: Value) -> None:
    """The super-block into rows: the same transposition with rows and chunks in exchanged roles."""
    n, chunk = len(rows), field.chunk
    if field.source_bytes < WIDTH:
        emit.scatter(rows, field.source_offset, chunk, emit.load(packed, field.target_offset, n * chunk))
        return
    count = field.source_bytes // chunk
    place = range(count) if field.order is None else [field.order.index(c) for c in range(16)]
    if n * chunk < WIDTH:  # a vector holds several chunk columns: rotate the whole (small) field at once
        loaded = [emit.load(packed, field.target_offset + i) for i in range(0, n * field.source_bytes, WIDTH)]
        for j, vector in enumerate(emit.rotate(loaded, chunk, _log2(count))):
            r, byte = divmod(j * WIDTH, field.source_bytes)
            emit.store(rows[r], field.source_offset + byte, emit.xor(vector, field.xor))
        return
    together = WIDTH // chunk
    for first in range(0, count, together):
        for column in range(0, n * chunk, WIDTH):
            loaded = [
                emit.load(packed, field.target_offset + place[c] * n * chunk + column)
                for c in range(first, first + together)
            ]
            for j, vector in enumerate(emit.rotate(loaded, chunk, _log2(together))):
                row = rows[column // chunk + j]
                emit.store(row, field.source_offset + first * chunk, emit.xor(vector, field.xor))
