"""Loading the benchmark model: seconds beside a plain NumPy copy of the same tensors, and memory after and at the peak.

    REFIMPL_BENCH_MODEL=b.gguf pytest benchmarks -k load

Each setting runs in a process of its own, imports done and kernels compiled, cache warm, two threads. The copy is
single-threaded NumPy from the mapping into fresh memory, timed in turn with the load. Before either, as much memory is
touched and given back: a virtual machine may have to fetch memory from its host first, which takes ten times longer.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

HEADS = "load, 2 threads: reclaim prefetch seconds numpy ratio rss_over_before+repacked+in_place_MiB peak-final_MiB"

CHILD = """
import json, mmap, sys, time
import numpy as np, refimpl
path, reclaim, prefetch, rounds = sys.argv[1], sys.argv[2], sys.argv[3] == "yes", int(sys.argv[4])

def load():
    return refimpl.load(path, reclaim=reclaim, prefetch=prefetch, threads=2, cpu="x86-avx2", restart_peak=True)

with load() as model, refimpl.open(path) as header:
    copied = [name for name, tensor in model.items() if tensor.layout]
    infos = [header.tensor(name.removesuffix("#output")) for name in copied]
    ranges = [(t.absolute_offset, t.absolute_offset + t.nbytes) for t in infos]

def touch_memory():
    size = sum(high - low for low, high in ranges) + (256 << 20)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    block[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))
    block.close()

def numpy_copy():
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8)
    start = time.perf_counter()
    copies = [data[low:high].copy() for low, high in ranges]
    return time.perf_counter() - start

numpy_copy()
rows = []
for _ in range(rounds):
    touch_memory()
    seconds = numpy_copy()
    touch_memory()
    with load() as model:
        rows.append(model.report.to_json() | {"numpy_seconds": seconds})
print(json.dumps(rows))
"""


@pytest.mark.parametrize("prefetch", ["no", "yes"])
@pytest.mark.parametrize("reclaim", ["progressive", "end", "never"])
def test_load(benchmark, figures, model_b, rounds, reclaim, prefetch):
    command = [sys.executable, "-c", CHILD, str(model_b), reclaim, prefetch, str(min(rounds, 7))]

    def child() -> list[dict]:
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    rows = benchmark.pedantic(child, rounds=1, iterations=1)

    def median(values) -> float:
        return float(np.median(list(values)))

    def extra(row: dict) -> int:
        in_place = row["in_place_bytes"] if prefetch == "yes" else 0
        return row["rss"]["after"]["total"] - row["rss"]["before"]["total"] - row["repacked"]["bytes"] - in_place

    figures.row(
        HEADS,
        reclaim,
        prefetch,
        f"{median(row['seconds'] for row in rows):.3f}",
        f"{median(row['numpy_seconds'] for row in rows):.3f}",
        f"{median(row['seconds'] / row['numpy_seconds'] for row in rows):.2f}",
        f"{median(map(extra, rows)) / 2**20:.1f}",
        f"{median(row['peak']['total'] - row['rss']['after']['total'] for row in rows) / 2**20:.1f}",
    )
