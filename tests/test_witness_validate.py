"""Random bytes of every type through the real validation functions of the wheels that hold them: the same verdicts."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from witness_validate import installed

from refimpl.gguf.validate import validate_row_data, validate_tensor
from refimpl.gguf.validate_rules import ROW_DATA, TENSOR, Look, rule_of
from refimpl.types import TYPES

pytestmark = [
    pytest.mark.witness,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the witnesses were tried on Linux only"),
]

WITNESSES = {
    "libggml": ("llama.cpp", ROW_DATA),
    "xllamacpp": ("llama.cpp", ROW_DATA),
    "ik_llama_cpp": ("ik_llama.cpp", ROW_DATA),
    "ik_llama_cpp/tensor": ("ik_llama.cpp", TENSOR),
}
ABSENT = {
    "libggml": set(),
    "xllamacpp": set(),
    "ik_llama_cpp": {"mxfp4_r8"},
    "ik_llama_cpp/tensor": {"mxfp4_r8"},
}
"""Types that an older build does not have."""
SPICE = np.array([0x00, 0x7B, 0x7C, 0x7F, 0x80, 0xFC, 0xFF, 0xFF], np.uint8)


class Witness:
    """One library in a child process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dialect, self.function = WITNESSES[name]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("witness_validate.py")), name.partition("/")[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )

    def ask(self, kind, data, **request) -> bool | None:
        """One verdict; a child that died is a failure that names the signal."""
        request |= {"function": self.function, "type_id": kind.id, "type_bytes": kind.block_bytes}
        self.process.stdin.write(json.dumps(request | {"data_b64": base64.b64encode(data).decode()}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            pytest.fail(f"{self.name} died ({signal.Signals(-code).name if code < 0 else code}) on {request}")
        return json.loads(line)["valid"]


@pytest.fixture(scope="module", params=WITNESSES)
def witness(request):
    if not installed(request.param.partition("/")[0]):
        pytest.skip(f"{request.param} is not installed (extra: witness)")
    child = Witness(request.param)
    yield child
    child.process.stdin.close()
    child.process.wait(10)
    child.process.stdout.close()


def samples(rng, nbytes, rule, unit):
    """Good bytes, random ones, and good ones with a few damaged where something is looked at, or anywhere."""
    yield np.zeros(nbytes, np.uint8)
    yield np.full(nbytes, 0xFF, np.uint8)
    for _ in range(3):
        yield rng.integers(0, 256, nbytes, dtype=np.uint8)
    for trial in range(24):
        data = rng.integers(0, 256, nbytes, dtype=np.uint8) & 0xBF
        for _ in range(trial % 3):
            start = int(rng.integers(0, nbytes))
            if isinstance(rule, Look) and trial % 2:
                span = rule.width * len(rule.fields)
                start = start // unit * unit + rule.offset + int(rng.integers(0, span)) // rule.width * rule.width
            width = rule.width if isinstance(rule, Look) else 2
            data[start : start + width] = rng.choice(SPICE, data[start : start + width].size)
        yield data


def test_every_type(witness, rng):
    absent, verdicts = set(), set()
    for kind in TYPES:
        if witness.dialect not in kind.dialects:
            continue
        rule = rule_of(kind, witness.dialect, witness.function)
        for blocks, rows in ((1, 8), (2, 8), (3, 16)):
            shape = (blocks * kind.block_length, rows)
            row_bytes, nbytes = kind.row_bytes(shape[0]), kind.tensor_bytes(shape)
            unit = rule.unit_bytes(kind.block_bytes, row_bytes) if isinstance(rule, Look) else 1
            for number, data in enumerate(samples(rng, nbytes, rule, unit)):
                if witness.function == TENSOR:
                    real = witness.ask(kind, data, ne=shape, row_bytes=row_bytes)
                    options = {"dialect": witness.dialect, "function": TENSOR}
                    ours = [validate_tensor(data, kind, shape, version=v, **options).valid for v in ("clear", "fast")]
                else:
                    # Runs of any length, whole blocks or not.
                    run = data[: nbytes - int(rng.integers(0, kind.block_bytes + 1)) * (number % 4 == 0)]
                    real = witness.ask(kind, run)
                    options = {"dialect": witness.dialect}
                    ours = [validate_row_data(run, kind, version=v, **options).valid for v in ("clear", "fast")]
                if real is None:
                    absent.add(kind.name)
                    break
                assert ours == [real, real], (kind.name, shape, number)
                verdicts.add((kind.name, real))
    assert absent == ABSENT[witness.name]
    # Each type that is looked at was seen good and bad.
    for kind in TYPES:
        if witness.dialect in kind.dialects and kind.name not in absent:
            rule = rule_of(kind, witness.dialect, witness.function)
            expected = {"never": {True}, "always": {False}}.get(rule if isinstance(rule, str) else "", {True, False})
            if rule == "never" and witness.dialect == "llama.cpp":
                expected = {True, False} if kind.block_bytes > 1 else {True}  # for its size
            assert {real for name, real in verdicts if name == kind.name} == expected, kind.name
