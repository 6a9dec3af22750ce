"""What `refimpl check` found, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from refimpl.errors import RefimplError
from refimpl.gguf.header import Header
from refimpl.gguf.validate import ModelVerdict
from refimpl.gguf.validate_rules import Function, Mode
from refimpl.types import Dialect
from refimpl.units import human

Results = Mapping[Function, ModelVerdict]


def check_data(
    header: Header | None, model: str, dialect: Dialect, found: Sequence[RefimplError], mode: Mode, results: Results
) -> dict[str, Any]:
    """Plain data: whose rules were used, what was looked at, and every finding with its code."""
    return {
        "model": model,
        "dialect": dialect,
        "mode": mode,
        "tensors": None if header is None else len(header.tensors),
        "looked_at": {
            function: {"tensors": found.tensors, "bytes": found.nbytes} for function, found in results.items()
        },
        "findings": [
            {**{key: _plain(value) for key, value in error.fields.items()}, "code": error.code, "text": error.text}
            for error in found
        ]
        + [
            {"code": "E_TENSOR_DATA", "tensor": bad.name, "text": bad.verdict.text, **bad.verdict.to_json()}
            for verdict in results.values()
            for bad in verdict.bad
        ],
    }


def check_text(
    header: Header | None, dialect: Dialect, found: Sequence[RefimplError], mode: Mode, results: Results
) -> str:
    """A line per finding, and one for each thing that was asked."""
    lines = [f"{error.code}: {_printable(error.text)}" for error in found]
    if header is not None and not found:
        lines = [f"container: good ({dialect}), {len(header.tensors)} tensors"]
    for function, verdict in results.items():
        rule = f"{dialect}, {function}" + (", corrected" if mode == "correct" else "")
        lines.append(f"data: {len(verdict.bad)} bad of {verdict.tensors} tensors, {human(verdict.nbytes)} ({rule})")
        lines += [f"E_TENSOR_DATA: {_printable(bad.name)}: {bad.verdict.text}" for bad in verdict.bad]
    return "\n".join(lines)


def _plain(value: object) -> object:
    """A field of an error as JSON has it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, IntEnum):
        return value.name.lower()
    return list(value) if isinstance(value, tuple) else value


def _printable(name: str) -> str:
    """A name out of a file, without what a terminal could take for a command."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
