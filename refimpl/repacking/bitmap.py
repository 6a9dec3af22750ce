"""Where every bit of a super-block comes from, for any layout that only moves bits.

For the layouts of ik_llama.cpp the table says it; for llama.cpp's the clear version is asked, one bit at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from refimpl.errors import UsageError
from refimpl.layouts import IkLayout, Layout, LlamaLayout
from refimpl.layouts.ik import bit_sources, sign_code_bytes
from refimpl.repacking.reference import repack_groups

PROBES = 1024
"""Super-blocks that are asked at a time."""


@dataclass(frozen=True, slots=True)
class BitMap:
    """`sources[i]` is (row, bit of the source block) of target bit i, lowest bit of the lowest byte first.

    `inverted` holds the target bits that are flipped; in `prefix_bytes`, bits 1..7 are the prefix parities of what
    `sources` names.
    """

    sources: tuple[tuple[int, int], ...]
    inverted: frozenset[int]
    prefix_bytes: frozenset[int]

    def targets(self, bit: int) -> list[tuple[int, int]]:
        """(row, target bit) for one bit of the source block, row by row."""
        return sorted((row, i) for i, (row, source) in enumerate(self.sources) if source == bit)


@cache
def bit_map(layout: Layout) -> BitMap:
    """The map of a layout. UsageError E_LAYOUT_BITS for those that do more than move bits (f16, q8_K, q8_KV, bf16)."""
    if isinstance(layout, IkLayout):
        if layout.whole != "bits":
            text = f"{layout.source_type.name} as {layout.name} is not a rearrangement of the bits of a block"
            raise UsageError("E_LAYOUT_BITS", text)
        return BitMap(tuple(bit_sources(layout)), frozenset(), frozenset(sign_code_bytes(layout)))
    assert isinstance(layout, LlamaLayout)
    size, block = layout.super_block_bytes, layout.source_type.block_bytes
    zero = _repacked(layout, np.zeros((1, size), np.uint8))[0]
    sources: list[tuple[int, int]] = [(0, 0)] * (8 * size)
    for first in range(0, 8 * size, PROBES):
        bits = np.arange(first, min(first + PROBES, 8 * size))
        probes = np.zeros((len(bits), size), np.uint8)
        probes[np.arange(len(bits)), bits // 8] = 1 << (bits % 8)
        changed = np.unpackbits(_repacked(layout, probes) ^ zero, axis=1, bitorder="little")
        for bit, target in zip(bits.tolist(), changed.argmax(axis=1).tolist(), strict=True):
            sources[target] = (bit // 8 // block, bit - bit // 8 // block * block * 8)
    inverted = np.flatnonzero(np.unpackbits(zero, bitorder="little"))
    return BitMap(tuple(sources), frozenset(inverted.tolist()), frozenset())


def field_of_bit(layout: IkLayout, byte: int, bit: int) -> dict[str, object]:
    """The field of a super-block that a bit belongs to, and the row and bit that it comes from."""
    row, source = bit_map(layout).sources[8 * byte + bit]
    for part in layout.parts:
        for t in range(part.count):
            if any(part.source(t, b) == (source // 8, source % 8) for b in range(part.bits)):
                return {"field": part.name, "row": row, "source_byte": source // 8, "source_bit": source % 8}
    raise AssertionError(f"bit {bit} of byte {byte} belongs to no field of {layout.name}")


def _repacked(layout: LlamaLayout, blocks: np.ndarray) -> np.ndarray:
    out = np.empty_like(blocks)
    repack_groups(layout, blocks.reshape(-1), out.reshape(-1), len(blocks), 1)
    return out
