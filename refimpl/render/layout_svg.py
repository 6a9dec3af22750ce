"""A picture of a repack layout: a source block above, the super-block below, a colour per row and a tint per field."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape
from typing import Any

from refimpl.layouts import Layout
from refimpl.render.layout import layout_fields
from refimpl.repacking.bitmap import bit_map

CELL, PER_LINE, LEFT, GAP = 22, 32, 70, 36
BAND = CELL // 4
INK, PAPER, GRID = "#1c2530", "#ffffff", "#c9d2dc"


def layout_svg(layout: Layout) -> str:
    """The SVG.

    Each byte is a square in the colour of the row that it comes from. In the super-block it also holds the number of
    the source byte, or of the two that its low bits (below) and its high bits (above) come from.
    """
    bits = bit_map(layout)
    block, size = layout.source_type.block_bytes, layout.super_block_bytes
    fields = layout_fields(layout)
    parts: list[str] = []
    y = _title(parts, layout)
    for row in range(layout.rows):
        parts.append(_square(LEFT + row * 64, y, _colour(row, layout.rows)))
        parts.append(_text(LEFT + row * 64 + CELL + 6, y + 15, f"row {row}"))
    y += CELL + GAP
    heads = f"source block, {block} bytes (row 0)", f"super-block, {size} bytes"
    y = _bytes(parts, heads[0], y, [(0, bit) for bit in range(8 * block)], layout.rows, _names(fields, "source"))
    y = _bytes(parts, heads[1], y, bits.sources, layout.rows, _names(fields, "target"))
    width = LEFT + PER_LINE * CELL + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="{INK}">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>\n'
    )


def _title(parts: list[str], layout: Layout) -> int:
    kind = layout.source_type
    parts.append(f'<text x="20" y="34" font-size="20" font-weight="bold">{escape(layout.name)}</text>')
    blocks = f"{kind.name} blocks ({kind.block_length} elements, {kind.block_bytes} bytes)"
    parts.append(_text(20, 56, f"{layout.dialect}: {layout.rows} rows of {blocks}"))
    return 76


def _names(fields: list[dict[str, Any]], side: str) -> dict[int, str]:
    """Where each field begins."""
    names: dict[int, str] = {}
    for field in fields:
        place = field[f"{side}_offset"]
        names[place] = f"{names[place]}, {field['name']}" if place in names else field["name"]
    return names


def _bytes(
    parts: list[str], title: str, y: int, sources: Sequence[tuple[int, int]], rows: int, names: dict[int, str]
) -> int:
    """A line of squares per PER_LINE bytes; returns where the next thing may stand."""
    count = len(sources) // 8
    parts.append(f'<text x="20" y="{y}" font-weight="bold">{escape(title)}</text>')
    y += 22
    for first in range(0, count, PER_LINE):
        parts.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{first}</text>')
        for i in range(first, min(first + PER_LINE, count)):
            x = LEFT + (i - first) * CELL
            _byte(parts, x, y, sources[8 * i : 8 * i + 8], rows)
            if i in names:
                parts.append(f'<line x1="{x}" y1="{y - 5}" x2="{x}" y2="{y + CELL}" stroke="{INK}" stroke-width="2"/>')
                parts.append(f'<text x="{x + 3}" y="{y - 3}" font-size="10">{escape(names[i])}</text>')
        y += CELL + 16
    return y + GAP // 2


def _byte(parts: list[str], x: int, y: int, sources: Sequence[tuple[int, int]], rows: int) -> None:
    """One square; bits of several rows lie in stripes, the low ones at the bottom."""
    if len({row for row, _ in sources}) == 1:
        parts.append(_square(x, y, _colour(sources[0][0], rows)))
    else:
        for pair in range(4):
            top, colour = y + CELL - (pair + 1) * BAND - 1, _colour(sources[2 * pair][0], rows)
            parts.append(f'<rect x="{x}" y="{top}" width="{CELL}" height="{BAND + 1}" fill="{colour}"/>')
        parts.append(_square(x, y, "none"))
    held = list(dict.fromkeys(bit // 8 for _, bit in sources))
    if len(held) <= 2:
        for number, byte in enumerate(held):
            place = y + (15 if len(held) == 1 else 20 - 10 * number)
            middle = f'x="{x + CELL // 2}" y="{place}" text-anchor="middle"'
            parts.append(f'<text {middle} font-size="8">{byte}</text>')


def _square(x: int, y: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{colour}" stroke="{GRID}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'


def _colour(row: int, rows: int) -> str:
    """Hues around the circle, light enough for the text on top."""
    parts = colorsys.hls_to_rgb(row / rows, 0.82 if row % 2 else 0.72, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
