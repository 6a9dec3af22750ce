"""GB/s of tensor bytes that data validation gets through on one core, beside memcpy in the same process.

    pytest benchmarks -k validate

One thread, process CPU time, calls alternated, medians. The tensor is good, so all of it is looked at; llama.cpp's
rules. `clear` is the NumPy version, `file` reads the tensor from a cached file in slices, as `refimpl check` and
`refimpl load --check-tensors` do.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict

import numpy as np
import pytest

from refimpl.gguf.validate import validate_model, validate_tensor
from refimpl.gguf.writer import write_gguf
from refimpl.types import type_by_name

TYPES = "q4_0 q8_0 q4_K q6_K q2_K q5_1 iq4_xs iq1_m mxfp4 f16 bf16 f32 f64".split()
HEADS = "validate, GB/s: type ours clear file memcpy ours/memcpy spread"
NE0 = 4096


@pytest.mark.parametrize("name", TYPES)
def test_validate(benchmark, figures, tmp_path, name, source_mib, rounds):
    kind = type_by_name(name, "llama.cpp")
    rows = max(1, (source_mib << 20) // kind.row_bytes(NE0))
    shape, nbytes = (NE0, rows), rows * kind.row_bytes(NE0)
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    data &= 0xBF  # no exponent of ones anywhere
    target = np.zeros_like(data)
    path = tmp_path / "one.gguf"
    write_gguf(path, [], [("t", kind, shape, data)])

    def ours() -> None:
        assert validate_tensor(data, kind, shape, dialect="llama.cpp")

    rivals = {
        "memcpy": lambda: ctypes.memmove(target.ctypes.data, data.ctypes.data, nbytes),
        "clear": lambda: validate_tensor(data, kind, shape, dialect="llama.cpp", version="clear"),
        "file": lambda: validate_model(path, dialect="llama.cpp", threads=1),
    }
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(label, call) -> None:
        start = time.process_time()
        call()
        seconds[label].append(max(time.process_time() - start, 1e-9))

    def others() -> None:
        for label, call in rivals.items():
            timed(label, call)

    ours()
    others()
    seconds.clear()
    benchmark.pedantic(lambda: timed("ours", ours), setup=others, rounds=rounds, iterations=1)
    speeds = {label: nbytes / np.array(values) / 1e9 for label, values in seconds.items()}
    median = {label: float(np.median(values)) for label, values in speeds.items()}
    low, high = np.percentile(speeds["ours"], [10, 90])
    figures.row(
        HEADS,
        name,
        *(f"{median[label]:.2f}" for label in ("ours", "clear", "file", "memcpy")),
        f"{median['ours'] / median['memcpy']:.2f}",
        f"{low:.1f}-{high:.1f}",
    )
