"""Collects the figures of a benchmark run and prints them at its end, with the facts of the machine."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

TABLES: dict[str, list[tuple[str, ...]]] = defaultdict(list)
RATIOS: list[tuple[str, float]] = []


class Figures:
    """Where a benchmark leaves its rows."""

    @staticmethod
    def row(table: str, *cells: object) -> None:
        """One line of a table; the table's name carries its column heads after a colon."""
        TABLES[table].append(tuple(str(cell) for cell in cells))

    @staticmethod
    def ratio(name: str, value: float) -> None:
        """Ours against a real program; above 1 we are faster."""
        RATIOS.append((name, value))


@pytest.fixture
def figures() -> type[Figures]:
    """Rows and ratios for the end of the run."""
    return Figures


@pytest.fixture(scope="session")
def source_mib() -> int:
    """MiB of source per kernel; REFIMPL_BENCH_MIB makes a quick run."""
    return int(os.environ.get("REFIMPL_BENCH_MIB", "64"))


@pytest.fixture(scope="session")
def rounds() -> int:
    """Samples per figure; REFIMPL_BENCH_ROUNDS makes a quick run."""
    return int(os.environ.get("REFIMPL_BENCH_ROUNDS", "15"))


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark model: REFIMPL_BENCH_MODEL if it is set (made there if missing), else a temporary file."""
    from make_model import Recipe, make_model

    named = os.environ.get("REFIMPL_BENCH_MODEL")
    path = Path(named) if named else tmp_path_factory.mktemp("model") / "b.gguf"
    if not path.exists():
        make_model(path, Recipe(layers=int(os.environ.get("REFIMPL_BENCH_LAYERS", "36"))))
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print everything that was measured."""
    if not TABLES and not RATIOS:
        return
    write = terminalreporter.write_line
    terminalreporter.section("figures")
    write(f"machine: {_cpu_name()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}")
    for name, rows in TABLES.items():
        title, _, heads = name.partition(":")
        table = [tuple(heads.split()), *rows]
        widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(table[0]))]
        write("")
        write(title)
        for row in table:
            write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    if RATIOS:
        write("")
        for name, value in RATIOS:
            write(f"ratio {name} {value:.2f}")
        write(f"geometric mean {np.exp(np.mean(np.log([value for _, value in RATIOS]))):.2f} of {len(RATIOS)}")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
