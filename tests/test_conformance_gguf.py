"""Kind gguf: every stage is judged by its own result and code, and the loader agrees with the runner."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import chdir
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import refimpl
from refimpl import conformance
from refimpl.conformance.containers import STAGES, answer, assembled, stages, view_difference
from refimpl.conformance.judging import judge
from refimpl.conformance.questions import exam_of
from refimpl.conformance.schema import Entry, Vectors, packaged_vectors
from refimpl.errors import RefimplError


@cache
def packaged() -> Vectors:
    (file,) = (file for file in packaged_vectors(["gguf"]))
    return file


def entry(name: str) -> Entry:
    return next(found for found in packaged().entries if found.id == name)


def asked(name: str) -> Iterator[Any]:
    exam = exam_of(packaged(), entry(name))
    assert exam is not None
    return exam.questions(packaged(), entry(name))


def test_every_stage_of_every_entry_is_asked_about() -> None:
    counts = dict.fromkeys(STAGES, 0)
    for each in packaged().entries:
        given = [question["stage"] for question, _ in stages(each.body)]
        assert set(given) == set(each.body["want"])
        for stage in given:
            counts[stage] += 1
    assert counts == {"meta": 116, "data": 116, "load_mmap": 36, "load_none": 36}


@pytest.mark.parametrize(
    ("name", "stage", "reply", "wrong"),
    [
        ("hdr-bad-magic", "meta", {"output": {"result": "reject", "code": "E_MAGIC"}}, None),
        ("hdr-bad-magic", "meta", {"error": {"code": "E_MAGIC"}}, None),
        ("hdr-bad-magic", "meta", {"error": {"code": "E_TRUNCATED"}}, "error E_TRUNCATED in place of E_MAGIC"),
        ("hdr-bad-magic", "meta", {"output": {"result": "reject", "code": "E_TRUNCATED"}}, "code is"),
        ("hdr-bad-magic", "meta", {"output": {"result": "reject"}}, "the answer has no code"),
        ("hdr-bad-magic", "meta", {"output": {"result": "accept", "code": "E_MAGIC"}}, "result is"),
        ("kv-bool-2", "meta", {"output": {"result": "accept"}}, None),
        ("kv-bool-2", "meta", {"error": {"code": "E_KV_TYPE"}}, "error E_KV_TYPE in place of an output"),
        ("kv-bool-2", "meta", {"output": {"result": "accept", "parsed": {}}}, "parsed has no version"),
        ("ld-data-short-1", "data", {"error": {"code": "E_DATA_SHORT"}}, None),
        ("ld-data-short-1", "data", {"error": {"code": "E_DATA_BOUNDS"}}, "in place of E_DATA_SHORT"),
    ],
)
def test_replies(name: str, stage: str, reply: dict[str, Any], wrong: str | None) -> None:
    question = next(question for question in asked(name) if question.input["stage"] == stage)
    found = judge(question, reply)
    assert found is None if wrong is None else found is not None and wrong in found, found


def test_parsed_views() -> None:
    view = entry("align-64-valid").body["parsed"]
    assert view_difference(view, view, "parsed") is None
    more = deepcopy(view)
    more["kv"][0]["remark"] = 1
    assert view_difference(more, view, "parsed") is None
    for change in (
        lambda v: v.update(alignment=32),
        lambda v: v["kv"].pop(),
        lambda v: v["kv"][0].update(value=True),
        lambda v: v["kv"][0].pop("value"),
        lambda v: v["tensors"][2].update(offset=96),
        lambda v: v["tensors"][0]["ne"].pop(),
        lambda v: v.update(tensors={}),
        lambda v: v["kv"].__setitem__(0, "x"),
    ):
        wrong = deepcopy(view)
        change(wrong)
        assert view_difference(wrong, view, "parsed")
    long = entry("key-65536-long").body["parsed"]
    found = answer({"stage": "meta", "data_b64": base64.b64encode(assembled(entry("key-65536-long").body["file"]))})
    assert view_difference(found["parsed"], long, "parsed") is None
    found["parsed"]["kv"][0]["key_hex"] += "6b"
    assert view_difference(found["parsed"], long, "parsed")


def test_a_wrong_expectation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned around one by one, each result of the vectors fails."""
    for each in packaged().entries[::9]:
        for stage, want in each.body["want"].items():
            body = deepcopy(each.body)
            body["want"][stage] = {"result": "reject", "code": "E_WRONG"} if want["result"] == "accept" else {
                "result": "reject", "code": want["code"] + "_NOT"}  # fmt: skip
            changed = Vectors("x", "gguf", "llama.cpp", {"cases": [body]}, (Entry(each.id, "cases", body),))
            monkeypatch.setattr(conformance, "load_vectors", lambda path, changed=changed: changed)
            assert conformance.run(vectors=["x"]).failed == 1, (each.id, stage)


@pytest.mark.parametrize("damage", [{"size": 1}, {"sha256": "0" * 64}, {"pieces": ["R0c="]}, {"pieces": ["%"]}])
def test_pieces_must_make_the_file(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pieces|base64|[Pp]adding|characters"):
        assembled({**entry("hdr-bad-magic").body["file"], **damage})


@pytest.mark.parametrize("body", [{"want": {}}, {"want": {"meta": {}}, "file": {}}, {"want": {}, "files": {}}])
def test_entries_without_files_or_results(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"neither file|without result"):
        list(stages(body))


def test_shards_stay_in_their_folder(tmp_path: Path) -> None:
    given = {"stage": "load_none", "files_b64": {"../x": ""}, "open": "../x"}
    with pytest.raises(ValueError, match="no name of a file"):
        answer(given)
    assert os.listdir(tmp_path) == []


def test_the_loader_itself_says_the_same(tmp_path: Path) -> None:
    """What the runner judges by checks alone, refimpl.load does with every file that is mapped."""
    count = 0
    for each in packaged().entries:
        for given, expected in stages(each.body):
            if given["stage"] != "load_mmap":
                continue
            folder = tmp_path / each.id
            folder.mkdir()
            for name, data in given.get("files_b64", {"m.gguf": given.get("data_b64")}).items():
                (folder / name).write_bytes(base64.b64decode(data))
            path = given.get("open", "m.gguf")
            try:
                with chdir(folder):
                    refimpl.load(path, cpu="x86-avx512", check_tensors=given.get("check_tensors", False)).close()
                code = None
            except RefimplError as error:
                code = error.code
            # From any shard is a convenience of refimpl.
            assert code == (None if each.id == "sp-open-second" else expected.get("code")), each.id
            count += 1
    assert count == 36
