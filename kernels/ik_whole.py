"""The source types of ik_llama.cpp that are more than bits moved about (specification: repack-ik.md 4.25, 5).

Each function emits one step: for 16-bit floats eight (or two) columns of sixteen rows, for q8_K a block, for q8_KV 32
columns of eight rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from refimpl.kernels import llama_chunks
from refimpl.kernels._vector import I8, I16, I32, Emitter, Value
from refimpl.layouts.llama import Field

F32 = ir.FloatType()

COLUMNS_16 = Field("values", 0, 0, 16, chunk=4)
"""Eight 16-bit columns: pairs of columns are the chunks."""
Q8_K_QS = Field("qs", 16, 8, 256, chunk=4)
Q8_KV_QS = Field("qs", 0, 0, 32, chunk=4)


def columns_of_halves(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """Eight columns of bf16."""
    llama_chunks.interleave(emit, COLUMNS_16, rows, packed)


def columns_of_halves_back(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """The inverse."""
    llama_chunks.separate(emit, COLUMNS_16, rows, packed)


def columns_of_f16(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """Eight columns of f16, turned into bf16 after the move."""
    llama_chunks.interleave(emit, COLUMNS_16, rows, packed, lambda vector: f16_to_bf16(emit, vector))


def two_columns_of_f16(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """The same with the conversion."""
    for first in range(0, 16, 4):
        emit.store(packed, 4 * first, f16_to_bf16(emit, emit.gather(rows[first : first + 4], 0, 4)))


def row_heads(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """The first four bytes of every row, an f32, in row order: what a target group with row metadata begins with."""
    for first in range(0, len(rows), 4):
        emit.store(packed, 4 * first, emit.gather(rows[first : first + 4], 0, 4))


def row_heads_back(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """The inverse."""
    for first in range(0, len(rows), 4):
        emit.scatter(rows[first : first + 4], 0, 4, emit.load(packed, 4 * first))


def f16_to_bf16(emit: Emitter, vector: Value) -> Value:
    """Widened exactly to f32, the low 16 bits dropped; in integers, but for the subnormals' leading bit."""
    b, kind = emit.builder, ir.VectorType(I16, vector.type.count // 2)

    def const(value: int) -> Value:
        return ir.Constant(kind, [value] * kind.count)

    h = b.bitcast(vector, kind)
    magnitude = b.and_(h, const(0x7FFF))
    third = b.lshr(magnitude, const(3))
    normal = b.add(third, const(112 << 7))
    infinite = b.add(third, const(224 << 7))
    quiet = b.or_(infinite, const(0x0040))
    floats = b.bitcast(b.uitofp(magnitude, ir.VectorType(F32, kind.count)), ir.VectorType(I32, kind.count))
    upper = b.trunc(b.lshr(floats, ir.Constant(floats.type, [16] * kind.count)), kind)
    subnormal = b.sub(upper, const(24 << 7))
    result = b.select(b.icmp_unsigned("<", magnitude, const(0x0400)), subnormal, normal)
    result = b.select(b.icmp_unsigned("==", magnitude, const(0)), const(0), result)
    result = b.select(b.icmp_unsigned("==", magnitude, const(0x7C00)), infinite, result)
    result = b.select(b.icmp_unsigned(">", magnitude, const(0x7C00)), quiet, result)
    return b.bitcast(b.or_(result, b.and_(h, const(0x8000))), vector.type)


def f32_to_f16(emit: Emitter, vector: Value) -> Value:
    """Nearest even, overflow to infinity, subnormal results kept, NaNs quiet with their upper bits."""
    b, count = emit.builder, vector.type.count // 4
    kind = ir.VectorType(I32, count)

    def const(value: int) -> Value:
        return ir.Constant(kind, [value] * count)

    x = b.bitcast(vector, kind)
    a = b.and_(x, const(0x7FFFFFFF))
    odd = b.and_(b.lshr(a, const(13)), const(1))
    normal = b.lshr(b.add(b.add(a, const(2**32 - (112 << 23) + 0xFFF)), odd), const(13))
    # Adding one half puts the last bit of a subnormal result at the end of the float, which rounds it.
    half = 0x3F000000
    floats = ir.VectorType(F32, count)
    rounded = b.fadd(b.bitcast(a, floats), ir.Constant(floats, [0.5] * count))
    subnormal = b.sub(b.bitcast(rounded, kind), const(half))
    nan = b.or_(const(0x7E00), b.and_(b.lshr(a, const(13)), const(0x3FF)))
    result = b.select(b.icmp_unsigned("<", a, const(0x38800000)), subnormal, normal)
    result = b.select(b.icmp_unsigned(">=", a, const(0x47800000)), const(0x7C00), result)
    result = b.select(b.icmp_unsigned(">", a, const(0x7F800000)), nan, result)
    result = b.or_(result, b.and_(b.lshr(x, const(16)), const(0x8000)))
    return b.bitcast(b.trunc(result, ir.VectorType(I16, count)), ir.VectorType(I8, 2 * count))


def q8_k_block(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """A block of q8_K: scales to f16, quants in chunks of four, sums dropped."""
    emit.store(packed, 0, f32_to_f16(emit, emit.gather(rows, 0, 4)))
    llama_chunks.interleave(emit, Q8_K_QS, rows, packed)


def q8_kv_columns(emit: Emitter, rows: Sequence[Value], packed: Value) -> None:
    """32 columns of q8_KV."""
    llama_chunks.interleave(emit, Q8_KV_QS, rows, packed)
