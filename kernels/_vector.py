"""Sixteen-byte vectors in portable LLVM IR: what the emitters of a super-block are written with.

A kernel is not written byte by byte: Python loops run while it is compiled and emit straight-line vector code,
so that every offset and every shuffle is a constant. Nothing here knows a layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
WIDTH = 16
V16 = ir.VectorType(I8, WIDTH)
_INTS = {1: I8, 2: I16, 4: I32, 8: I64}

Value = ir.Value


class Emitter:
    """Loads, shuffles and stores at constant offsets from run-time addresses (i64).

    With `streamed`, stores to that address go past the caches: they are collected and written in whole aligned
    16-byte pieces, in ascending order, since a cache line that is written in parts is twenty times slower that way.
    """

    def __init__(self, builder: ir.IRBuilder, streamed: Value | None = None) -> None:
        self.builder = builder
        self.base = 0
        """Added to the offsets of streamed stores: where the current super-block begins."""
        self._streamed = streamed
        self._pending: list[tuple[int, Value]] = []
        self._written = 0
        if streamed is not None:
            self._nontemporal = builder.module.add_metadata([ir.Constant(I32, 1)])

    def _pointer(self, address: Value, offset: int, kind: ir.Type) -> Value:
        return self.builder.inttoptr(self.builder.add(address, ir.Constant(I64, offset)), kind.as_pointer())

    def load(self, address: Value, offset: int, nbytes: int = WIDTH) -> Value:
        """`nbytes` bytes as a vector of bytes; any alignment."""
        kind = ir.VectorType(I8, nbytes)
        return self.builder.load(self._pointer(address, offset, kind), align=1)

    def gather(self, addresses: Sequence[Value], offset: int, width: int) -> Value:
        """One integer of `width` bytes from each address, side by side, as a vector of bytes."""
        kind = _INTS[width]
        vector = ir.Constant(ir.VectorType(kind, len(addresses)), ir.Undefined)
        for i, address in enumerate(addresses):
            item = self.builder.load(self._pointer(address, offset, kind), align=1)
            vector = self.builder.insert_element(vector, item, ir.Constant(I32, i))
        return self.builder.bitcast(vector, ir.VectorType(I8, width * len(addresses)))

    def scatter(self, addresses: Sequence[Value], offset: int, width: int, vector: Value) -> None:
        """The inverse of gather."""
        kind = _INTS[width]
        items = self.builder.bitcast(vector, ir.VectorType(kind, len(addresses)))
        for i, address in enumerate(addresses):
            item = self.builder.extract_element(items, ir.Constant(I32, i))
            self.builder.store(item, self._pointer(address, offset, kind), align=1)

    def store(self, address: Value, offset: int, vector: Value) -> None:
        """All bytes of `vector`; any alignment. Streamed stores come in ascending order, without gaps."""
        if address is not self._streamed:
            self.builder.store(vector, self._pointer(address, offset, vector.type), align=1)
            return
        offset += self.base
        end = self._pending[-1][0] + self._pending[-1][1].type.count if self._pending else self._written
        if offset != end:
            raise ValueError(f"a streamed store at {offset} does not follow the last one, which ended at {end}")
        self._pending.append((offset, vector))
        while self._written + WIDTH <= offset + vector.type.count:
            self._write_piece(address)

    def _write_piece(self, address: Value) -> None:
        """Put the next 16 bytes together from the pending vectors, and write them."""
        start = self._written
        piece, filled = None, 0
        for offset, vector in self._pending:
            first, last = max(offset, start), min(offset + vector.type.count, start + WIDTH)
            taken = [start + i - offset if first <= start + i < last else 0 for i in range(WIDTH)]
            part = self.shuffle(vector, vector, taken)
            lanes = [i if i < filled else WIDTH + i for i in range(WIDTH)]
            piece = part if piece is None else self.shuffle(piece, part, lanes)
            filled = last - start
        instruction = self.builder.store(piece, self._pointer(address, start, V16), align=WIDTH)
        instruction.set_metadata("nontemporal", self._nontemporal)
        self._written += WIDTH
        self._pending = [(o, v) for o, v in self._pending if o + v.type.count > self._written]

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Bytes picked from a (0..) and b (after a's)."""
        mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
        return self.builder.shuffle_vector(a, b, mask)

    def zip(self, a: Value, b: Value, width: int) -> tuple[Value, Value]:
        """Elements of `width` bytes taken in turn from a and b: the first and the second half of the result."""
        count = a.type.count
        merged = [base + i * width + k for i in range(count // width) for base in (0, count) for k in range(width)]
        return self.shuffle(a, b, merged[:count]), self.shuffle(a, b, merged[count:])

    def rotate(self, vectors: list[Value], width: int, stages: int) -> list[Value]:
        """Seen as one long array of elements whose index is a row of bits: move the `stages` top bits to the bottom.

        Each stage zips the first half of the array with the second. On P vectors of P rows, log2(P) stages turn
        [row][column] into [column][row]: the chunk interleave, and with other counts its inverse.
        """
        half = len(vectors) // 2
        for _ in range(stages):
            vectors = [z for i in range(half) for z in self.zip(vectors[i], vectors[half + i], width)]
        return vectors

    def transpose4(self, rows: Sequence[Value]) -> list[Value]:
        """Four vectors of four 4-byte elements, rows and columns exchanged."""
        return self.rotate(list(rows), 4, 2)

    def transpose4_bytes(self, vector: Value) -> Value:
        """One vector seen as 4 x 4 bytes, rows and columns exchanged."""
        return self.shuffle(vector, vector, [4 * (i % 4) + i // 4 for i in range(WIDTH)])

    def splat(self, byte: int, count: int = WIDTH) -> Value:
        """A constant vector of one byte value."""
        return ir.Constant(ir.VectorType(I8, count), [byte] * count)

    def masked(self, vector: Value, mask: int, shift: int = 0) -> Value:
        """(byte & mask), then shifted left by `shift` bits (right when negative), in every byte."""
        count = vector.type.count
        value = self.builder.and_(vector, self.splat(mask, count))
        if shift > 0:
            return self.builder.shl(value, self.splat(shift, count))
        return self.builder.lshr(value, self.splat(-shift, count)) if shift else value

    def any(self, *parts: Value) -> Value:
        """Bitwise or of all parts."""
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.or_(total, part)
        return total

    def xor(self, vector: Value, byte: int) -> Value:
        """Every byte xor `byte`; nothing is emitted for 0."""
        return self.builder.xor(vector, self.splat(byte, vector.type.count)) if byte else vector
