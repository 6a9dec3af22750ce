"""GB/s of source bytes of every layout: ours, memcpy, and the real C++ in the same process where a wheel holds it.

    pytest benchmarks -k witness          # against the real programs, `ratio LAYOUT VALUE` at the end
    pytest benchmarks -k "repack and not witness"

One thread, process CPU time, calls alternated, medians; the target has been written before. For llama.cpp's layouts the
faster of two wheels is the mark. `-k "witness and llama"` and `-k "witness and ik"` narrow it. ne0 = 4096.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from refimpl.layouts import IK_LAYOUTS, LAYOUTS, LLAMA_LAYOUTS, IkLayout, Layout
from refimpl.repacking.tensor import group_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from witness import DATA, FILES, Ggml, installed
from witness_ik import IkGgml, aligned, package_folder

NE0 = 4096
HEADS = "repack, GB/s of source: layout ours unpack memcpy real ratio spread"


class Case:
    """Source and target of one layout, and the calls to be timed."""

    def __init__(self, layout: Layout, mib: int) -> None:
        row = layout.source_type.row_bytes(NE0)
        self.layout, self.rows = layout, max(1, (mib << 20) // row // 48) * 48
        self.nbytes = self.rows * row
        self.source = np.random.default_rng(1).integers(0, 256, self.nbytes, dtype=np.uint8)
        room = np.zeros(self.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        self.target = room[start : start + self.nbytes]
        self.geometry = layout.geometry((NE0, self.rows))

        self._repack = group_function("repack_groups", layout, "fast")
        self._unpack = group_function("unpack_groups", layout, "fast")

    def ours(self) -> None:
        self._repack(self.layout, self.source, self.target, *self.geometry)

    def unpack(self) -> None:
        self._unpack(self.layout, self.source, self.target, *self.geometry)

    def rivals(self) -> dict[str, Callable[[], object]]:
        """What is timed beside every layout."""
        invertible = not isinstance(self.layout, IkLayout) or self.layout.invertible
        return {"memcpy": self.memcpy} | ({"unpack": self.unpack} if invertible else {})

    def memcpy(self) -> None:
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, self.nbytes)

    def real_ik(self, library: IkGgml) -> Callable[[], None] | None:
        """The pass of ik_llama.cpp on memory of its own, in place; None for types that the wheel leaves alone."""
        kind = self.layout.source_type
        memory = aligned(self.source)
        tensor = library.tensor(kind.name, [NE0, self.rows, 1], memory, "blk.0.ffn_up.weight")
        if library.repack(tensor) == kind.name:
            return None

        def call() -> None:
            tensor.type = kind.id
            library.repack_call(tensor)

        call.memory = memory  # keeps it alive
        return call

    def real(self, library: Ggml) -> Callable[[], int] | None:
        """A call of a wheel's own code; None if it was not compiled."""
        function = library.repack_function(self.layout.name)
        if function is None:
            return None
        _, tensor = library.tensor(self.layout.source_type.id, [NE0, self.rows, 1])
        ctypes.c_void_p.from_address(tensor + DATA).value = self.target.ctypes.data
        source, nbytes = self.source.ctypes.data, self.nbytes
        return lambda: function(tensor, source, nbytes)


def measure(benchmark, case: Case, rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """GB/s of every call, sample by sample; the rivals are timed in turn before each of our calls."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def others() -> None:
        for name, call in rivals.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)

    def timed() -> None:
        start = time.process_time()
        case.ours()
        seconds["ours"].append(time.process_time() - start)

    case.ours()
    others()
    seconds.clear()
    benchmark.pedantic(timed, setup=others, rounds=rounds, iterations=1)
    return {name: [case.nbytes / max(value, 1e-9) / 1e9 for value in values] for name, values in seconds.items()}


def row_name(layout: Layout) -> str:
    """The name of a layout; with its source type where two share it."""
    return f"{layout.name}({layout.source_type.name})" if layout.name == "bf16_r16" else layout.name


def report(figures, layout: Layout, speeds: dict[str, list[float]], real: str | None) -> float:
    median = {name: float(np.median(values)) for name, values in speeds.items()}
    ratio = median["ours"] / median[real] if real else 0.0
    low, high = np.percentile(speeds["ours"], [10, 90])
    figures.row(
        HEADS,
        row_name(layout),
        *(f"{median[name]:.2f}" if name in median else "-" for name in ("ours", "unpack", "memcpy")),
        f"{median[real]:.2f}" if real else "-",
        f"{ratio:.2f}" if ratio else "-",
        f"{low:.1f}-{high:.1f}",
    )
    return ratio


@pytest.fixture(scope="module")
def libraries() -> dict[str, Ggml]:
    """The wheels that are installed, in this process; none of them with global symbols."""
    found = {name: Ggml(name) for name in FILES if installed(name)}
    if not found:
        pytest.skip("neither libggml-python nor xllamacpp is installed (extra: witness)")
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=row_name)
def test_repack(benchmark, figures, layout, source_mib, rounds):
    case = Case(layout, source_mib)
    report(figures, layout, measure(benchmark, case, case.rivals(), rounds), None)


@pytest.mark.parametrize("layout", LLAMA_LAYOUTS, ids=row_name)
def test_witness_llama_repack(benchmark, figures, libraries, layout, source_mib, rounds):
    case = Case(layout, source_mib)
    calls = {name: call for name, library in libraries.items() if (call := case.real(library))}
    if not calls:
        pytest.skip(f"no wheel holds {layout.name}: upstream compiles it for RISC-V only")
    speeds = measure(benchmark, case, calls | case.rivals(), rounds)
    best = max(calls, key=lambda name: np.median(speeds[name]))
    figures.ratio(layout.name, report(figures, layout, speeds, best))


@pytest.fixture(scope="module")
def ik_library() -> IkGgml:
    """ik_llama.cpp's library in this process."""
    if package_folder() is None:
        pytest.skip("ik-llama-cpp-python is not installed (extra: witness)")
    return IkGgml()


@pytest.mark.parametrize("layout", IK_LAYOUTS, ids=row_name)
def test_witness_ik_repack(benchmark, figures, ik_library, layout, source_mib, rounds):
    case = Case(layout, source_mib)
    call = case.real_ik(ik_library)
    if call is None:
        pytest.skip(f"the wheel leaves {layout.source_type.name} as it is (an older build, for AVX2)")
    speeds = measure(benchmark, case, {"real": call} | case.rivals(), rounds)
    figures.ratio(row_name(layout), report(figures, layout, speeds, "real"))
