"""Vectors files of schema refimpl-golden/1: reading one, its envelope, and what counts as an entry.

Every kind of the schema is listed here, also those that nothing runs yet, so that their entries can be counted and
reported as skipped (golden/README.md, "Files").
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from refimpl.errors import MachineError, VectorError

SCHEMA = "refimpl-golden/1"
ENVELOPE = ("schema", "kind", "dialect", "source")
DIALECT_NAMES = ("llama.cpp", "ik_llama.cpp", "policy", "both")
SIZE_LIMIT = 1 << 30
"""A vectors file is read whole; one beyond this size, unpacked, is refused instead of filling the memory."""

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Where the entries of a kind are: keys of lists, keys of dictionaries of lists, keys of single entries."""

    lists: tuple[str, ...] = ("cases",)
    groups: tuple[str, ...] = ()
    singles: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "repack": Kind(),
    "repack-dispatch": Kind(("cases", "op_cases")),
    "repack-placement": Kind(),
    "offline-repack": Kind(),
    "validate": Kind(),
    "gguf": Kind(),
    "rtr": Kind(),
    "rtr-regex": Kind(),
    "available-memory": Kind(),
    "placement": Kind((), groups=("models",)),
    "fit": Kind((), groups=("models",)),  # by run; the measurements of a run are a unit of their own
    "graph": Kind(("graphs",)),
    "layer-sizes": Kind(),
    "rtr-counts": Kind(("runs",)),
    "rpc": Kind(("sessions",), singles=("fnv1a64", "tensor_struct", "hello_replies", "reference_upload")),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One counted entry: its id (given or made up from its place), the key of its container, and its own object."""

    id: str
    container: str
    body: Any


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vectors file whose envelope is sound. `name` is how it was asked for, `document` all of it."""

    name: str
    kind: str
    dialect: str
    document: JsonObject
    entries: tuple[Entry, ...]


def load_vectors(path: str | os.PathLike[str]) -> Vectors:
    """Read a vectors file, plain or gzip, from anywhere.

    Raises
    ------
    VectorError
        E_OPEN: nothing there, or a folder. E_VECTORS: not JSON, or not of this schema.
    MachineError
        E_IO: no permission, or an input error.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as stream:
            raw = stream.read(SIZE_LIMIT + 1)
    except ValueError as error:  # a NUL in the path
        raise VectorError("E_OPEN", f"{name!r}: {error}", path=name) from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise MachineError("E_IO", f"{name}: {error.strerror}", path=name) from error
        raise VectorError("E_OPEN", f"{name}: {error.strerror}", path=name) from error
    return parse_vectors(raw, name)


def packaged_vectors(kinds: Iterable[str] | None = None) -> Iterator[Vectors]:
    """The vectors files that come with the package, in the order of golden/index.json; `kinds` leaves out others."""
    root = resources.files("refimpl.golden")
    wanted = None if kinds is None else set(kinds)
    for row in json.loads(root.joinpath("index.json").read_text("utf-8"))["files"]:
        if wanted is None or row["kind"] in wanted:
            yield parse_vectors(root.joinpath(*row["path"].split("/")).read_bytes(), row["path"])


def unpacked(raw: bytes, name: str) -> bytes:
    """The JSON text of a vectors file, which may be gzip. VectorError E_VECTORS if it is damaged or too large."""
    if raw[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
                raw = stream.read(SIZE_LIMIT + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise VectorError("E_VECTORS", f"{name}: damaged gzip data ({error})", path=name) from error
    if len(raw) > SIZE_LIMIT:
        raise VectorError("E_VECTORS", f"{name}: more than {SIZE_LIMIT} bytes", path=name)
    return raw


def parse_vectors(raw: bytes, name: str) -> Vectors:
    """A vectors file from its bytes: envelope checked, entries listed. VectorError E_VECTORS otherwise."""
    text = unpacked(raw, name)
    try:
        document = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError as error:
        raise VectorError("E_VECTORS", f"{name}: nested too deeply", path=name) from error
    except ValueError as error:
        raise VectorError("E_VECTORS", f"{name}: not JSON in UTF-8 ({error})", path=name) from error
    problem = _envelope_problem(document)
    if problem:
        raise VectorError("E_VECTORS", f"{name}: {problem}", path=name)
    stem = file_stem(name)
    try:
        entries = tuple(_entries(document, stem))
    except ValueError as error:
        raise VectorError("E_VECTORS", f"{name}: {error}", path=name) from error
    return Vectors(name, document["kind"], document["dialect"], document, entries)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _envelope_problem(document: Any) -> str | None:
    if not isinstance(document, dict):
        return "the top level is not an object"
    missing = [key for key in ENVELOPE if key not in document]
    if missing:
        return f"no {', '.join(missing)} in the envelope"
    if document["schema"] != SCHEMA:
        return f"schema is {document['schema']!r}, not {SCHEMA!r}"
    for key in ("kind", "dialect"):
        if not isinstance(document[key], str):
            return f"{key} is not a string"
    if not isinstance(document["source"], (dict, list)):
        return "source is neither an object nor a list of objects"
    return None


def file_stem(name: str) -> str:
    """The name of a file without its folder and without .gz and .json; ids of unnamed entries begin with it.

    >>> file_stem("golden/placement/placement-llama.json.gz")
    'placement-llama'
    """
    return Path(name).name.removesuffix(".gz").removesuffix(".json")


def _entries(document: JsonObject, stem: str) -> Iterator[Entry]:
    kind = KINDS.get(document["kind"])
    if kind is None:  # a kind of a later version of the schema: counted if it looks like the others
        usual = document.get("cases")
        bodies = usual if isinstance(usual, list) else [document]
        yield from (Entry(_label(body, stem, "cases", i), "cases", body) for i, body in enumerate(bodies))
        return
    known = [key for key in (*kind.lists, *kind.groups, *kind.singles) if key in document]
    if not known:
        raise ValueError(f"no {' or '.join((*kind.lists, *kind.groups))} in a file of kind {document['kind']}")
    for key in known:
        if key in kind.singles:
            yield Entry(f"{stem}/{key}/0", key, document[key])
        elif key in kind.groups:
            if not isinstance(document[key], dict):
                raise ValueError(f"{key} is not an object of lists")
            for group, bodies in document[key].items():
                yield from _listed(bodies, stem, key, group)
        else:
            yield from _listed(document[key], stem, key, key)


def _listed(bodies: Any, stem: str, container: str, key: str) -> Iterator[Entry]:
    if not isinstance(bodies, list):
        raise ValueError(f"{key} is not a list")
    for i, body in enumerate(bodies):
        if not isinstance(body, dict):
            raise ValueError(f"entry {i} of {key} is not an object")
        yield Entry(_label(body, stem, key, i), container, body)


def _label(body: Any, stem: str, key: str, index: int) -> str:
    given = body.get("id") if isinstance(body, dict) else None
    if isinstance(given, (str, int)) and not isinstance(given, bool):
        return str(given)
    return f"{stem}/{key}/{index}"
