"""Text for people: tables and key-value lists with rich, plain and untruncated when the output is no terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from refimpl.errors import printable

PLAIN_WIDTH = 400
"""Columns assumed in a file or pipe: nothing is wrapped or cut there."""


def show(text: RenderableType) -> None:
    """Print a result; without a terminal as plain lines of any length, with no blanks at their ends."""
    plain = {"highlight": False, "markup": False, "emoji": False}
    if sys.stdout.isatty():
        Console(**plain).print(text)  # type: ignore[arg-type]
        return
    lines = io.StringIO()
    Console(file=lines, width=PLAIN_WIDTH, **plain).print(text)  # type: ignore[arg-type]
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    for line in lines.getvalue().splitlines():
        print(line.rstrip() if unicode else line.rstrip().replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-"))


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; columns whose name starts with ">" are numbers, aligned right."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        numeric = column.startswith(">")
        result.add_column(column.lstrip(">"), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        result.add_row(*(printable(str(cell)) for cell in row))
    return result


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, a line each."""
    result = Table(box=None, show_header=False, pad_edge=False)
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in pairs:
        result.add_row(printable(name), printable(str(value)))
    return result


@contextmanager
def progress_bar(text: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback (done, total) in bytes that draws a bar on the terminal; None in a pipe or when quiet."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
