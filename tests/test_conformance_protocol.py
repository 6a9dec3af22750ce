"""--impl: another program judged over JSON lines, well-behaved or not (golden/README.md, "Protocol")."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from refimpl import conformance
from refimpl.conformance.judging import judge
from refimpl.conformance.protocol import SILENT_LIMIT, Misbehaviour, Program, parse_answer
from refimpl.conformance.questions import exam_of
from refimpl.conformance.report import Report, Result
from refimpl.conformance.schema import packaged_vectors
from refimpl.errors import UsageError

SPEAKER = Path(__file__).with_name("protocol_speaker.py")
REPACKED = ("q4_0_8x8/min", "q4_K_8x8/min", "q4_K_8x8/inel-half", "q2_K_16x1/rows")
DISPATCHED = ("x86-avx2/q4_K", "arm-i8mm/q8_0", "s390x-vxe/q4_0", "x86-avx512/q2_K/MUL_MAT/1024x16/f32")
PLACED = ("moe-mixed/default", "tied-q4_K/load-mode-none", "moe-mixed/rpc-ngl1-mmap")


def python(code: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", code])


def speaker(*options: object) -> str:
    return shlex.join([sys.executable, str(SPEAKER), *map(str, options)])


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Write a vectors file with a few entries of a packaged one."""

    def write(kind: str, ids: tuple[str, ...]) -> Path:
        (file,) = (file for file in packaged_vectors([kind]) if file.dialect != "ik_llama.cpp")
        chosen = dict(file.document)
        for key in {entry.container for entry in file.entries}:
            chosen[key] = [body for body in chosen[key] if body["id"] in ids]
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(chosen))
        return path

    return write


def outcome(report: Report) -> list[tuple[str, str]]:
    return [(result.id, result.status) for result in report.results]


def only_failure(report: Report) -> Result:
    (result,) = report.of("failed")
    return result


def test_a_speaker_of_the_protocol_passes_every_kind(small: Callable[..., Path], tmp_path: Path) -> None:
    paths = [small("repack", REPACKED), small("repack-dispatch", DISPATCHED), small("repack-placement", PLACED)]
    log = tmp_path / "log"
    report = conformance.run(vectors=paths, impl=speaker("--count", log))
    assert [status for _, status in outcome(report)] == ["passed"] * 10 + ["skipped"]
    assert report.results[-1].reason == "device placement is not built yet"
    start, *requests = [tuple(line.split(" ")) for line in log.read_text().splitlines()]
    assert start == ("start",)
    assert Counter(request[0] for request in requests) == {
        "repack": 4,
        "unpack": 3,
        "layout": 3,
        "eligible": 1,
        "place": 2,
    }
    for before, (op, entry) in pairwise(requests):
        assert op != "unpack" or before == ("repack", entry)


def test_bytes_are_as_good_as_hashes(small: Callable[..., Path]) -> None:
    report = conformance.run(vectors=[small("repack", REPACKED)], impl=speaker("--base64"))
    assert (report.passed, report.failed, report.skipped) == (4, 0, 0)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("crash", "was ended by signal 6"),
        ("die", "ended with exit status 3 without an answer; stderr: it cannot go on"),
        ("exit", "ended with exit status 0 without an answer"),
        ("garbage", "the answer is not JSON: 'Segmentation what?'"),
        ("wrong-id", "an answer with id 'another'"),
        ("huge", "an answer of more than 64 MiB"),
        ("hang", "no answer within 2 s"),
        ("flood", "no answer within 2 s"),
    ],
)
def test_misbehaviour_fails_that_entry_and_the_program_is_started_again(
    small: Callable[..., Path], tmp_path: Path, what: str, reason: str
) -> None:
    log = tmp_path / "log"
    command = speaker("--at", 2, "--do", what, "--count", log)
    report = conformance.run(vectors=[small("repack-dispatch", DISPATCHED)], impl=command, timeout=2)
    assert [status for _, status in outcome(report)] == ["passed", "failed", "passed", "passed"]
    assert reason in only_failure(report).reason
    assert log.read_text().splitlines().count("start") == 2


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("wrong", 'layout: layout_by_ne1 is "nonsense", expected'),
        ("empty", "layout: the answer has no layout_by_ne1"),
        ("error", "layout: error E_MINE in place of an output"),
    ],
)
def test_a_wrong_answer_fails_that_entry_and_the_program_goes_on(
    small: Callable[..., Path], tmp_path: Path, what: str, reason: str
) -> None:
    log = tmp_path / "log"
    command = speaker("--at", 2, "--do", what, "--count", log)
    report = conformance.run(vectors=[small("repack-dispatch", DISPATCHED)], impl=command)
    assert [status for _, status in outcome(report)] == ["passed", "failed", "passed", "passed"]
    assert only_failure(report).reason.startswith(reason)
    assert log.read_text().splitlines().count("start") == 1


