"""What `refimpl check` found, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refimpl.gguf.header import Header
from refimpl.gguf.validate import ModelVerdict
from refimpl.gguf.validate_rules import Function, Mode
from refimpl.types import Dialect
from refimpl.units import human

Results = Mapping[Function, ModelVerdict]


def check_data(header: Header, model: str, dialect: Dialect, mode: Mode, results: Results) -> dict[str, Any]:
    """Plain data: whose rules were used, what was looked at, and every finding with its code."""
    return {
        "model": model,
        "dialect": dialect,
        "mode": mode,
        "tensors": len(header.tensors),
        "looked_at": {
            function: {"tensors": found.tensors, "bytes": found.nbytes} for function, found in results.items()
        },
        "findings": [
            {"code": "E_TENSOR_DATA", "tensor": bad.name, "text": bad.verdict.text, **bad.verdict.to_json()}
            for found in results.values()
            for bad in found.bad
        ],
    }


def check_text(header: Header, dialect: Dialect, mode: Mode, results: Results) -> str:
    """A line per finding, and one for each thing that was asked."""
    lines = [f"container: good ({dialect}), {len(header.tensors)} tensors"]
    for function, found in results.items():
        rule = f"{dialect}, {function}" + (", corrected" if mode == "correct" else "")
        lines.append(f"data: {len(found.bad)} bad of {found.tensors} tensors, {human(found.nbytes)} ({rule})")
        lines += [f"E_TENSOR_DATA: {_printable(bad.name)}: {bad.verdict.text}" for bad in found.bad]
    return "\n".join(lines)


def _printable(name: str) -> str:
    """A name out of a file, without what a terminal could take for a command."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
