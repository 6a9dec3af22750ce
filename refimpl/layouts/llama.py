"""The 23 layouts of llama.cpp's buffer type CPU_REPACK, as data (specification: repack-llama.md 1-3).

A layout `TYPE_NxB` interleaves N rows. Target super-block number g*nb + x is made of the N source blocks of
column x in row group g, and takes exactly their N*S bytes, so that a row group keeps its byte range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from refimpl.layouts.base import Layout
from refimpl.types import type_by_name

Rule = Literal["chunks", "k-scales-packed", "k-scales-split", "nibbles"]

RULES: dict[Rule, str] = {
    "chunks": "chunk interleave I(F, L, B): T[(c*N + r)*B + k] = src_r.F[c*B + k], then xor",
    "k-scales-packed": "6-bit scales and mins: the row x sub-block matrix transposed, packed again in 12-byte groups",
    "k-scales-split": "6-bit scales and mins: 128 bytes of low nibbles, then 64 bytes of high pairs",
    "nibbles": "nibble n of row r goes to byte 2*n + r/2, low nibble if r is even",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a target super-block.

    It takes N*`source_bytes` bytes at `target_offset`, made of the `source_bytes` bytes at `source_offset` of each
    of the N source blocks by `rule`. For chunks, `chunk` is B in bytes, `xor` is applied to every byte after the
    move, and `order` (when given) lists which source chunk stands at target chunk 0, 1, ...
    """

    name: str
    target_offset: int
    source_offset: int
    source_bytes: int
    rule: Rule = "chunks"
    chunk: int = 1
    xor: int = 0
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LlamaLayout(Layout):
    """A layout of CPU_REPACK; `interleave` is the B of its name."""

    fields: tuple[Field, ...]
    interleave: int


def _row(name: str, *fields: Field) -> LlamaLayout:
    source, sizes = name.rsplit("_", 1)
    rows, interleave = map(int, sizes.split("x"))
    return LlamaLayout(name, type_by_name(source, "llama.cpp"), rows, "llama.cpp", fields, interleave)


def _simple(name: str, scalar: str, scalar_bytes: int, quant_bytes: int, chunk: int, xor: int = 0) -> LlamaLayout:
    """A type of 32 elements (or q1_0 by bytes): one scalar per row, then the quants in chunks."""
    rows = int(name.rsplit("_", 1)[1].split("x", maxsplit=1)[0])
    return _row(
        name,
        Field(scalar, 0, 0, scalar_bytes, chunk=scalar_bytes),
        Field("qs", rows * scalar_bytes, scalar_bytes, quant_bytes, chunk=chunk, xor=xor),
    )


def _halves(rows: int, d: int, dmin: int) -> tuple[Field, Field]:
    """The two fp16 scalars of a K type, first in the target, at these offsets in the source block."""
    return Field("d", 0, d, 2, chunk=2), Field("dmin", 2 * rows, dmin, 2, chunk=2)


def _q2_k(name: str, rows: int, qs_chunk: int, scales: Field) -> LlamaLayout:
    return _row(name, *_halves(rows, 80, 82), scales, Field("qs", 20 * rows, 16, 64, chunk=qs_chunk))


def _q4_k(name: str, rows: int, chunk: int, rule: Rule) -> LlamaLayout:
    scales = Field("scales", 4 * rows, 4, 12, rule)
    return _row(name, *_halves(rows, 0, 2), scales, Field("qs", 16 * rows, 16, 128, chunk=chunk))


def _q5_k(name: str, chunk: int) -> LlamaLayout:
    return _row(
        name,
        *_halves(8, 0, 2),
        Field("scales", 32, 4, 12, "k-scales-packed"),
        Field("qh", 128, 16, 32, chunk=chunk),
        Field("qs", 384, 48, 128, chunk=chunk),
    )


def _q6_k(name: str, chunk: int) -> LlamaLayout:
    return _row(
        name,
        Field("d", 0, 208, 2, chunk=2),
        Field("scales", 16, 192, 16, chunk=1),
        Field("ql", 144, 0, 128, chunk=chunk),
        Field("qh", 1168, 128, 64, chunk=chunk),
    )


_Q2_K_16X1_ORDER = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)

LLAMA_LAYOUTS: tuple[LlamaLayout, ...] = (
    _simple("q4_0_4x4", "d", 2, 16, 4, xor=0x88),
    _simple("q4_0_4x8", "d", 2, 16, 8, xor=0x88),
    _simple("q4_0_8x8", "d", 2, 16, 8, xor=0x88),
    _simple("q4_0_16x1", "d", 2, 16, 1, xor=0x88),
    _simple("q8_0_4x4", "d", 2, 32, 4),
    _simple("q8_0_4x8", "d", 2, 32, 8),
    _simple("q8_0_16x1", "d", 2, 32, 1),
    _simple("iq4_nl_4x4", "d", 2, 16, 4),
    _simple("iq4_nl_8x8", "d", 2, 16, 8),
    _simple("iq4_nl_16x1", "d", 2, 16, 1),
    _simple("mxfp4_4x4", "e", 1, 16, 4),
    _simple("mxfp4_8x8", "e", 1, 16, 8),
    # The second number of q1_0 counts elements, eight to a byte (repack-llama.md 3.9).
    _row("q1_0_4x4", Field("d", 0, 0, 2, chunk=2), Field("qs", 8, 2, 16, "nibbles")),
    _simple("q1_0_4x8", "d", 2, 16, 1),
    _q2_k("q2_K_8x8", 8, 8, Field("scales", 32, 0, 16, chunk=2)),
    _q2_k("q2_K_16x1", 16, 1, Field("scales", 64, 0, 16, chunk=1, order=_Q2_K_16X1_ORDER)),
    _q4_k("q4_K_8x4", 8, 4, "k-scales-packed"),
    _q4_k("q4_K_8x8", 8, 8, "k-scales-packed"),
    _q4_k("q4_K_16x1", 16, 1, "k-scales-split"),
    _q5_k("q5_K_8x4", 4),
    _q5_k("q5_K_8x8", 8),
    _q6_k("q6_K_8x4", 4),
    _q6_k("q6_K_8x8", 8),
)
