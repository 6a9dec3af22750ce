"""Kind gguf: what is asked about a file or a set of shards, how refimpl answers, how a parsed view is compared.

One question per stage that the entry judges (golden/README.md, "gguf").
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refimpl.conformance.schema import JsonObject
from refimpl.errors import RefimplError
from refimpl.gguf.cursor import cstr
from refimpl.gguf.header import Header, ValueType, check_data
from refimpl.gguf.source import open_header
from refimpl.gguf.values import KeyValue, LazyArray
from refimpl.model.checks import check_alignment, open_checked

STAGES = ("meta", "data", "load_mmap", "load_none")


def assembled(file: JsonObject) -> bytes:
    """The bytes of a file from its pieces: base64, or a pair [byte in hex, how often]. ValueError if they are wrong."""
    data = b"".join(
        base64.b64decode(piece, validate=True) if isinstance(piece, str) else bytes.fromhex(piece[0]) * piece[1]
        for piece in file["pieces"]
    )
    if len(data) != file["size"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ValueError("the pieces do not make the file that size and sha256 describe")
    return data


def stages(body: JsonObject) -> Iterator[tuple[JsonObject, JsonObject]]:
    """(input, expected output) for each stage of an entry. ValueError if it has no files or no results."""
    if not ("file" in body or {"files", "open"} <= body.keys()):
        raise ValueError("neither file, nor files with open")
    if not all("result" in want for want in body["want"].values()):
        raise ValueError("want has a stage without result")
    given: JsonObject = {}
    if "file" in body:
        given["data_b64"] = base64.b64encode(assembled(body["file"])).decode()
    else:
        given["files_b64"] = {name: base64.b64encode(assembled(file)).decode() for name, file in body["files"].items()}
        given["open"] = body["open"]
    given |= {key: body[key] for key in ("check_tensors", "open_relative_to_current_folder") if key in body}
    for stage in STAGES:
        if stage in body["want"]:
            expected = {key: value for key, value in body["want"][stage].items() if key in ("result", "code")}
            if expected["result"] == "accept" and "parsed" in body and stage in ("meta", "data"):
                expected["parsed"] = body["parsed"]
            yield {"stage": stage, **given}, expected


def answer(given: JsonObject) -> JsonObject:
    """What refimpl says: accepted with the parsed view, or rejected with a code."""
    try:
        if given["stage"] in ("meta", "data"):
            data = base64.b64decode(given["data_b64"], validate=True)
            with open_header(data, dialect="llama.cpp") as header:
                if given["stage"] == "data":
                    check_data(header, len(data))
                return {"result": "accept", "parsed": parsed(header)}
        _load(given)
    except RefimplError as error:
        return {"result": "reject", "code": error.code}
    return {"result": "accept"}


def _load(given: JsonObject) -> None:
    """The loader's checks on files in a fresh folder; nothing is loaded."""
    files = given.get("files_b64") or {"model.gguf": given["data_b64"]}
    opened = given.get("open", "model.gguf")
    with tempfile.TemporaryDirectory(prefix="refimpl-") as folder, contextlib.ExitStack() as stack:
        for name, data in files.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in a folder")
            (Path(folder) / name).write_bytes(base64.b64decode(data, validate=True))
        if given.get("open_relative_to_current_folder"):
            stack.enter_context(contextlib.chdir(folder))
        else:
            opened = f"{folder}/{opened}"
        header = stack.enter_context(open_checked(opened, any_shard=False))
        if given["stage"] == "load_mmap":
            check_alignment(header)
        if given.get("check_tensors"):
            from refimpl.gguf.validate import validate_model

            verdict = validate_model(header, dialect="llama.cpp", threads=1)
            if not verdict:
                raise verdict.error()


def parsed(header: Header) -> JsonObject:
    """The view of a header that the vectors have: names and strings as C strings, in hex."""
    return {
        "version": header.version,
        "alignment": header.alignment,
        "data_offset": header.data_start,
        "kv": [_pair(pair) for pair in header.kv.items_raw()],
        "tensors": [
            {
                "name_hex": cstr(tensor.raw_name).hex(),
                "type": tensor.type.id,
                "ne": list(tensor.ne),
                "offset": tensor.offset,
                "size": tensor.nbytes,
            }
            for tensor in header.tensors
        ],
    }


def _pair(pair: KeyValue) -> JsonObject:
    view: JsonObject = {"key_hex": cstr(pair.key).hex(), "type": pair.type.name.lower()}
    if isinstance(pair.value, LazyArray):
        view |= {"elem_type": pair.value.element_type.name.lower(), "n": len(pair.value)}
    elif pair.type is ValueType.STR:
        view["cstr_hex"] = pair.cstr.hex()
    elif pair.type not in (ValueType.F32, ValueType.F64):
        view["value"] = pair.value
    return view


def view_difference(found: Any, expected: Any, where: str) -> str | None:
    """The first difference of a parsed view; what the expected one does not have is not looked at."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return f"{where} is no object"
        if "key_prefix_hex" in expected:
            key = str(found.get("key_hex", ""))
            if not key.startswith(expected["key_prefix_hex"]) or len(key) != 2 * expected["key_length"]:
                return f"{where}.key_hex is not the long key"
            expected = {name: value for name, value in expected.items() if not name.startswith("key_")}
        for name, value in expected.items():
            if name not in found:
                return f"{where} has no {name}"
            reason = view_difference(found[name], value, f"{where}.{name}")
            if reason:
                return reason
        return None
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return f"{where} is not a list of {len(expected)}"
        inner = (view_difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
        return next((reason for reason in inner if reason), None)
    if isinstance(found, bool) == isinstance(expected, bool) and found == expected:
        return None
    return f"{where} is {str(found)[:100]!r}, expected {str(expected)[:100]!r}"
