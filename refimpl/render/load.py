"""The report of a load as text."""

from __future__ import annotations

from rich.console import Group, RenderableType

from refimpl.errors import printable
from refimpl.loading.model import LoadReport
from refimpl.render.text import facts, table
from refimpl.units import mib


def load_text(report: LoadReport, digests: dict[str, str] | None) -> RenderableType:
    """Seconds, memory before, after and at the peak, what was repacked and given back, and the buffers."""
    layouts = ", ".join(f"{count} x {name}" for name, count in report.layouts.items())
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.phases.items())
    head = facts(
        [
            ("model", f"{report.model} ({report.architecture})"),
            ("behaves like", report.behaves_like),
            ("load mode", f"{report.load_mode}, {report.threads} threads, reclaim {report.reclaim}"),
            ("seconds", f"{report.seconds:.3f} ({phases}; header, check and compile come before)"),
            (
                "repacked",
                f"{report.repacked_tensors} tensors, {mib(report.repacked_bytes)} MiB"
                + (f": {layouts}" * bool(layouts)),
            ),
            ("in place", f"{mib(report.in_place_bytes)} MiB stay in the file mapping"),
            ("reclaimed", f"{mib(report.reclaimed_bytes)} MiB of source pages ({report.reclaimed_bytes >> 10} KiB)"),
        ]
    )
    memory = table(
        "resident memory, MiB",
        ["", ">total", ">anonymous", ">file"],
        [
            ("before", *(mib(x) for x in report.rss_before.to_json().values())),
            ("after", *(mib(x) for x in report.rss_after.to_json().values())),
            ("peak", mib(report.peak_total) if report.peak_total else "unknown", "", ""),
        ],
    )
    buffers = table("buffers", ["buffer", ">MiB", ">bytes"], [(n, mib(b), b) for n, b in report.buffers.items()])
    parts: list[RenderableType] = [head, "", memory, "", buffers]
    parts += [f"warning: {printable(warning)}" for warning in report.warnings]
    if digests is not None:
        parts += ["", *(f"{digest}  {printable(name)}" for name, digest in digests.items())]
    return Group(*parts)