def test_unsupported_is_skipped_but_does_no_harm_after_a_right_repack(
    small: Callable[..., Path], tmp_path: Path
) -> None:
    path = small("repack", ("q4_0_8x8/min", "q4_K_8x8/inel-half", "q4_K_8x8/min"))
    for at, statuses in ((1, ["skipped", "passed", "passed"]), (2, ["passed"] * 3), (4, ["passed"] * 3)):
        command = speaker("--at", at, "--do", "unsupported", "--count", tmp_path / f"log{at}")
        report = conformance.run(vectors=[path], impl=command)
        assert [status for _, status in outcome(report)] == statuses
        assert all(result.reason == "the program does not support it" for result in report.of("skipped"))


def test_an_error_is_a_refusal_and_a_failed_unpack_a_failure(small: Callable[..., Path], tmp_path: Path) -> None:
    path = small("repack", ("q4_K_8x8/min", "q4_K_8x8/inel-half"))
    for at, failed in ((1, ["q4_K_8x8/min"]), (2, ["q4_K_8x8/min"]), (3, [])):
        command = speaker("--at", at, "--do", "error", "--count", tmp_path / f"log{at}")
        report = conformance.run(vectors=[path], impl=command)
        assert [result.id for result in report.of("failed")] == failed
        assert (report.passed, report.skipped) == (2 - len(failed), 0)


def test_stderr_cannot_block_the_program(small: Callable[..., Path]) -> None:
    command = speaker("--stderr", 3 << 20)
    report = conformance.run(vectors=[small("repack-dispatch", DISPATCHED)], impl=command, timeout=20)
    assert (report.passed, report.failed) == (4, 0)


@pytest.fixture
def dispatch_20(small: Callable[..., Path]) -> Path:
    (file,) = packaged_vectors(["repack-dispatch"])
    return small("repack-dispatch", tuple(entry.id for entry in file.entries[:20]))


