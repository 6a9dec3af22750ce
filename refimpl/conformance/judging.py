"""How an answer is judged (golden/README.md, "Kinds").

An answer is compared in the keys that it has; each comparison gives the difference in one line, or None.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.conformance.containers import view_difference
from refimpl.conformance.needs import is_pair
from refimpl.conformance.report import one_line
from refimpl.conformance.schema import JsonObject


@dataclass(frozen=True, slots=True)
class Question:
    """One request. An answer is compared with `expected` in the keys that it has; of each tuple in `main` it must
    have one. `may_refuse`: an error is as good as the expected output, if it has the `code` that matters, if any.
    `optional`: "unsupported" does no harm.
    """

    op: str
    input: JsonObject
    expected: JsonObject
    main: tuple[tuple[str, ...], ...]
    may_refuse: bool = False
    optional: bool = False
    code: str | None = None


def judge(question: Question, answer: Mapping[str, Any]) -> str | None:
    """Why an answer (`output` or `error`) is wrong, in one line; None if it is right."""
    if "error" in answer:
        found = answer["error"]["code"]
        if question.may_refuse and question.code in (None, found):
            return None
        return f"error {one_line(found)} in place of {question.code or 'an output'}"
    output = answer["output"]
    for alternatives in question.main:
        if not any(key in output for key in alternatives):
            return f"the answer has no {' or '.join(alternatives)}"
    for key, expected in question.expected.items():
        if key in output:
            reason = _COMPARE.get(key, difference)(output[key], expected, key)
            if reason:
                return one_line(reason)
    return None


def difference(found: Any, expected: Any, where: str) -> str | None:
    """The first difference of two JSON values. true is not 1 here, but 2.0 is 2."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if key not in found or key not in expected:
                return f"{where} has {'no' if key not in found else 'an unexpected'} {key}"
        inner = (difference(found[key], expected[key], f"{where}.{key}") for key in expected)
        return next((reason for reason in inner if reason), None)
    if isinstance(found, bool) == isinstance(expected, bool) and found == expected:
        return None
    return f"{where} is {_shown(found)}, expected {_shown(expected)}"


def _shown(value: Any) -> str:
    return one_line(json.dumps(value), 160)


def _bytes_difference(found: Any, expected: Any, where: str) -> str | None:
    """Base64 compared by the hash of its bytes."""
    if expected is None or not isinstance(found, str):
        return difference(found, expected, where)
    try:
        digest = hashlib.sha256(base64.b64decode(found, validate=True)).hexdigest()
    except (binascii.Error, ValueError):
        return f"{where} is not base64"
    return difference(digest, expected, f"sha256 of {where}")


def _pairs_difference(found: Any, expected: list[list[str]], where: str) -> str | None:
    """[name, layout] pairs in any order."""
    if not isinstance(found, list) or not all(is_pair(pair) for pair in found):
        return f"{where} is not a list of [name, layout]"
    if sorted(found) == sorted(expected):
        return None
    missing = [pair for pair in expected if pair not in found]
    extra = [pair for pair in found if pair not in expected]
    return (
        f"{where} lacks {_shown(missing)}, has too much {_shown(extra)}"
        if missing or extra
        else f"{where} repeats a tensor"
    )


def _mib_difference(found: Any, expected: dict[str, float], where: str) -> str | None:
    """Sizes in MiB, compared as the real program prints them: with two decimals."""
    if isinstance(found, dict):
        found = {key: round(v, 2) if isinstance(v, float) else v for key, v in found.items()}
    return difference(found, expected, where)


def _files_difference(found: Any, expected: list[JsonObject], where: str) -> str | None:
    """Files by name, size and hash; what else is said of them is compared where the answer has it."""
    if not isinstance(found, list) or len(found) != len(expected):
        return f"{where}: {_shown(found)[:80]}, expected {len(expected)} files"
    for got, want in zip(found, expected, strict=True):
        if not isinstance(got, dict):
            return f"{where} is not a list of files"
        for key in ("file", "bytes", "sha256"):
            if got.get(key) != want[key]:
                return f"{where}: {want['file']}: {key} is {_shown(got.get(key))}, expected {_shown(want[key])}"
    return None


_COMPARE: dict[str, Callable[[Any, Any, str], str | None]] = {
    "dst_b64": _bytes_difference,
    "src_b64": _bytes_difference,
    "cpu_repack": _pairs_difference,
    "buffer_mib": _mib_difference,
    "outputs": _files_difference,
    "parsed": view_difference,
}
