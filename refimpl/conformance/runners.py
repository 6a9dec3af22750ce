"""How refimpl itself answers: one function per kind and operation (golden/README.md, "Kinds").

Inputs and outputs are those of the protocol, so refimpl is judged by the same questions as any other program.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from refimpl.conformance import containers
from refimpl.conformance.schema import JsonObject
from refimpl.errors import LayoutError, ModelError
from refimpl.gguf.packaged import packaged_model
from refimpl.gguf.validate import validate_row_data, validate_tensor
from refimpl.gguf.validate_rules import ROW_DATA
from refimpl.placement.llama import TensorSpec, place
from refimpl.repacking.ik import layout_for as layout_for_ik
from refimpl.repacking.llama import CpuFeatures, layout_for, refusal
from refimpl.repacking.offline import offline_repack
from refimpl.repacking.tensor import Version, repack, unpack
from refimpl.types import type_by_id, type_by_name
from refimpl.units import mib

VERSIONS: dict[str, tuple[Version, ...]] = {"repack": ("clear", "fast"), "validate": ("clear", "fast")}
"""The kinds of which both versions are judged, each with a result of its own."""

_UNTOUCHED = 0xA5


class Unsupported(Exception):
    """The input asks for something that is not built; the text says what."""


def answer(kind: str, op: str, given: JsonObject, version: Version = "fast") -> JsonObject:
    """The output of refimpl for one request.

    Raises
    ------
    Unsupported
        Not built.
    RefimplError
        What refimpl refuses, except an ineligible repack, which is an output.
    """
    run = _ANSWERS.get((kind, op))
    if run is None:
        raise Unsupported(f"operation {op} of kind {kind} is not built yet")
    return run(given, version)


def _repack(given: JsonObject, version: Version) -> JsonObject:
    """A refusal must leave the destination as it was, so it is filled beforehand and looked at afterwards."""
    data = base64.b64decode(given["data_b64"], validate=True)
    if "layout" not in given:
        return _repack_ik(data, given, version)
    out = np.full(len(data), _UNTOUCHED, np.uint8)
    try:
        repack(data, given["src_type"], given["layout"], given["ne"], out, version=version)
    except LayoutError as error:
        if (out != _UNTOUCHED).any():
            raise AssertionError(f"the destination was written, and then: {error}") from error
        return {"eligible": False, "dst_sha256": None}
    return {"eligible": True, "dst_nbytes": out.nbytes, "dst_sha256": hashlib.sha256(out.tobytes()).hexdigest()}


def _repack_ik(data: bytes, given: JsonObject, version: Version) -> JsonObject:
    """In place, as the real pass; the shorter rows of two types are also hashed without the tails."""
    kind = type_by_name(given["src_type"], "ik_llama.cpp")
    layout = layout_for_ik(given["name"], kind, given["ne"], bf16=given["bf16"])
    if layout is None:
        return {"dst_type": kind.name, "dst_sha256": hashlib.sha256(data).hexdigest()}
    memory = np.frombuffer(bytearray(data), np.uint8)
    repack(memory, kind, layout, given["ne"], memory, version=version)
    output = {"dst_type": layout.target_type.name, "dst_sha256": hashlib.sha256(memory.tobytes()).hexdigest()}
    if layout.whole in ("q8_K", "q8_KV"):
        groups, blocks = layout.geometry(given["ne"])
        tight = memory.reshape(groups, -1)[:, : layout.written_bytes(blocks)]
        output["dst_tight_sha256"] = hashlib.sha256(tight.tobytes()).hexdigest()
    return output


def _unpack(given: JsonObject, version: Version) -> JsonObject:
    data = base64.b64decode(given["data_b64"], validate=True)
    out = unpack(data, given["src_type"], given["layout"], given["ne"], version=version)
    return {"src_nbytes": out.nbytes, "src_sha256": hashlib.sha256(out.tobytes()).hexdigest()}


def cpu_features(given: JsonObject) -> CpuFeatures:
    """CpuFeatures from the object of a vectors file, where a flag is 0 or 1 and an absent one is 0."""
    return CpuFeatures(**{name: type(value)(given.get(name, 0)) for name, value in asdict(CpuFeatures()).items()})


def _layout(given: JsonObject, version: Version) -> JsonObject:
    tensor_type, cpu = type_by_name(given["type"], "llama.cpp"), cpu_features(given["features"])
    layouts = {ne1: layout_for(tensor_type, ne1, cpu) for ne1 in given["ne1"]}
    return {"layout_by_ne1": {str(ne1): layout and layout.name for ne1, layout in layouts.items()}}


def _eligible(given: JsonObject, version: Version) -> JsonObject:
    tensor_type, cpu = type_by_name(given["type"], "llama.cpp"), cpu_features(given["features"])
    return {"supported": refusal(given["op"], tensor_type, given["ne"], cpu, given["src1_type"]) is None}


def _place(given: JsonObject, version: Version) -> JsonObject:
    """An override to CPU changes nothing without devices (placement: repack-llama.md 5.5)."""
    model, options = given["model"], given["options"]
    if options.get("devices"):
        raise Unsupported("device placement is not built yet")
    if any(not override.endswith("=CPU") for override in options.get("override_tensor", ())):
        raise Unsupported("an override to another buffer than CPU is not built yet")
    tensors = [TensorSpec(name, type_by_name(kind, "llama.cpp"), tuple(ne)) for name, kind, ne in model["tensors"]]
    placement = place(
        model["arch"],
        tensors,
        cpu=cpu_features(given["cpu_features"]),
        repack=options.get("repack", True),
        mmap=options.get("mmap", True),
        n_layer=model.get("n_layer"),
    )
    return {
        "cpu_repack": sorted([row.name, row.layout.name] for row in placement.rows if row.layout),
        "buffer_mib": {name: float(mib(nbytes)) for name, nbytes in placement.buffer_bytes().items()},
        "model_size_bytes": placement.model_bytes,
    }


def _validate(given: JsonObject, version: Version) -> JsonObject:
    """A shape comes with the function that takes a tensor; the other one sees a run of blocks."""
    data = base64.b64decode(given["data_b64"], validate=True)
    dialect, function = given["dialect"], given["function"]
    kind = type_by_id(given["type_id"], dialect)
    if function == ROW_DATA:
        return {"valid": validate_row_data(data, kind, dialect=dialect, version=version).valid}
    shape = given.get("ne", ())
    return {"valid": validate_tensor(data, kind, shape, dialect=dialect, function=function, version=version).valid}


def _open(given: JsonObject, version: Version) -> JsonObject:
    return containers.answer(given)


def _offline(given: JsonObject, version: Version) -> JsonObject:
    """Files in a folder of their own; the exit code is that of the real tool, 0 or 1."""
    options = given["options"]

    def values(name: str) -> list[str]:
        return [options[i + 1] for i, option in enumerate(options[:-1]) if option == name]

    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.basename(item["file"]) for item in given["inputs"]]
        for name, item in zip(names, given["inputs"], strict=True):
            path = Path(folder, "in", name)
            path.parent.mkdir(exist_ok=True)
            if "packaged" in item:
                path.symlink_to(packaged_model(item["packaged"]))
            else:
                path.write_bytes(base64.b64decode(item["data_b64"], validate=True))
        out = Path(folder, "out", os.path.basename(given["out"]))
        out.parent.mkdir()
        try:
            report = offline_repack(
                Path(folder, "in", names[0]),
                out,
                patterns=values("--repack-pattern"),
                overrides=values("--override-kv"),
                keep_split="--keep-split" in options,
                bf16=given["bf16"],
                fsync=False,
            )
        except ModelError:
            return {"outputs": [], "exit_code": 1}
        outputs = []
        for name in report.files:
            with open(name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            outputs.append({"file": os.path.basename(name), "bytes": os.path.getsize(name), "sha256": digest})
        return {"outputs": outputs, "exit_code": 0}


_ANSWERS: dict[tuple[str, str], Callable[[JsonObject, Version], JsonObject]] = {
    ("gguf", "open"): _open,
    ("repack", "repack"): _repack,
    ("repack", "unpack"): _unpack,
    ("offline-repack", "offline"): _offline,
    ("repack-dispatch", "layout"): _layout,
    ("repack-dispatch", "eligible"): _eligible,
    ("repack-placement", "place"): _place,
    ("validate", "validate"): _validate,
}