def test_a_program_that_dies_at_once_is_started_once_per_entry(dispatch_20: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = conformance.run(
        vectors=[dispatch_20], impl=python(f"open({str(log)!r}, 'a').write('x'); raise SystemExit(7)")
    )
    assert (report.passed, report.failed) == (0, 20)
    assert {result.reason for result in report.results} == {
        "layout: the program ended with exit status 7 without an answer"
    }
    assert log.read_text() == "x" * 20
    assert report.exit_code == 1


def test_a_program_that_never_answers_costs_no_more_than_ten_time_limits(dispatch_20: Path) -> None:
    started = time.monotonic()
    report = conformance.run(vectors=[dispatch_20], impl=python("import time; time.sleep(1000)"), timeout=0.1)
    assert time.monotonic() - started < 15
    reasons = [result.reason for result in report.results]
    assert reasons[:SILENT_LIMIT] == ["layout: no answer within 0.1 s"] * SILENT_LIMIT
    assert all("never answered" in reason for reason in reasons[SILENT_LIMIT:])
    assert report.failed == 20


CHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
open({file!r}, "w").write(str(child.pid))
{then}
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("then", ["time.sleep(1000)", "sys.exit(5)"])
def test_what_the_program_started_is_ended_with_it(small: Callable[..., Path], tmp_path: Path, then: str) -> None:
    """Also when the program is gone and its child still holds the pipes open."""
    file = tmp_path / "pid"
    started = time.monotonic()
    command = python(CHILD.format(file=str(file), then=then))
    path = small("repack-dispatch", DISPATCHED[:1])
    report = conformance.run(vectors=[path], impl=command, timeout=1 if "sleep" in then else 60)
    assert report.failed == 1
    assert ("exit status 5" in report.results[0].reason) == ("exit" in then)
    assert time.monotonic() - started < 15
    deadline = time.monotonic() + 5
    while is_alive(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(file.read_text()))


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], **ANSWER}), flush=True)
"""


def test_the_program_sees_the_end_of_its_stdin(small: Callable[..., Path], tmp_path: Path) -> None:
    code = ECHO.replace("ANSWER", "{'unsupported': True}") + f"open({str(tmp_path / 'end')!r}, 'w').write('end')"
    report = conformance.run(vectors=[small("repack-dispatch", DISPATCHED)], impl=python(code))
    assert (report.passed, report.failed, report.skipped, report.exit_code) == (0, 0, 4, 1)
    assert (tmp_path / "end").read_text() == "end"


def test_an_answer_before_the_request_was_read_is_one_to_nothing() -> None:
    code = """print('{"id":"a","output":{}}', flush=True); import time; time.sleep(1000)"""
    with Program(python(code), timeout=20) as program, pytest.raises(Misbehaviour, match="before the request was read"):
        program.ask("a", "repack", "repack", {"data_b64": "A" * (1 << 20)})


def test_large_requests_and_answers_pass_through_full_pipes() -> None:
    given = {"data_b64": "A" * (8 << 20)}
    with Program(python(ECHO.replace("ANSWER", "{'output': request['input']}")), timeout=20) as program:
        assert program.ask("a", "repack", "repack", given)["output"] == given
        assert program.ask("b", "repack", "repack", given)["output"] == given


@pytest.mark.parametrize(
    ("command", "timeout", "code"),
    [
        ("", 30, "E_IMPL"),
        ("   ", 30, "E_IMPL"),
        ("'unclosed", 30, "E_IMPL"),
        ("./there/is/no/such/program", 30, "E_IMPL"),
        (str(SPEAKER.parent), 30, "E_IMPL"),
        ("true", 0, "E_TIMEOUT"),
        ("true", -1, "E_TIMEOUT"),
        ("true", float("nan"), "E_TIMEOUT"),
    ],
)
def test_what_cannot_be_started_is_wrong_usage(command: str, timeout: float, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        conformance.run(kinds=["repack-dispatch"], impl=command, timeout=timeout)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe\xfd",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"id":"b","output":{}}',
        b'{"id":1,"output":{}}',
        b'{"output":{}}',
        b'{"id":"a"}',
        b'{"id":"a","output":{},"unsupported":true}',
        b'{"id":"a","output":[]}',
        b'{"id":"a","output":null}',
        b'{"id":"a","error":"E_X"}',
        b'{"id":"a","error":{}}',
        b'{"id":"a","error":{"code":3}}',
        b'{"id":"a","unsupported":false}',
        b'{"id":"a","unsupported":1}',
    ],
)
def test_lines_that_are_no_answer(line: bytes) -> None:
    with pytest.raises(Misbehaviour) as caught:
        parse_answer(line, "a")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ['"output":{"x":1}', '"error":{"code":"E_X"}', '"unsupported":true'])
def test_lines_that_are_answers(form: str) -> None:
    assert parse_answer(b'{"id":"a",%s}\r' % form.encode(), "a")["id"] == "a"


def readme_exchanges() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    text = resources.files("refimpl.golden").joinpath("README.md").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"id":"')]
    yield from zip(lines[::2], lines[1::2], strict=True)


def test_the_readme_shows_real_requests_and_right_answers_for_every_op() -> None:
    files = {file.kind: file for file in packaged_vectors()}
    ops = set()
    for request, answer in readme_exchanges():
        file = files[request["kind"]]
        entry = next(entry for entry in file.entries if entry.id == request["id"])
        exam = exam_of(file, entry)
        assert exam is not None
        question = next(asked for asked in exam.questions(file, entry) if asked.op == request["op"])
        assert request == {"id": entry.id, "kind": file.kind, "op": question.op, "input": question.input}
        assert answer["id"] == entry.id
        assert judge(question, answer) is None
        assert set(answer["output"]) <= set(question.expected)
        ops.add(question.op)
    assert ops == {"open", "repack", "unpack", "layout", "eligible", "place", "validate"}
