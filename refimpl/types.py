"""The tensor-type table of both dialects: one frozen row per type (specification: gguf.md 2, repack-ik.md 2).

A type is looked up by (id, dialect), since the two programs gave the ids 15, 36 and 41 different meanings.
An id that nobody knows is `UnknownType(id)`: data, not an error; whoever needs its size says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from refimpl.errors import GGUFError, UsageError

Dialect = Literal["llama.cpp", "ik_llama.cpp"]
LLAMA: tuple[Dialect, ...] = ("llama.cpp",)
IK: tuple[Dialect, ...] = ("ik_llama.cpp",)
BOTH: tuple[Dialect, ...] = LLAMA + IK
DIALECTS = BOTH

REMOVED_IDS = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
"""Ids that llama.cpp once used: known to it, but with block size 0 (E_BLOCK instead of E_TENSOR_TYPE)."""
LLAMA_TYPE_COUNT = 43


@dataclass(frozen=True, slots=True)
class TensorType:
    """One tensor type.

    `block_length` elements take `block_bytes` bytes (for the interleaved types of ik_llama.cpp: per row);
    each row starts with `row_meta_bytes` of its own. `interleaved_as` names the type that ik_llama.cpp's
    run-time repack makes of it, `interleaved_rows` how many rows that type holds together.
    """

    id: int
    name: str
    block_length: int
    block_bytes: int
    row_meta_bytes: int
    dialects: tuple[Dialect, ...]
    interleaved_as: str | None = None
    interleaved_rows: int | None = None

    def row_bytes(self, ne0: int) -> int:
        """Bytes of one row of `ne0` elements, with metadata. GGUFError E_BLOCK if that is no whole number of blocks."""
        blocks, rest = divmod(ne0, self.block_length)
        if rest or ne0 < 0:
            raise GGUFError(
                "E_BLOCK",
                f"a row of {ne0} elements is not a whole number of {self.name} blocks of {self.block_length}",
                field="ne0",
                expected=self.block_length,
                found=ne0,
            )
        return self.row_meta_bytes + blocks * self.block_bytes if ne0 else 0

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a contiguous tensor of `shape` (fastest dimension first; no dimension means one element)."""
        rows = 1
        for size in shape[1:]:
            rows *= size
        return self.row_bytes(shape[0] if shape else 1) * rows


