"""What a header says, as data and as text."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from rich.console import Group, RenderableType

from refimpl.errors import RefimplError
from refimpl.gguf.header import Header
from refimpl.gguf.values import LazyArray
from refimpl.placement.llama import place_header
from refimpl.render.text import facts, table
from refimpl.repacking.llama import CpuFeatures
from refimpl.units import human

SHOWN = 6
"""Elements of an array, and characters of a long string times ten, that are shown."""


def inspection(header: Header, model: str, cpu: CpuFeatures, cpu_name: str) -> dict[str, Any]:
    """The header as plain data: key-values (arrays by length and first elements), tensors, and their repackability."""
    try:
        rows = {row.key: row for row in place_header(header.kv, header.tensors, cpu=cpu).rows}
        refusal = None
    except RefimplError as error:  # a header that no loader takes can still be looked at
        rows, refusal = {}, {"code": error.code, "text": error.text}
    tensors = []
    for tensor in header.tensors:
        row = rows.get(tensor.name)
        tensors.append(
            {
                "name": tensor.name,
                "type": tensor.type.name,
                "shape": list(tensor.shape),
                "offset": tensor.absolute_offset,
                "bytes": tensor.nbytes,
                "op": row.op if row else None,
                "llama.cpp": None if row is None else {
                    "layout": row.layout.name if row.layout else None,
                    "reason": row.reason,
                    "certainty": row.certainty,
                },
            }
        )  # fmt: skip
    return {
        "model": model,
        "version": header.version,
        "architecture": header.architecture,
        "alignment": header.alignment,
        "data_start": header.data_start,
        "file_bytes": header.size,
        "tensor_bytes": sum(tensor.nbytes or 0 for tensor in header.tensors),
        "cpu": cpu_name,
        "placement_refused": refusal,
        "held_twice": [row.name for row in rows.values() if row.copy],
        "kv": {key: _plain(value) for key, value in header.kv.items()},
        "tensors": tensors,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, LazyArray):
        return {
            "array": value.element_type.name.lower(),
            "count": len(value),
            "first": [_plain(item) for item in value[:SHOWN]],
        }
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return value


def inspection_text(data: dict[str, Any], *, all_tensors: bool) -> RenderableType:
    """Hyperparameters, bytes per type, repackability; every tensor on request."""
    head = facts(
        [
            ("model", data["model"]),
            ("architecture", data["architecture"] or "-"),
            ("GGUF version", data["version"]),
            ("tensors", f"{len(data['tensors'])}, {human(data['tensor_bytes'])} from byte {data['data_start']}"),
            ("alignment", data["alignment"]),
        ]
    )
    parts: list[RenderableType] = [
        head,
        "",
        table("key-values", ["key", "value"], [(key, _short(value)) for key, value in data["kv"].items()]),
        "",
        table("bytes per type", ["type", ">tensors", ">bytes", ">MiB", f"CPU_REPACK on {data['cpu']}"], _types(data)),
    ]
    if data["placement_refused"]:
        parts += [
            "",
            f"the loader refuses this model: {data['placement_refused']['code']}: {data['placement_refused']['text']}",
        ]
    if data["held_twice"]:
        parts += ["", f"held twice (rows and interleaved): {', '.join(data['held_twice'])}"]
    if all_tensors:
        rows = [
            (t["name"], t["type"], "x".join(map(str, t["shape"])), t["offset"], t["bytes"], t["op"] or "-", _place(t))
            for t in data["tensors"]
        ]
        parts += ["", table("tensors", ["name", "type", "shape", ">offset", ">bytes", "op", "CPU_REPACK"], rows)]
    return Group(*parts)


def _types(data: dict[str, Any]) -> list[tuple[object, ...]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for tensor in data["tensors"]:
        groups[tensor["type"]].append(tensor)
    lines: list[tuple[object, ...]] = []
    for name, tensors in sorted(groups.items(), key=lambda item: -sum(t["bytes"] or 0 for t in item[1])):
        total = sum(t["bytes"] or 0 for t in tensors)
        layouts: dict[str, int] = defaultdict(int)
        for t in tensors:
            layouts[(t["llama.cpp"] or {}).get("layout") or ""] += 1
        text = ", ".join(f"{count} as {layout}" for layout, count in sorted(layouts.items()) if layout) or "none"
        lines.append((name, len(tensors), total, f"{total / 2**20:.2f}", text))
    return lines


def _place(tensor: dict[str, Any]) -> str:
    row = tensor["llama.cpp"]
    if row is None:
        return "-"
    mark = "" if row["certainty"] == "exact" else f" ({row['certainty']})"
    return (row["layout"] or f"no: {row['reason']}") + mark


def _short(value: Any) -> str:
    if isinstance(value, dict):
        more = ", ..." if value["count"] > SHOWN else ""
        return f"{value['array']} x {value['count']}: [{', '.join(map(repr, value['first']))}{more}]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 10 * SHOWN else f"{text[: 10 * SHOWN]}... ({len(value)} characters)"
