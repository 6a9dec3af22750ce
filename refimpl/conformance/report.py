"""What came out of a run of vectors: one result per entry (two where a clear and a fast version are judged)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "skipped"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")
LINE_LIMIT = 400


@dataclass(frozen=True, slots=True)
class Result:
    """How one entry came out; `reason` is a single line, empty if it passed."""

    file: str
    kind: str
    id: str
    status: Status
    reason: str = ""


@dataclass(slots=True)
class Report:
    """All results in the order in which they were run, and `notes` on what was asked for but not there."""

    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, results: Iterable[Result]) -> None:
        """Append results."""
        self.results.extend(results)

    def of(self, status: Status) -> list[Result]:
        """The results of that status."""
        return [result for result in self.results if result.status == status]

    @property
    def passed(self) -> int:
        """How many passed."""
        return len(self.of("passed"))

    @property
    def failed(self) -> int:
        """How many failed."""
        return len(self.of("failed"))

    @property
    def skipped(self) -> int:
        """How many were not judged."""
        return len(self.of("skipped"))

    @property
    def exit_code(self) -> int:
        """0 if something passed and nothing failed, else 1: a run that judged nothing proves nothing."""
        return 0 if self.passed and not self.failed else 1

    def skips(self) -> Counter[tuple[str, str]]:
        """(kind, reason) -> how many entries were skipped for it."""
        return Counter((result.kind, result.reason) for result in self.of("skipped"))

    def to_text(self) -> str:
        """Lines for people: each failure, skips by reason, notes, and last `N passed, M failed, K skipped`."""
        lines = [f"FAIL {one_line(r.file)} {one_line(r.id)}: {r.reason}" for r in self.of("failed")]
        lines += [f"SKIP {count} of kind {one_line(kind)}: {reason}" for (kind, reason), count in self.skips().items()]
        lines += [f"NOTE {note}" for note in self.notes]
        lines.append(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The same as a JSON object, with the counts of each kind."""
        kinds = Counter((result.kind, result.status) for result in self.results)
        return {
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "exit_code": self.exit_code,
            "kinds": {
                kind: {status: kinds[kind, status] for status in STATUSES}
                for kind in dict.fromkeys(result.kind for result in self.results)
            },
            "failures": [{"file": r.file, "kind": r.kind, "id": r.id, "reason": r.reason} for r in self.of("failed")],
            "skips": [
                {"kind": kind, "reason": reason, "count": count} for (kind, reason), count in self.skips().items()
            ],
            "notes": self.notes,
        }


def one_line(text: str, limit: int = LINE_LIMIT) -> str:
    """`text` as part of a report line: no line breaks or control characters, and not endless."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text[: limit + 1]).split())
    return clean if len(text) <= limit else clean[: limit - 3] + "..."
