"""Random tensors through ik_llama.cpp's own run-time repack, and whole files through its llama-quantize."""

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
from models import LLAMA_KV, SMALL, write_model
from witness import source_bytes
from witness_ik import package_folder

from refimpl.repacking.ik import layout_for
from refimpl.repacking.offline import offline_repack
from refimpl.repacking.tensor import repack
from refimpl.types import TYPES

pytestmark = [
    pytest.mark.witness,
    pytest.mark.skipif(package_folder() is None, reason="ik-llama-cpp-python is not installed (extra: witness)"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the witness was tried on Linux only"),
]

NEWER = {"mxfp4"}
"""Types whose interleaved form the wheel does not know yet: it leaves them as they are."""
NOT_STORED = {"q8_0_x4", "q8_1_x4", "q8_2_x4", "q8_K16", "q8_K32", "q8_K64", "q8_K128", "q8_KR8"}
"""Activations; the library has no rows of them."""


@pytest.fixture(scope="module")
def witness():
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("witness_ik.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )

    def ask(**request):
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            code = child.wait()
            pytest.fail(f"the witness died ({signal.Signals(-code).name if code < 0 else code}) on {request}")
        return json.loads(line)

    yield ask
    child.stdin.close()
    child.wait(10)
    child.stdout.close()


def shapes(kind, rows, rng):
    """Eligible shapes with one and several matrices, and row counts that do not fit."""
    length = max(kind.block_length, 32)
    for _ in range(5):
        blocks, groups, matrices = (int(x) for x in rng.integers(1, 5, 3))
        yield [length * blocks, rows * groups, matrices]
    yield [length * 2, rows + 1, 1]
    yield [length, max(rows // 2, 1), 2]


@pytest.mark.parametrize("kind", [t for t in TYPES if "ik_llama.cpp" in t.dialects], ids=lambda kind: kind.name)
def test_every_type(witness, kind):
    if kind.name in NOT_STORED or kind.name == "mxfp4_r8":
        pytest.skip(f"{kind.name}: not a type of stored tensors, or not known to the wheel")
    rng = np.random.default_rng(kind.id)
    for seed, ne in enumerate(shapes(kind, kind.interleaved_rows or 8, rng)):
        for name in ("blk.0.ffn_up.weight", "token_embd.weight"):
            answer = witness(type=kind.name, ne=ne, seed=seed, name=name)
            source = source_bytes(seed, kind.tensor_bytes(ne))
            layout = None if kind.name in NEWER else layout_for(name, kind, ne, bf16=False)
            ours = repack(source, kind, layout, ne) if layout else source
            expected = {"type": layout.name if layout else kind.name, "sha256": hashlib.sha256(ours).hexdigest()}
            assert answer == expected, (ne, name)


def real_tool(source: Path, out: Path, *options: str) -> None:
    tool = package_folder() / "bin" / "llama-quantize"
    command = [str(tool), "--repack", *options, str(source), str(out), "Q4_K_M", "1"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, result.stderr[-2000:]


UNCHECKED = ["iq4_k", "iq5_k", "iq2_k", "iq3_k", "q6_0", "iq6_k", "iq4_ks"]
"""Types whose bytes are all fine: the real tool refuses NaN in the scales of others."""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--repack-pattern", "attn_.,ffn_up"),
        ("--override-kv", "general.name=str:other", "--override-kv", "llama.new=float:2.5"),
    ],
    ids=["plain", "pattern", "override"],
)
def test_files(tmp_path, options):
    source = tmp_path / "in.gguf"
    tensors = {name: (UNCHECKED[i % 7], shape) for i, (name, (_, shape)) in enumerate(SMALL.items())}
    write_model(source, tensors, arch="llama", kv=LLAMA_KV)
    real_tool(source, tmp_path / "real.gguf", *options)
    values = {"--repack-pattern": [], "--override-kv": []}
    for name, value in zip(options[::2], options[1::2], strict=True):
        values[name].append(value)
    report = offline_repack(
        source, tmp_path / "ours.gguf", patterns=values["--repack-pattern"], overrides=values["--override-kv"]
    )
    assert report.repacked > 0
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "real.gguf").read_bytes()


@pytest.mark.model
def test_the_real_model(tmp_path, gemma):
    real_tool(gemma, tmp_path / "real.gguf")
    offline_repack(gemma, tmp_path / "ours.gguf", fsync=False)
    with open(tmp_path / "real.gguf", "rb") as real, open(tmp_path / "ours.gguf", "rb") as ours:
        assert hashlib.file_digest(ours, "sha256").hexdigest() == hashlib.file_digest(real, "sha256").hexdigest()
