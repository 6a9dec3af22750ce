"""Random tensors through the real repack code of the wheels that hold it: the same bytes, and the same refusals."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from witness import installed, source_bytes

from refimpl.layouts import LLAMA_LAYOUTS as LAYOUTS
from refimpl.repacking.llama import PROFILES, layout_for
from refimpl.repacking.tensor import repack
from refimpl.types import TYPES

pytestmark = pytest.mark.witness

COMPILED = {
    "libggml": {x.name for x in LAYOUTS if not x.name.startswith("q1_0") and not x.name.endswith("x1")},
    "xllamacpp": {x.name for x in LAYOUTS if not x.name.endswith("x1")},
}
"""Layouts that each wheel holds: 16 and 18. The x1 layouts exist in builds for RISC-V only."""


class Witness:
    """One library in a child process."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("witness.py")), library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )

    def ask(self, **request: object) -> dict[str, object]:
        """One tensor; a child that died is a failure that names the signal."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            pytest.fail(f"{self.library} died ({signal.Signals(-code).name if code < 0 else code}) on {request}")
        return json.loads(line)


@pytest.fixture(scope="module", params=sorted(COMPILED))
def witness(request):
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed (extra: witness)")
    if not sys.platform.startswith("linux"):
        pytest.skip("the witnesses were tried on Linux only")
    child = Witness(request.param)
    yield child
    child.process.stdin.close()
    child.process.wait(10)
    child.process.stdout.close()


def shapes(layout, seed):
    """Random eligible shapes, and some that must be refused."""
    rng = np.random.default_rng(seed)
    length, n = layout.source_type.block_length, layout.rows
    for _ in range(6):
        blocks, groups, matrices = (int(x) for x in rng.integers(1, 6, 3))
        yield [length * blocks, n * groups, matrices]
    for _ in range(2):
        yield [length, n * int(rng.integers(1, 5)) + int(rng.integers(1, n)), int(rng.integers(1, 3))]
    yield [length, n // 2, 2]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_compiled_layout(witness, layout):
    if layout.name not in COMPILED[witness.library]:
        assert witness.ask(op="layout", layout=layout.name, type="f32", ne=[32, 16, 1], seed=0)["status"] == "absent"
        return
    for seed, ne in enumerate(shapes(layout, 7)):
        answer = witness.ask(op="layout", layout=layout.name, type=layout.source_type.name, ne=ne, seed=seed)
        source = source_bytes(seed, layout.source_type.tensor_bytes(ne))
        if layout.refusal(ne):
            untouched = np.full(source.size, 0xAA, np.uint8)
            assert answer == {"status": "refused", "sha256": hashlib.sha256(untouched).hexdigest()}
            continue
        for version in ("clear", "fast"):
            ours = repack(source, layout.source_type, layout, ne, version=version)
            assert answer == {"status": "done", "sha256": hashlib.sha256(ours).hexdigest()}, (ne, version)


def test_the_layout_that_the_buffer_chooses(witness):
    """These wheels are compiled for AVX2, whatever the machine has."""
    chosen = 0
    for kind in TYPES:
        if "llama.cpp" not in kind.dialects or kind.name in ("q8_1", "q8_K"):
            continue
        for rows in (8, 12, 16, 24, 100):
            ne = [kind.block_length * 2, rows, 1]
            answer = witness.ask(op="buffer", type=kind.name, ne=ne, seed=rows)
            layout = layout_for(kind, rows, PROFILES["x86-avx2"])
            expected = {"status": "none", "sha256": None}
            if layout:
                chosen += 1
                ours = repack(source_bytes(rows, kind.tensor_bytes(ne)), kind, layout, ne)
                expected = {"status": "done", "sha256": hashlib.sha256(ours).hexdigest()}
            assert answer == expected, (kind.name, rows)
    assert chosen == 4 * 3
