"""Small vectors files for tests of the conformance runner, cut from the packaged ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from refimpl.conformance.report import Report
from refimpl.conformance.schema import Vectors, packaged_vectors

ENVELOPE = {"schema": "refimpl-golden/1", "dialect": "llama.cpp", "source": {"project": "x", "commit": "y"}}
Write = Callable[..., Path]


@cache
def packaged(kind: str) -> Vectors:
    """The packaged file of a kind; of kind repack the one of llama.cpp."""
    file, *_ = (file for file in packaged_vectors([kind]) if kind != "repack" or file.dialect == "llama.cpp")
    return file


def document(kind: str, *ids: str) -> dict[str, Any]:
    """A copy of a packaged file with these entries only."""
    file = packaged(kind)
    chosen = dict(file.document)
    for key in {entry.container for entry in file.entries}:
        chosen[key] = [body for body in chosen[key] if body["id"] in ids]
    return deepcopy(chosen)


def counts(report: Report) -> tuple[int, int, int]:
    """(passed, failed, skipped)."""
    return report.passed, report.failed, report.skipped
