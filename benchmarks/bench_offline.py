"""Offline repack of the benchmark model: seconds and memory beside the real tool and a plain copy of the file.

    REFIMPL_BENCH_MODEL=b.gguf pytest benchmarks -k offline

Without fsync on any side; each run is a process of its own, in turn. Ours is timed inside (imports and compiled kernels
are there), the others as whole processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from witness_ik import package_folder

HEADS = "offline repack: who seconds ratio peak_MiB"

CHILD = """
import sys, time
import refimpl.kernels.ik_repack
from refimpl.repacking.offline import offline_repack
start = time.perf_counter()
offline_repack(sys.argv[1], sys.argv[2], fsync=False)
print(time.perf_counter() - start)
"""


def run(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak MiB, and what was printed."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.perf_counter() - start, usage.ru_maxrss / 1024, printed


def test_witness_ik_offline(benchmark, figures, model_b, tmp_path, rounds):
    folder = package_folder()
    if folder is None:
        pytest.skip("ik-llama-cpp-python is not installed (extra: witness)")
    out = {name: str(tmp_path / f"{name}.gguf") for name in ("ours", "real", "cp")}
    commands = {
        "ours": [sys.executable, "-c", CHILD, str(model_b), out["ours"]],
        "real": [str(folder / "bin" / "llama-quantize"), "--repack", str(model_b), out["real"], "Q4_0"],
        "cp": ["cp", str(model_b), out["cp"]],
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}

    def turn() -> None:
        for name, command in commands.items():
            Path(out[name]).unlink(missing_ok=True)
            seconds, peak, printed = run(command)
            samples[name].append((float(printed) if name == "ours" else seconds, peak))

    turn()
    same = subprocess.run(["cmp", out["ours"], out["real"]], check=False).returncode == 0
    assert same, "the two files differ"
    benchmark.pedantic(turn, rounds=min(rounds, 3), iterations=1)
    medians = {name: np.median(values, axis=0) for name, values in samples.items()}
    for name, (seconds, peak) in medians.items():
        figures.row(HEADS, name, f"{seconds:.2f}", f"{medians['real'][0] / seconds:.2f}", f"{peak:.0f}")
