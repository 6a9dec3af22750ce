"""What a header says, as data and as text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType

from refimpl.errors import RefimplError
from refimpl.gguf.cursor import shown
from refimpl.gguf.header import Header
from refimpl.gguf.values import LazyArray
from refimpl.model.architectures import layer_of
from refimpl.model.checks import FileChecks, model_findings
from refimpl.placement.llama import place_header
from refimpl.render.text import facts, table
from refimpl.repacking.ik import refusal as ik_refusal
from refimpl.repacking.llama import CpuFeatures
from refimpl.types import DIALECTS, UnknownType
from refimpl.units import human

_SIZES = {
    "layers": "block_count", "context": "context_length", "embedding": "embedding_length",
    "feed forward": "feed_forward_length", "heads": "attention.head_count", "KV heads": "attention.head_count_kv",
    "experts": "expert_count", "experts used": "expert_used_count", "vocabulary": "vocab_size",
}  # fmt: skip
MOST = 10
"""Findings of one sort that are listed."""
SHOWN = 6
"""Elements of an array, and characters of a long string times ten, that are shown."""

TYPE_COLUMNS = ["type", ">tensors", ">bytes", ">MiB"]


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
        ik_reason = ik_refusal(tensor.name, tensor.type, tensor.shape or (1,), bf16=cpu.avx512_bf16)
        tensors.append(
            {
                "name": tensor.name,
                "type": tensor.type.name,
                "shape": list(tensor.shape),
                "offset": tensor.absolute_offset,
                "shard": tensor.shard,
                "bytes": tensor.nbytes,
                "op": row.op if row else None,
                "llama.cpp": None if row is None else {
                    "layout": row.layout.name if row.layout else None,
                    "reason": row.reason,
                    "certainty": row.certainty,
                },
                "ik_llama.cpp": {
                    "layout": None if ik_reason else getattr(tensor.type, "interleaved_as", None),
                    "reason": ik_reason or "repacked by -rtr and by refimpl repack",
                },
            }
        )  # fmt: skip
    return {
        "model": model,
        "hyperparameters": _hyperparameters(header),
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
        "layers": _layers(header),
        "shards": [
            {"path": shard.path, "bytes": shard.size, "data_start": shard.data_start, "tensors": len(part.infos)}
            for shard, part in zip(header.shards, header.tensors.parts, strict=True)
        ],
        "anomalies": _anomalies(header),
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


def _hyperparameters(header: Header) -> dict[str, Any]:
    """The usual sizes, as far as the keys have them."""
    prefix = header.architecture
    values = {name: header.kv.get(f"{prefix}.{key}") for name, key in _SIZES.items()} if prefix else {}
    tokens = header.kv.get("tokenizer.ggml.tokens")
    if isinstance(tokens, LazyArray):
        values["vocabulary"] = len(tokens)
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _layers(header: Header) -> list[dict[str, Any]]:
    """Tensors and bytes of each layer; what belongs to none comes first, as layer null."""
    sums: dict[int | None, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in header.tensors:
        row = sums[layer_of(tensor.name)]
        row[0] += 1
        row[1] += tensor.nbytes or 0
    order = sorted(sums, key=lambda layer: -1 if layer is None else layer)
    return [{"layer": layer, "tensors": sums[layer][0], "bytes": sums[layer][1]} for layer in order]


def _anomalies(header: Header) -> list[str]:
    """What is not as in most files, and what the model loader has against it."""
    found = []
    for number, shard in enumerate(header.shards):
        where = f"file {number + 1}: " if len(header.shards) > 1 else ""
        end, size = shard.data_start + shard.data_bytes, shard.size
        if shard.version != 3:
            found.append(f"{where}container version {shard.version}")
        if shard.alignment != 32:
            found.append(f"{where}alignment {shard.alignment}")
        if size > end:
            found.append(f"{where}{size - end} bytes behind the data")
        elif size < end:
            found.append(f"{where}the file ends at byte {size}, the data with their padding at {end}")
    count = header.kv.get("split.count")
    if isinstance(count, int) and count > 1 and len(header.shards) == 1:
        found.append(f"one file of {count}; the others are not looked at")
    found += [f"{tensor.name}: type {tensor.type.id}, which nobody knows" for tensor in header.tensors
              if isinstance(tensor.type, UnknownType)][:MOST]  # fmt: skip
    names = [pair.key for pair in header.kv.items_raw()] + [tensor.raw_name for tensor in header.tensors]
    odd = [name for name in names if b"\0" in name or not shown(name).isprintable() or "\ufffd" in shown(name)]
    found += [f"odd name {name[:60]!r}" for name in odd[:MOST]]
    checks = FileChecks()
    against = [*checks.findings(header)] if len(header.shards) == 1 else []
    against += model_findings(header)
    found += [f"the loader refuses it: {error.code}: {error.text}" for error in against[:MOST]]
    if len(against) > MOST:
        found.append(f"{len(against) - MOST} more findings (refimpl check lists them)")
    return found


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
            ("parameters", f"{data['parameters'] / 1e9:.2f} billion"),
            *((name, _short(value)) for name, value in data["hyperparameters"].items()),
        ]
    )
    parts: list[RenderableType] = [
        head,
        "",
        table("key-values", ["key", "value"], [(key, _short(value)) for key, value in data["kv"].items()]),
        "",
        table("bytes per type", [*TYPE_COLUMNS, f"CPU_REPACK on {data['cpu']}", "-rtr"], _types(data)),
    ]
    parts += [
        "",
        table("bytes per layer", ["layers", ">tensors each", ">bytes each", ">MiB in all"], _layer_rows(data)),
    ]
    if len(data["shards"]) > 1:
        files = [(shard["path"], shard["tensors"], shard["bytes"], shard["data_start"]) for shard in data["shards"]]
        parts += ["", table("files", ["path", ">tensors", ">bytes", ">data start"], files)]
    parts += ["", *(f"note: {text}" for text in data["anomalies"])] if data["anomalies"] else []
    if data["placement_refused"]:
        parts += [
            "",
            f"the loader refuses this model: {data['placement_refused']['code']}: {data['placement_refused']['text']}",
        ]
    if data["held_twice"]:
        parts += ["", f"held twice (rows and interleaved): {', '.join(data['held_twice'])}"]
    if all_tensors:
        rows = [
            (
                *(t["name"], t["type"], "x".join(map(str, t["shape"])), t["offset"], t["bytes"], t["op"] or "-"),
                *(_place(t, dialect) for dialect in DIALECTS),
            )
            for t in data["tensors"]
        ]
        columns = ["name", "type", "shape", ">offset", ">bytes", "op", "CPU_REPACK", "-rtr"]
        parts += ["", table("tensors", columns, rows)]
    return Group(*parts)


def _layer_rows(data: dict[str, Any]) -> list[tuple[object, ...]]:
    """Neighbouring layers of the same size on one line."""
    lines: list[tuple[object, ...]] = []
    same = groupby(data["layers"], lambda row: (row["layer"] is None, row["tensors"], row["bytes"]))
    for (none, tensors, nbytes), rows in same:
        numbers = [row["layer"] for row in rows]
        name = "no layer" if none else f"{numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        lines.append((name, tensors, nbytes, f"{nbytes * len(numbers) / 2**20:.2f}"))
    return lines


def _types(data: dict[str, Any]) -> list[tuple[object, ...]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for tensor in data["tensors"]:
        groups[tensor["type"]].append(tensor)
    lines: list[tuple[object, ...]] = []
    for name, tensors in sorted(groups.items(), key=lambda item: -sum(t["bytes"] or 0 for t in item[1])):
        total = sum(t["bytes"] or 0 for t in tensors)
        repacked = [_counted(tensors, dialect) for dialect in DIALECTS]
        lines.append((name, len(tensors), total, f"{total / 2**20:.2f}", *repacked))
    return lines


def _counted(tensors: list[dict[str, Any]], dialect: str) -> str:
    """How many of these tensors a dialect repacks into what."""
    layouts = Counter((tensor[dialect] or {}).get("layout") or "" for tensor in tensors)
    return ", ".join(f"{count} as {layout}" for layout, count in sorted(layouts.items()) if layout) or "none"


def _place(tensor: dict[str, Any], dialect: str) -> str:
    row = tensor[dialect]
    if row is None:
        return "-"
    mark = "" if row.get("certainty", "exact") == "exact" else f" ({row['certainty']})"
    return (row["layout"] or f"no: {row['reason']}") + mark


def _short(value: Any) -> str:
    if isinstance(value, dict):
        more = ", ..." if value["count"] > SHOWN else ""
        return f"{value['array']} x {value['count']}: [{', '.join(map(repr, value['first']))}{more}]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 10 * SHOWN else f"{text[: 10 * SHOWN]}... ({len(value)} characters)"
