"""The 28 run-time repack layouts of ik_llama.cpp, as data (specification: repack-ik.md 2-5).

Nearly all of them only move bits. A part of a block is a number of values of some bits each; two places say where bit b
of value t stands in a source block, and where it stands for row k in the target block. Everything else follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from refimpl.layouts.base import Layout
from refimpl.types import TensorType, type_by_name

Bit = tuple[int, int]
"""Byte and bit in a block; bit 0 is the least significant."""
Source = Callable[[int, int], Bit]
Target = Callable[[int, int, int], Bit]
Whole = Literal["bits", "bf16", "f16", "q8_K", "q8_KV"]


@dataclass(frozen=True, slots=True)
class Part:
    """`count` values of `bits` bits in each row: `source(t, b)` and `target(k, t, b)` are the places of bit b.

    `sign_codes`: the values are sign codes, and the target holds their prefix parities (the map T) in bits 1..7 of a
    byte.
    """

    name: str
    count: int
    bits: int
    source: Source
    target: Target
    sign_codes: bool = False


@dataclass(frozen=True, slots=True)
class IkLayout(Layout):
    """A layout that the run-time pass makes; `target_type` is the type that the tensor has afterwards.

    `whole` is "bits" where the parts say everything. The others are not permutations of the bits of a block:
    "bf16" and "f16" interleave whole rows of 16-bit values, "q8_K" and "q8_KV" have shorter rows than their source.
    """

    parts: tuple[Part, ...]
    target_type: TensorType
    whole: Whole = "bits"

    def refusal(self, shape: Sequence[int]) -> str | None:
        """As for every layout; and 16-bit floats go in pairs of columns."""
        # Explicit arguments: dataclasses with slots are made anew, which the short form of super() does not survive.
        reason = super(IkLayout, self).refusal(shape)
        if reason is None and self.whole in ("bf16", "f16") and shape[0] % 2:
            return f"ne0 = {shape[0]} is odd"
        return reason

    def written_bytes(self, blocks: int) -> int:
        """Bytes of a target group of `blocks` blocks per row; less than its place for q8_K and q8_KV."""
        target = self.target_type
        return self.rows * (target.row_meta_bytes + blocks * target.block_bytes)

    @property
    def invertible(self) -> bool:
        """Whether the source can be had back from the target."""
        return self.whole in ("bits", "bf16")


# Source places. s is the 32-weight sub-block, v the place in it.


def raw(offset: int, bits: int) -> Source:
    """Values one after the other from byte `offset` on, lowest bits first."""
    return lambda t, b: divmod(8 * offset + t * bits + b, 8)


def l4a(offset: int) -> Source:
    """4-bit weights: two sub-blocks share 32 bytes, one in the low and one in the high nibbles."""
    return lambda t, b: (offset + 32 * (t // 64) + t % 32, 4 * (t // 32 % 2) + b)


def l4b(offset: int) -> Source:
    """4-bit weights: 16 bytes per sub-block, weights 0..15 in the low nibbles."""
    return lambda t, b: (offset + 16 * (t // 32) + t % 16, 4 * (t // 16 % 2) + b)


def l2(offset: int) -> Source:
    """2-bit weights: four sub-blocks share 32 bytes."""
    return lambda t, b: (offset + 32 * (t // 128) + t % 32, 2 * (t // 32 % 4) + b)


def h1(offset: int) -> Source:
    """One further bit per weight: bit s of byte v."""
    return lambda t, b: (offset + t % 32, t // 32)


def k6_scale(offset: int) -> Source:
    """The 6-bit scales of the 12 bytes of q4_K and q5_K."""
    return lambda s, b: (offset + s, b) if s < 4 else (offset + s + 4, b) if b < 4 else (offset + s - 4, b + 2)


def k6_min(offset: int) -> Source:
    """The 6-bit mins of the same 12 bytes."""
    return lambda s, b: (offset + s + 4, b) if s < 4 else (offset + s + 4, b + 4) if b < 4 else (offset + s, b + 2)


# Target places. i is the place in a group of four weights, k the row.


def per_row(offset: int, nbytes: int = 2) -> Target:
    """One value of `nbytes` bytes per row, in row order."""
    return lambda k, t, b: (offset + nbytes * k + b // 8, b % 8)


def chunks(offset: int, nbytes: int, rows: int) -> Target:
    """Bytes in groups of `nbytes`, the rows' groups in turn."""
    return lambda k, t, b: (offset + (t // nbytes * rows + k) * nbytes + t % nbytes, b)


def slots(offset: int, bits: int, nbytes: int, rows: int = 4) -> Target:
    """P4/32, P2/16, P1/8, P4/16: slot rows*t + k goes to byte slot % nbytes, there to the slot / nbytes-th place."""
    return lambda k, t, b: (offset + (rows * t + k) % nbytes, bits * ((rows * t + k) // nbytes) + b)


def n4(offset: int) -> Target:
    """4-bit weights in 64 bytes per sub-block: weights a..a+3 low, a+8..a+11 high, a = 0, 16, 4, 20."""
    return lambda k, t, b: (
        offset + 64 * (t // 32) + 16 * (t // 16 % 2 + 2 * (t // 4 % 2)) + 4 * k + t % 4,
        4 * (t // 8 % 2) + b,
    )


def n2(offset: int) -> Target:
    """2-bit weights in 32 bytes per sub-block."""
    return lambda k, t, b: (offset + 32 * (t // 32) + 16 * (t // 16 % 2) + 4 * k + t % 4, 2 * (t // 4 % 4) + b)


def e1(offset: int, order: tuple[int, ...] = (0, 4, 8, 12, 16, 20, 24, 28)) -> Target:
    """One bit per weight in 16 bytes per sub-block: the four weights from order[n] on have bit n."""
    return lambda k, t, b: (offset + 16 * (t // 32) + 4 * k + t % 4, order.index(t % 32 // 4 * 4))


HIGH_BITS_5K = (0, 8, 16, 24, 4, 12, 20, 28)
HIGH_BITS_Q5_K = (0, 8, 4, 12, 16, 24, 20, 28)


def _scale_of_k6(low: int, high: int, min_: bool) -> Target:
    """Low four bits of scale and min share a byte; their high pairs share a nibble of P4/16."""
    shift, pair = (4, 2) if min_ else (0, 0)
    return lambda k, s, b: (
        (low + 4 * s + k, shift + b) if b < 4 else (high + (4 * s + k) % 16, 4 * ((4 * s + k) // 16) + pair + b - 4)
    )


def _sign_words(at: Callable[[int], int], target: int) -> tuple[Part, Part]:
    """A word of four 7-bit sign codes and a 4-bit scale per sub-block (repack-ik.md 4.20), its first byte at(s)."""

    def code(t: int, b: int) -> Bit:
        return divmod(8 * at(t // 4) + 7 * (t % 4) + b, 8)

    def bit(t: int, b: int) -> Bit:
        return divmod(8 * at(t // 4) + 28 + t % 4, 8)

    def byte(k: int, t: int) -> int:
        return target + 4 * (t // 4 * 4 + k) + t % 4

    return (
        Part("signs", 32, 7, code, lambda k, t, b: (byte(k, t), b + 1), sign_codes=True),
        Part("scales", 32, 1, bit, lambda k, t, b: (byte(k, t), 0)),
    )


_D = Part("d", 1, 16, raw(0, 16), per_row(0))
_EXTRA = Part("extra", 16, 1, raw(2, 1), lambda k, t, b: (8 + 4 * (t % 2) + k, t // 2))


def _k6(d: int, dmin: int) -> tuple[Part, ...]:
    return (
        Part("d", 1, 16, raw(d, 16), per_row(0)),
        Part("dmin", 1, 16, raw(dmin, 16), per_row(8)),
        Part("scales", 8, 6, k6_scale(4), _scale_of_k6(32, 16, False)),
        Part("mins", 8, 6, k6_min(4), _scale_of_k6(32, 16, True)),
    )


_PARTS: dict[str, tuple[Part, ...]] = {
    "q4_0": (_D, Part("qs", 16, 8, raw(2, 8), chunks(16, 4, 8))),
    "mxfp4": (Part("e", 1, 8, raw(0, 8), per_row(0, 1)), Part("qs", 16, 8, raw(1, 8), chunks(8, 4, 8))),
    "q8_0": (_D, Part("qs", 32, 8, raw(2, 8), chunks(16, 4, 8))),
    "q5_0": (
        _D,
        Part("qh", 32, 1, raw(2, 1), lambda k, t, b: (
            8 + 4 * k + t % 4, t // 16 + 2 * (t // 4 % 2) + 4 * (t // 8 % 2))),
        Part("qs", 32, 4, l4b(6), n4(24)),
    ),
    "q6_0": (
        _D,
        Part("qh", 32, 2, lambda t, b: (2 + t % 8, 4 * (t // 8 % 2) + 2 * (t // 16) + b), lambda k, t, b: (
            8 + 16 * (t // 16) + 4 * k + t % 4, 2 * (t // 4 % 2) + 4 * (t // 8 % 2) + b)),
        Part("qs", 32, 4, l4b(10), n4(40)),
    ),
    "iq4_nl": (_D, Part("qs", 32, 4, l4b(2), n4(8))),
    "iq4_xs": (
        _D,
        Part("scales_h", 8, 2, raw(2, 2), slots(16, 2, 16, 8)),
        Part("scales_l", 8, 4, raw(4, 4), slots(32, 4, 32, 8)),
        Part("qs", 256, 4, l4b(8), lambda k, t, b: (
            64 + 128 * (t // 32) + 32 * (t // 8 % 4) + 4 * k + t % 4, 4 * (t // 4 % 2) + b)),
    ),
    "iq4_ks": (Part("scales", 8, 8, raw(0, 8), chunks(0, 1, 4)), Part("qs", 256, 4, l4b(8), n4(32))),
    "iq5_ks": (
        Part("scales", 8, 8, raw(0, 8), chunks(0, 1, 4)),
        Part("qs", 256, 4, l4a(8), n4(32)),
        Part("qh", 256, 1, h1(136), e1(544, HIGH_BITS_5K)),
    ),
    "iq2_bn": (
        Part("qs", 64, 2, lambda t, b: (t % 16, 2 * (t // 16) + b), lambda k, t, b: (
            16 * (t // 16) + 4 * k + t % 4, 2 * (t // 4 % 4) + b)),
    ),
    "q2_K": (
        Part("d", 1, 16, raw(80, 16), per_row(0)),
        Part("dmin", 1, 16, raw(82, 16), per_row(8)),
        Part("scales", 16, 8, raw(0, 8), chunks(16, 1, 4)),
        Part("qs", 256, 2, l2(16), n2(80)),
    ),
    "q3_K": (
        Part("d", 1, 16, raw(108, 16), per_row(0)),
        Part("scales_h", 16, 2, lambda j, b: (104 + j % 4, 2 * (j // 4) + b), slots(8, 2, 16)),
        Part("scales_l", 16, 4, lambda j, b: (96 + j % 8, 4 * (j // 8) + b), slots(24, 4, 32)),
        Part("qh", 256, 1, h1(0), e1(56)),
        Part("qs", 256, 2, l2(32), n2(184)),
    ),
    "q4_K": (*_k6(0, 2), Part("qs", 256, 4, l4a(16), n4(64))),
    "q5_K": (
        *_k6(0, 2),
        Part("qh", 256, 1, h1(16), e1(64, HIGH_BITS_Q5_K)),
        Part("qs", 256, 4, l4a(48), n4(192)),
    ),
    "q6_K": (
        Part("d", 1, 16, raw(208, 16), per_row(0)),
        Part("scales", 16, 8, raw(192, 8), chunks(8, 1, 4)),
        Part("qh", 256, 2, lambda t, b: (128 + 32 * (t // 128) + t % 32, 2 * (t // 32 % 4) + b), lambda k, t, b: (
            72 + 32 * (t // 32) + 16 * (t // 16 % 2) + 4 * k + t % 4, 4 * (t // 4 % 2) + 2 * (t // 8 % 2) + b)),
        Part("ql", 256, 4, lambda t, b: (
            64 * (t // 128) + 32 * (t // 32 % 2) + t % 32, 4 * (t // 64 % 2) + b), n4(328)),
    ),
    "iq2_k": (
        _D, _EXTRA,
        Part("scales", 16, 4, raw(4, 4), slots(16, 4, 32)),
        Part("qs", 256, 2, l2(12), n2(48)),
    ),
    "iq3_k": (
        _D, _EXTRA,
        Part("scales_h", 16, 1, raw(4, 1), slots(16, 1, 8)),
        Part("scales_l", 16, 4, raw(6, 4), slots(24, 4, 32)),
        Part("qs", 256, 2, l2(14), n2(56)),
        Part("qh", 256, 1, h1(78), e1(312)),
    ),
    "iq4_k": (
        _D, _EXTRA,
        Part("scales_h", 16, 2, raw(4, 2), slots(16, 2, 16)),
        Part("scales_l", 16, 4, raw(8, 4), slots(32, 4, 32)),
        Part("qs", 256, 4, l4b(16), n4(64)),
    ),
    "iq5_k": (
        _D, _EXTRA,
        Part("scales_h", 16, 2, raw(4, 2), slots(16, 2, 16)),
        Part("scales_l", 16, 4, raw(8, 4), slots(32, 4, 32)),
        Part("qs", 256, 4, l4a(16), n4(64)),
        Part("qh", 256, 1, h1(144), e1(576, HIGH_BITS_5K)),
    ),
    "iq2_xxs": (
        _D,
        *_sign_words(lambda s: 6 + 8 * s, 8),
        Part("qs", 32, 8, lambda t, b: (2 + 8 * (t // 4) + t % 4, b), chunks(136, 4, 4)),
    ),
    "iq2_xs": (
        _D,
        Part("qs", 32, 9, raw(2, 16), lambda k, t, b: (8 + 2 * (t // 4 * 16 + 4 * k + t % 4) + b // 8, b % 8)),
        Part("signs", 32, 7, lambda t, b: divmod(16 + 16 * t + 9 + b, 8), lambda k, t, b: (
            9 + 2 * (t // 4 * 16 + 4 * k + t % 4), b + 1), sign_codes=True),
        Part("scales", 8, 8, raw(66, 8), chunks(264, 1, 4)),
    ),
    "iq2_s": (
        _D,
        Part("qs", 32, 8, raw(2, 8), chunks(8, 4, 4)),
        Part("qh", 8, 8, raw(66, 8), chunks(136, 1, 4)),
        Part("signs", 32, 8, raw(34, 8), chunks(168, 4, 4)),
        Part("scales", 8, 8, raw(74, 8), chunks(296, 1, 4)),
    ),
    "iq3_xxs": (
        _D,
        *_sign_words(lambda s: 66 + 4 * s, 8),
        Part("qs", 64, 8, raw(2, 8), chunks(136, 8, 4)),
    ),
    "iq3_s": (
        _D,
        Part("qs", 64, 8, raw(2, 8), lambda k, t, b: (8 + 32 * (t // 8) + 8 * (t % 4) + 4 * (t // 4 % 2) + k, b)),
        Part("qh", 8, 8, raw(66, 8), chunks(264, 1, 4)),
        Part("signs", 256, 1, raw(74, 1), lambda k, t, b: (296 + 16 * (t // 32) + 4 * k + t % 4, t // 4 % 8)),
        Part("scales", 8, 4, raw(106, 4), slots(424, 4, 16)),
    ),
    # The four that are more than bits of a block moved about; for these, see repacking/reference_ik.py.
    "bf16": (), "f16": (), "q8_K": (), "q8_KV": (),
}  # fmt: skip


def _layout(source: str, parts: tuple[Part, ...]) -> IkLayout:
    kind = type_by_name(source, "ik_llama.cpp")
    assert kind.interleaved_as
    assert kind.interleaved_rows
    target = type_by_name(kind.interleaved_as, "ik_llama.cpp")
    whole: Whole = "bits" if parts else source  # type: ignore[assignment]
    return IkLayout(target.name, kind, kind.interleaved_rows, "ik_llama.cpp", parts, target, whole)


IK_LAYOUTS: tuple[IkLayout, ...] = tuple(_layout(source, parts) for source, parts in _PARTS.items())


def bit_sources(layout: IkLayout) -> list[tuple[int, int]]:
    """For every bit of a target block, lowest first: the row and the bit of the source block that it comes from."""
    block_bits = 8 * layout.source_type.block_bytes
    sources: list[tuple[int, int]] = [(-1, -1)] * (layout.rows * block_bits)
    for part in layout.parts:
        for k in range(layout.rows):
            for t in range(part.count):
                for b in range(part.bits):
                    byte, bit = part.target(k, t, b)
                    source_byte, source_bit = part.source(t, b)
                    sources[8 * byte + bit] = (k, 8 * source_byte + source_bit)
    return sources


def sign_code_bytes(layout: IkLayout) -> list[int]:
    """The bytes of a target block whose bits 1..7 hold prefix parities."""
    found = {
        part.target(k, t, 0)[0]
        for part in layout.parts if part.sign_codes
        for k in range(layout.rows)
        for t in range(part.count)
    }  # fmt: skip
    return sorted(found)
