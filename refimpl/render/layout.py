"""A repack layout for people and programs: fields, offsets and the rule of each."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from refimpl.layouts import RULES, Layout
from refimpl.render.text import facts, table


def layout_data(layout: Layout) -> dict[str, Any]:
    """The layout as plain data; offsets and sizes in bytes."""
    n = layout.rows
    return {
        "layout": layout.name,
        "dialect": layout.dialect,
        "source_type": layout.source_type.name,
        "block_length": layout.source_type.block_length,
        "block_bytes": layout.source_type.block_bytes,
        "rows_interleaved": n,
        "interleave": layout.interleave,
        "super_block_bytes": layout.super_block_bytes,
        "fields": [
            {
                "name": field.name,
                "target_offset": field.target_offset,
                "target_bytes": n * field.source_bytes,
                "source_offset": field.source_offset,
                "source_bytes_per_row": field.source_bytes,
                "rule": field.rule,
                "chunk_bytes": field.chunk if field.rule == "chunks" else None,
                "xor": field.xor,
                "chunk_order": None if field.order is None else list(field.order),
            }
            for field in layout.fields
        ],
    }


def layout_text(layout: Layout) -> RenderableType:
    """The layout as a table, with its rules in words."""
    n, size = layout.rows, layout.source_type.block_bytes
    head = facts(
        [
            ("layout", f"{layout.name} ({layout.dialect}, buffer type CPU_REPACK)"),
            ("source", f"{layout.source_type.name}: {layout.source_type.block_length} elements in {size} bytes"),
            ("super-block", f"{n} rows x {size} = {n * size} bytes; number g*nb + x holds column x of row group g"),
            ("eligible", f"ne1 a multiple of {n}"),
        ]
    )
    rows = []
    for field in layout.fields:
        end = field.target_offset + n * field.source_bytes - 1
        source = f"{field.source_offset}..{field.source_offset + field.source_bytes - 1}"
        rule = f"I({field.name},{field.source_bytes},{field.chunk})" if field.rule == "chunks" else field.rule
        if field.order is not None:
            rule += " in source order " + ",".join(map(str, field.order))
        if field.xor:
            rule += f" xor 0x{field.xor:02x}"
        rows.append((field.name, f"{field.target_offset}..{end}", source, rule))
    used = [rule for rule in RULES if any(field.rule == rule for field in layout.fields)]
    words = facts([(rule, RULES[rule]) for rule in used])
    return Group(head, "", table(None, ["field", "target bytes", "source bytes of each row", "rule"], rows), "", words)
