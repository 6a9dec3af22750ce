"""A repack layout for people and programs: fields, offsets, rules, and the way of each bit."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from refimpl.layouts import IkLayout, Layout, LlamaLayout
from refimpl.layouts.llama import RULES
from refimpl.render.text import facts, table
from refimpl.repacking.bitmap import BitMap, bit_map

WORDS = {
    "bf16": "16-bit values by pairs of columns: target value 32*p + 2*k + e is row k, column 2p + e",
    "f16": "as bf16, each value widened to f32 first and cut to its upper 16 bits",
    "q8_K": "d[8] as f16, then the quants in chunks of 4 bytes; sums are dropped, groups keep their place",
    "q8_KV": "the rows' f32 scales, then all quants of 8 rows in chunks of 4 bytes; groups keep their place",
}


def layout_data(layout: Layout) -> dict[str, Any]:
    """The layout as plain data; offsets and sizes in bytes, bits of a block numbered from its lowest."""
    kind = layout.source_type
    data: dict[str, Any] = {
        "layout": layout.name,
        "dialect": layout.dialect,
        "source_type": kind.name,
        "block_length": kind.block_length,
        "block_bytes": kind.block_bytes,
        "row_meta_bytes": kind.row_meta_bytes,
        "rows_interleaved": layout.rows,
        "super_block_bytes": layout.super_block_bytes,
        "fields": layout_fields(layout),
    }
    if isinstance(layout, LlamaLayout):
        data["interleave"] = layout.interleave
    elif isinstance(layout, IkLayout) and layout.whole != "bits":
        data["rule"] = WORDS[layout.whole]
        return data
    bits = bit_map(layout)
    return data | {
        "source_of_target_bit": [list(source) for source in bits.sources],
        "inverted_bits": sorted(bits.inverted),
        "prefix_parity_bytes": sorted(bits.prefix_bytes),
    }


def layout_fields(layout: Layout) -> list[dict[str, Any]]:
    """The fields of a super-block in order of their place."""
    if isinstance(layout, LlamaLayout):
        return [
            {
                "name": field.name,
                "target_offset": field.target_offset,
                "target_bytes": layout.rows * field.source_bytes,
                "source_offset": field.source_offset,
                "source_bytes_per_row": field.source_bytes,
                "rule": _llama_rule(field.name, field),
            }
            for field in layout.fields
        ]
    assert isinstance(layout, IkLayout)
    fields = []
    for part in layout.parts:
        places = [(t, b) for t in range(part.count) for b in range(part.bits)]
        source = [part.source(t, b)[0] for t, b in places]
        target = [part.target(k, t, b)[0] for k in range(layout.rows) for t, b in places]
        rule = f"{part.count} value{'s' * (part.count > 1)} of {part.bits} bit{'s' * (part.bits > 1)}"
        fields.append(
            {
                "name": part.name,
                "target_offset": min(target),
                "target_bytes": len(set(target)),
                "source_offset": min(source),
                "source_bytes_per_row": len(set(source)),
                "rule": rule + ", as prefix parities (sign codes)" * part.sign_codes,
            }
        )
    return sorted(fields, key=lambda field: field["target_offset"])


def _llama_rule(name: str, field: Any) -> str:
    rule: str = field.rule
    if rule == "chunks":
        rule = f"I({name},{field.source_bytes},{field.chunk})"
    if field.order is not None:
        rule += " in source order " + ",".join(map(str, field.order))
    return rule + (f" xor 0x{field.xor:02x}" if field.xor else "")


def layout_text(layout: Layout) -> RenderableType:
    """The layout as a table, with its rules in words."""
    kind, n = layout.source_type, layout.rows
    head = [
        ("layout", f"{layout.name} ({layout.dialect})"),
        ("source", f"{kind.name}: {kind.block_length} elements in {kind.block_bytes} bytes"),
        ("super-block", f"{n} rows x {kind.block_bytes} = {layout.super_block_bytes} bytes, one per block column"),
        ("eligible", f"ne1 a multiple of {n}"),
    ]
    if kind.row_meta_bytes:
        head.append(("row metadata", f"{kind.row_meta_bytes} bytes per row, before the first super-block of a group"))
    if isinstance(layout, IkLayout) and layout.whole != "bits":
        return Group(facts([*head, ("rule", WORDS[layout.whole])]))
    rows = []
    for field in layout_fields(layout):
        target = f"{field['target_offset']}..{field['target_offset'] + field['target_bytes'] - 1}"
        source = f"{field['source_offset']}..{field['source_offset'] + field['source_bytes_per_row'] - 1}"
        rows.append((field["name"], target, source, field["rule"]))
    parts: list[RenderableType] = [facts(head), ""]
    parts += [table(None, ["field", "target bytes", "source bytes of each row", "rule"], rows)]
    if isinstance(layout, LlamaLayout):
        used = [rule for rule in RULES if any(field.rule == rule for field in layout.fields)]
        parts += ["", facts([(rule, RULES[rule]) for rule in used])]
    return Group(*parts)


def find_data(layout: Layout, byte: int, bit: int | None) -> dict[str, Any]:
    """Where the bits of a target byte come from, and where those of a source byte go (for the bytes that exist)."""
    bits, found = bit_map(layout), {}
    wanted = range(8) if bit is None else [bit]
    if byte < layout.super_block_bytes:
        found["target"] = [_origin(bits, 8 * byte + i, i) for i in wanted]
    if byte < layout.source_type.block_bytes:
        found["source"] = [
            {"bit": i, "row": row, "target_byte": target // 8, "target_bit": target % 8}
            for i in wanted
            for row, target in bits.targets(8 * byte + i)
        ]
    return {"layout": layout.name, "byte": byte, **found}


def _origin(bits: BitMap, target: int, bit: int) -> dict[str, Any]:
    row, source = bits.sources[target]
    return {
        "bit": bit,
        "row": row,
        "source_byte": source // 8,
        "source_bit": source % 8,
        "inverted": target in bits.inverted,
        "prefix_parity": target // 8 in bits.prefix_bytes and bit > 0,
    }


def find_text(data: dict[str, Any]) -> RenderableType:
    """The same in two tables."""
    parts: list[RenderableType] = []
    if "target" in data:
        rows = [
            (x["bit"], x["row"], x["source_byte"], x["source_bit"],
             "inverted" * x["inverted"] + "prefix parity up to here" * x["prefix_parity"])
            for x in data["target"]
        ]  # fmt: skip
        title = f"byte {data['byte']} of a super-block comes from"
        parts.append(table(title, [">bit", ">row", ">source byte", ">bit of it", ""], rows))
    if "source" in data:
        goes = [(x["bit"], x["row"], x["target_byte"], x["target_bit"]) for x in data["source"]]
        title = f"byte {data['byte']} of a source block goes to"
        parts += [""] * bool(parts)
        parts.append(table(title, [">bit", ">row", ">target byte", ">bit of it"], goes))
    return Group(*parts)