@dataclass(frozen=True, slots=True)
class UnknownType:
    """A type id in a file that no dialect in question knows. It has no size."""

    id: int

    @property
    def name(self) -> str:
        """`unknown:ID`, for reports."""
        return f"unknown:{self.id}"

    def row_bytes(self, ne0: int) -> int:
        """Always GGUFError E_TENSOR_TYPE."""
        raise GGUFError("E_TENSOR_TYPE", f"nobody knows tensor type {self.id}", field="type", found=self.id)

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Always GGUFError E_TENSOR_TYPE."""
        return self.row_bytes(shape[0] if shape else 1)


T = TensorType
# fmt: off
TYPES: tuple[TensorType, ...] = (
    # id, name, block length, block bytes, row metadata bytes, dialects, interleaved partner, its rows
    T(0, "f32", 1, 4, 0, BOTH),
    T(1, "f16", 1, 2, 0, BOTH, "bf16_r16", 16),
    T(2, "q4_0", 32, 18, 0, BOTH, "q4_0_r8", 8),
    T(3, "q4_1", 32, 20, 0, BOTH),
    T(6, "q5_0", 32, 22, 0, BOTH, "q5_0_r4", 4),
    T(7, "q5_1", 32, 24, 0, BOTH),
    T(8, "q8_0", 32, 34, 0, BOTH, "q8_0_r8", 8),
    T(9, "q8_1", 32, 36, 0, BOTH),
    T(10, "q2_K", 256, 84, 0, BOTH, "q2_k_r4", 4),
    T(11, "q3_K", 256, 110, 0, BOTH, "q3_k_r4", 4),
    T(12, "q4_K", 256, 144, 0, BOTH, "q4_k_r4", 4),
    T(13, "q5_K", 256, 176, 0, BOTH, "q5_k_r4", 4),
    T(14, "q6_K", 256, 210, 0, BOTH, "q6_k_r4", 4),
    T(15, "q8_K", 256, 292, 0, LLAMA),
    T(15, "q8_K", 256, 296, 0, IK, "q8_k_r8", 8),
    T(16, "iq2_xxs", 256, 66, 0, BOTH, "iq2_xxs_r4", 4),
    T(17, "iq2_xs", 256, 74, 0, BOTH, "iq2_xs_r4", 4),
    T(18, "iq3_xxs", 256, 98, 0, BOTH, "iq3_xxs_r4", 4),
    T(19, "iq1_s", 256, 50, 0, BOTH),
    T(20, "iq4_nl", 32, 18, 0, BOTH, "iq4_nl_r4", 4),
    T(21, "iq3_s", 256, 110, 0, BOTH, "iq3_s_r4", 4),
    T(22, "iq2_s", 256, 82, 0, BOTH, "iq2_s_r4", 4),
    T(23, "iq4_xs", 256, 136, 0, BOTH, "iq4_xs_r8", 8),
    T(24, "i8", 1, 1, 0, BOTH),
    T(25, "i16", 1, 2, 0, BOTH),
    T(26, "i32", 1, 4, 0, BOTH),
    T(27, "i64", 1, 8, 0, BOTH),
    T(28, "f64", 1, 8, 0, BOTH),
    T(29, "iq1_m", 256, 56, 0, BOTH),
    T(30, "bf16", 1, 2, 0, BOTH, "bf16_r16", 16),
    T(31, "q4_0_4x4", 32, 18, 0, IK),
    T(32, "q4_0_4x8", 32, 18, 0, IK),
    T(33, "q4_0_8x8", 32, 18, 0, IK),
    T(34, "tq1_0", 256, 54, 0, LLAMA),
    T(35, "tq2_0", 256, 66, 0, LLAMA),
    T(36, "i2_s", 1, 1, 0, IK),
    T(39, "mxfp4", 32, 17, 0, BOTH, "mxfp4_r8", 8),
    T(40, "nvfp4", 64, 36, 0, LLAMA),
    T(41, "q1_0", 128, 18, 0, LLAMA),
    T(41, "q1_0_g128", 128, 18, 0, IK),
    T(42, "q2_0", 64, 18, 0, LLAMA),
    T(97, "q8_0_x4", 32, 34, 0, IK),
    T(98, "q8_1_x4", 32, 36, 0, IK),
    T(99, "q8_2_x4", 32, 36, 0, IK),
    T(133, "q6_0", 32, 26, 0, IK, "q6_0_r4", 4),
    T(134, "iq1_bn", 64, 13, 2, IK),
    T(135, "iq2_bn", 64, 16, 4, IK, "iq2_bn_r4", 4),
    T(136, "q8_K64", 64, 68, 0, IK),
    T(137, "iq2_k", 256, 76, 0, IK, "iq2_k_r4", 4),
    T(138, "iq3_k", 256, 110, 0, IK, "iq3_k_r4", 4),
    T(139, "iq4_k", 256, 144, 0, IK, "iq4_k_r4", 4),
    T(140, "iq5_k", 256, 176, 0, IK, "iq5_k_r4", 4),
    T(141, "iq6_k", 256, 212, 0, IK),
    T(144, "iq4_ks", 256, 136, 4, IK, "iq4_ks_r4", 4),
    T(145, "iq2_ks", 256, 70, 2, IK),
    T(146, "iq4_kss", 256, 128, 4, IK),
    T(147, "q8_K16", 64, 64, 20, IK),
    T(148, "q8_K32", 256, 296, 0, IK),
    T(149, "q8_KR8", 256, 296, 0, IK),
    T(150, "q8_K128", 128, 140, 0, IK),
    T(151, "q8_KV", 32, 32, 8, IK, "q8_KV_r8", 8),
    T(152, "iq5_ks", 256, 168, 4, IK, "iq5_ks_r4", 4),
    T(153, "iq2_kt", 256, 68, 4, IK),
    T(154, "iq3_kt", 256, 100, 4, IK),
    T(155, "iq4_kt", 256, 128, 4, IK),
    T(156, "iq3_ks", 256, 102, 2, IK),
    T(157, "iq2_kl", 256, 86, 2, IK),
    T(158, "iq1_kt", 256, 56, 4, IK),
    T(202, "q4_0_r8", 32, 18, 0, IK),
    T(206, "q5_0_r4", 32, 22, 0, IK),
    T(208, "q8_0_r8", 32, 34, 0, IK),
    T(210, "q2_k_r4", 256, 84, 0, IK),
    T(211, "q3_k_r4", 256, 110, 0, IK),
    T(212, "q4_k_r4", 256, 144, 0, IK),
    T(213, "q5_k_r4", 256, 176, 0, IK),
    T(214, "q6_k_r4", 256, 210, 0, IK),
    T(216, "iq2_xxs_r4", 256, 66, 0, IK),
    T(217, "iq2_xs_r4", 256, 74, 0, IK),
    T(218, "iq3_xxs_r4", 256, 98, 0, IK),
    T(219, "iq1_s_r4", 32, 6, 2, IK),
    T(220, "iq4_nl_r4", 32, 18, 0, IK),
    T(221, "iq3_s_r4", 256, 110, 0, IK),
    T(222, "iq2_s_r4", 256, 82, 0, IK),
    T(223, "iq4_xs_r8", 256, 136, 0, IK),
    T(229, "iq1_m_r4", 32, 7, 2, IK),
    T(230, "bf16_r16", 1, 2, 0, IK),
    T(233, "q6_0_r4", 32, 26, 0, IK),
    T(335, "iq2_bn_r4", 64, 16, 4, IK),
    T(337, "iq2_k_r4", 256, 76, 0, IK),
    T(338, "iq3_k_r4", 256, 110, 0, IK),
    T(339, "iq4_k_r4", 256, 144, 0, IK),
    T(340, "iq5_k_r4", 256, 176, 0, IK),
    T(344, "iq4_ks_r4", 256, 136, 4, IK),
    T(352, "iq5_ks_r4", 256, 168, 4, IK),
    T(353, "mxfp4_r8", 32, 17, 0, IK),
    T(397, "q8_k_r16", 256, 258, 0, IK),
    T(398, "q8_KV_r8", 32, 32, 4, IK),
    T(399, "q8_k_r8", 256, 258, 0, IK),
)
# fmt: on

_BY_ID = {(row.id, dialect): row for row in TYPES for dialect in row.dialects}
_BY_NAME = {(row.name, dialect): row for row in TYPES for dialect in row.dialects}


def type_by_id(type_id: int, dialect: Dialect | None = None) -> TensorType | UnknownType:
    """The type that `dialect` knows by this id; without a dialect llama.cpp's meaning wins over the fork's."""
    for name in (dialect,) if dialect else DIALECTS:
        row = _BY_ID.get((type_id, name))
        if row is not None:
            return row
    return UnknownType(type_id)


def type_by_name(name: str, dialect: Dialect | None = None) -> TensorType:
    """The type of that name, in any letter case. UsageError E_TYPE if there is none."""
    for candidate in (name, *(row.name for row in TYPES if row.name.lower() == name.lower())):
        for known in (dialect,) if dialect else DIALECTS:
            row = _BY_NAME.get((candidate, known))
            if row is not None:
                return row
    raise UsageError("E_TYPE", f"no tensor type is called {name!r}" + (f" in {dialect}" if dialect else ""), found=name)


def row_bytes(tensor_type: TensorType | UnknownType, ne0: int) -> int:
    """Bytes of one row of `ne0` elements; see TensorType.row_bytes."""
    return tensor_type.row_bytes(ne0)


def tensor_bytes(tensor_type: TensorType | UnknownType, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor; see TensorType.tensor_bytes."""
    return tensor_type.tensor_bytes(shape)
