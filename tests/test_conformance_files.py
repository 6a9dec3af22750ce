"""Vectors files: from anywhere, plain or packed; what counts as an entry; what is no vectors file at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from vectors_help import ENVELOPE, Write, counts, document

from refimpl import conformance
from refimpl.conformance.schema import parse_vectors
from refimpl.errors import RefimplError, VectorError

MXFP4 = "llama.cpp/ggml_validate_row_data/mxfp4/ok"


def test_gzip_and_plain_are_the_same(tmp_path: Path, write: Write) -> None:
    content = document("repack-dispatch", "x86-avx2/q4_K", "x86-avx2/q2_K")
    packed = tmp_path / "packed"  # known by its bytes, not by its name
    packed.write_bytes(gzip.compress(json.dumps(content).encode()))
    plain = conformance.run(vectors=[write(content)])
    assert counts(plain) == counts(conformance.run(vectors=[packed])) == (2, 0, 0)


def test_a_file_given_twice_runs_twice(write: Write) -> None:
    path = write(document("repack-dispatch", "x86-avx2/q4_K", "x86-avx2/q2_K"))
    assert counts(conformance.run(vectors=[path, str(path)])) == (4, 0, 0)


def test_extra_keys_are_ignored_and_ids_made_up_from_the_place(write: Write) -> None:
    content = document("repack-dispatch", "x86-avx2/q4_K", "x86-avx2/q2_K", "x86-avx512/q2_K/MUL_MAT/1024x16/f32")
    content["remark"] = {"a": [1]}
    for body in content["cases"] + content["op_cases"]:
        body["remark"] = None
        del body["id"]
    report = conformance.run(vectors=[write(content, "some.file.json")])
    assert [(result.id, result.status) for result in report.results] == [
        ("some.file/cases/0", "passed"),
        ("some.file/cases/1", "passed"),
        ("some.file/op_cases/0", "passed"),
    ]


@pytest.mark.parametrize(
    ("kind", "content", "ids"),
    [
        ("available-memory", {"cases": [{"id": "a"}, {}]}, ["a", "mine/cases/1"]),
        ("rtr-regex", {"cases": [{"id": 1}, {"id": 0}]}, ["1", "0"]),
        ("fit", {"models": {"m": [{"id": "m/0"}, {}], "n": []}}, ["m/0", "mine/m/1"]),
        ("placement", {"models": {"m": [{}], "n": [{}, {}]}}, ["mine/m/0", "mine/n/0", "mine/n/1"]),
        ("graph", {"models": {"m": {}}, "graphs": [{}, {}]}, ["mine/graphs/0", "mine/graphs/1"]),
        ("rtr-counts", {"models": {"m": []}, "runs": [{}]}, ["mine/runs/0"]),
        (
            "rpc",
            {"sessions": [{"name": "s"}], "fnv1a64": [{}, {}], "tensor_struct": [], "hello_replies": {}},
            ["mine/sessions/0", "mine/fnv1a64/0", "mine/tensor_struct/0", "mine/hello_replies/0"],
        ),
        ("of-a-later-version", {"cases": [{"id": "a"}, 3]}, ["a", "mine/cases/1"]),
        ("of-a-later-version", {"things": 3}, ["mine/cases/0"]),
    ],
)
def test_kinds_that_are_not_built_are_counted_by_entry_and_skipped(
    write: Write, kind: str, content: dict[str, Any], ids: list[str]
) -> None:
    report = conformance.run(vectors=[write({**ENVELOPE, "kind": kind, **content})])
    assert [result.id for result in report.results] == ids
    assert counts(report) == (0, 0, len(ids))
    assert report.exit_code == 1
    assert report.to_text().splitlines() == [
        f"SKIP {len(ids)} of kind {kind}: kind {kind} is not built yet",
        f"0 passed, 0 failed, {len(ids)} skipped",
    ]


GOOD: dict[str, Any] = {**ENVELOPE, "kind": "fit", "models": {}}


@pytest.mark.parametrize(
    ("raw", "fragment"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b"{" * 20, "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"x":NaN}', "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b"[]", "the top level is not an object"),
        (b"{}", "no schema, kind, dialect, source in the envelope"),
        (gzip.compress(b"{}" * 500)[:-20], "damaged gzip data"),
        (b"\x1f\x8b rest", "damaged gzip data"),
        ({**GOOD, "schema": "refimpl-golden/2"}, "schema is 'refimpl-golden/2'"),
        ({**GOOD, "kind": ["fit"]}, "kind is not a string"),
        ({**GOOD, "dialect": None}, "dialect is not a string"),
        ({**GOOD, "source": "llama.cpp"}, "source is neither"),
        ({**ENVELOPE, "kind": "fit"}, "no models in a file of kind fit"),
        ({**ENVELOPE, "kind": "repack-dispatch"}, "no cases or op_cases in a file"),
        ({**ENVELOPE, "kind": "repack", "cases": {}}, "cases is not a list"),
        ({**ENVELOPE, "kind": "repack", "cases": ["x"]}, "entry 0 of cases is not an object"),
        ({**ENVELOPE, "kind": "fit", "models": []}, "models is not an object of lists"),
        ({**ENVELOPE, "kind": "fit", "models": {"m": {}}}, "m is not a list"),
    ],
)
def test_what_is_no_vectors_file_is_refused_in_one_line(tmp_path: Path, raw: Any, fragment: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    with pytest.raises(VectorError) as caught:
        conformance.run(vectors=[path])
    assert caught.value.code == "E_VECTORS"
    assert caught.value.exit_code == 3
    assert fragment in caught.value.text
    assert str(path) in caught.value.text
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "entry", "change", "fragment"),
    [
        ("repack", "q4_0_8x8/min", {"layout": None}, "entry q4_0_8x8/min has no layout that is a string"),
        ("repack", "q4_0_8x8/min", {"ne": [32, "8"]}, "no ne that is"),
        ("repack", "q4_0_8x8/min", {"ne": [1] * 5}, "no ne that is"),
        ("repack", "q4_0_8x8/min", {"seed": -1}, "no seed that is"),
        ("repack", "q4_0_8x8/min", {"seed": 1 << 64}, "no seed that is"),
        ("repack", "q4_0_8x8/min", {"src_nbytes": 1 << 50}, "no src_nbytes that is"),
        ("repack", "q4_0_8x8/min", {"src_nbytes": True}, "no src_nbytes that is"),
        ("repack", "q4_0_8x8/min", {"eligible": 1}, "no eligible that is true or false"),
        ("repack", "q4_0_8x8/min", {"dst_sha256": "ab"}, "no dst_sha256 that is"),
        ("repack-dispatch", "x86-avx2/q4_K", {"profile": "x86-mine"}, "profiles has no 'x86-mine'"),
        ("repack-dispatch", "x86-avx2/q4_K", {"layout_by_ne1": {"x": None}}, "no layout_by_ne1 that is"),
        ("repack-placement", "moe-mixed/default", {"model": "mine"}, "models has no 'mine'"),
        ("repack-placement", "moe-mixed/default", {"cpu_repack": [["a"]]}, "no cpu_repack that is"),
        ("validate", MXFP4, {"dialect": "both"}, "no dialect that is llama.cpp or ik_llama.cpp"),
        ("validate", MXFP4, {"type_id": True}, "no type_id that is an integer"),
        ("validate", MXFP4, {"bytes_b64": "AAA"}, "no bytes_b64 that is bytes in base64"),
        ("validate", MXFP4, {"ne": [1.5]}, "no ne that is a list of 1 to 4 whole numbers, or absent"),
        ("validate", MXFP4, {"valid": None}, "no valid that is true or false"),
    ],
)
def test_entries_that_cannot_be_asked_about_are_refused_before_anything_runs(
    write: Write, kind: str, entry: str, change: dict[str, Any], fragment: str
) -> None:
    content = document(kind, entry)
    content["cases"][0].update(change)
    with pytest.raises(VectorError) as caught:
        conformance.run(vectors=[write(content)])
    assert caught.value.code == "E_VECTORS"
    assert fragment in caught.value.text


@pytest.mark.parametrize(("section", "value"), [("models", {"moe-mixed": {"arch": "llama"}}), ("cpu_features", None)])
def test_sections_that_entries_refer_to_are_checked(write: Write, section: str, value: Any) -> None:
    content = {**document("repack-placement", "moe-mixed/default"), section: value}
    with pytest.raises(VectorError, match=f"the file has no {section} that is"):
        conformance.run(vectors=[write(content)])


@pytest.mark.parametrize("name", ["absent.json", ".", "nul\0.json"])
def test_a_file_that_is_not_there_is_a_vector_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(VectorError) as caught:
        conformance.run(vectors=[f"{tmp_path}/{name}"])
    assert (caught.value.code, caught.value.exit_code) == ("E_OPEN", 3)


def test_a_file_that_cannot_be_read_is_the_machines_fault() -> None:
    with pytest.raises(RefimplError) as caught:
        conformance.run(vectors=["/proc/self/mem"])
    assert (caught.value.code, caught.value.exit_code) == ("E_IO", 4)


def test_no_more_than_the_limit_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refimpl.conformance.schema.SIZE_LIMIT", 1000)
    with pytest.raises(VectorError, match="more than 1000 bytes"):
        parse_vectors(gzip.compress(b" " * 5000), "bomb.json.gz")
