"""Conformance: every vectors file, run against refimpl itself or against another program (golden/README.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from refimpl.conformance.judging import judge
from refimpl.conformance.protocol import Misbehaviour, Program
from refimpl.conformance.questions import EXAMS, Exam, check_file, exam_of
from refimpl.conformance.report import Report, Result, Status, one_line
from refimpl.conformance.runners import VERSIONS, Unsupported, answer
from refimpl.conformance.schema import (
    DIALECT_NAMES,
    KINDS,
    Entry,
    JsonObject,
    Vectors,
    load_vectors,
    packaged_vectors,
)
from refimpl.errors import RefimplError, UsageError
from refimpl.repacking.tensor import Version

__all__ = ["Report", "Result", "run"]

Ask = Callable[[str, str, str, JsonObject], JsonObject]
"""(entry id, kind, op, input) -> an answer of the protocol."""


def run(
    kinds: Iterable[str] | None = None,
    vectors: Iterable[str | os.PathLike[str]] | None = None,
    impl: str | None = None,
    timeout: float = 30.0,
    dialect: str | None = None,
) -> Report:
    """Run vectors files and report how each entry came out.

    Parameters
    ----------
    kinds, dialect
        Leave out files of other kinds, entries of other dialects.
    vectors
        Files of the schema, plain or gzip, each run as often as it is named. Default: those of the package.
    impl
        Command line of a program that speaks the protocol. Default: refimpl itself, in this process.
    timeout
        Seconds for each answer of that program.

    Raises
    ------
    UsageError
        E_KIND, E_DIALECT: nobody knows that name. E_IMPL, E_TIMEOUT: see Program.
    VectorError
        E_OPEN, E_VECTORS: a file is not there, or not what its schema says. Nothing has been run then.
    MachineError
        E_IO: a file cannot be read.
    """
    wanted = list(kinds or KINDS)
    for kind in wanted:
        if kind not in KINDS:
            raise UsageError("E_KIND", f"no kind is called {kind!r}; there are {', '.join(KINDS)}", found=kind)
    if dialect is not None and dialect not in DIALECT_NAMES:
        raise UsageError("E_DIALECT", f"no dialect is called {dialect!r}; there are {', '.join(DIALECT_NAMES)}")
    given = list(vectors or ())
    files = [load_vectors(path) for path in given] if given else list(packaged_vectors(wanted))
    if kinds:
        files = [file for file in files if file.kind in wanted]
    for file in files:
        check_file(file)
    report = Report()
    if kinds:
        report.notes = [f"no vectors of kind {kind}" for kind in wanted if all(kind != file.kind for file in files)]
    with Program(impl, timeout) if impl is not None else contextlib.nullcontext() as program:
        for file in files:
            for entry in file.entries:
                if _speaks(file, entry, dialect):
                    report.add(_results(file, entry, program))
    return report


def _speaks(file: Vectors, entry: Entry, dialect: str | None) -> bool:
    own = entry.body.get("dialect") if isinstance(entry.body, dict) and file.dialect == "both" else file.dialect
    return dialect is None or own in (None, dialect)


def _results(file: Vectors, entry: Entry, program: Program | None) -> Iterator[Result]:
    """One result, or one for each version of refimpl that is judged."""
    exam = exam_of(file, entry)
    reason = exam.hold(entry) if exam else _not_built(file)
    if exam is None or reason:
        yield Result(file.name, file.kind, entry.id, "skipped", one_line(reason or ""))
    elif program:
        yield _examined(exam, file, entry, program.ask, entry.id)
    else:
        versions = VERSIONS.get(file.kind)
        for version in versions or ("fast",):
            label = f"{entry.id} [{version}]" if versions else entry.id
            yield _examined(exam, file, entry, _own(version), label)


def _not_built(file: Vectors) -> str:
    if any(kind == file.kind for kind, _ in EXAMS):
        return f"kind {file.kind} is not built yet for dialect {file.dialect}"
    return f"kind {file.kind} is not built yet"


def _own(version: Version) -> Ask:
    """refimpl itself as a program that speaks the protocol."""

    def ask(entry_id: str, kind: str, op: str, given: JsonObject) -> JsonObject:
        try:
            return {"output": answer(kind, op, given, version)}
        except Unsupported as error:
            return {"unsupported": True, "reason": str(error)}
        except RefimplError as error:
            raise Misbehaviour(str(error)) from error
        except Exception as error:  # a defect in one case must not keep the others from being judged
            raise Misbehaviour(f"{type(error).__name__}: {error}") from error

    return ask


def _examined(exam: Exam, file: Vectors, entry: Entry, ask: Ask, label: str) -> Result:
    """Ask all questions about an entry, up to the first wrong answer."""

    def result(status: Status, reason: str = "") -> Result:
        return Result(file.name, file.kind, label, status, one_line(reason))

    questions = exam.questions(file, entry)
    while True:
        try:
            question = next(questions, None)
        except (RefimplError, ValueError) as error:  # what the entry says does not fit together
            return result("failed", str(error))
        if question is None:
            return result("passed")
        try:
            reply = ask(entry.id, file.kind, question.op, question.input)
        except Misbehaviour as error:
            return result("failed", f"{question.op}: {error}")
        if "unsupported" not in reply:
            wrong = judge(question, reply)
            if wrong:
                return result("failed", f"{question.op}: {wrong}")
        elif not question.optional:
            reason = reply.get("reason")
            return result("skipped", reason if isinstance(reason, str) else "the program does not support it")
