"""Compiled kernels on disk: out of date with their sources, and never a reason to fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.kernels._jit import fingerprint

CHILD = """
import refimpl
print(bytes(refimpl.repack(bytes(range(144)), "q4_0", "q4_0_8x8", (32, 8))).hex())
"""


def run(environment, folder: Path) -> str:
    command = [sys.executable, "-c", CHILD]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_damaged_files_are_compiled_again(outside, tmp_path):
    cache = tmp_path / "cache"
    environment = {**outside, "NUMBA_CACHE_DIR": str(cache)}
    first = run(environment, tmp_path)
    files = [*cache.rglob("*.nbi"), *cache.rglob("*.nbc")]
    assert files
    for size in (100, 0):
        for path in files:
            path.write_bytes(path.read_bytes()[:size])
        assert run(environment, tmp_path) == first


def test_the_fingerprint_follows_every_source(tmp_path, monkeypatch):
    from refimpl.kernels import _vector, llama_chunks

    before = fingerprint(_vector, llama_chunks)
    copy = tmp_path / "changed.py"
    shutil.copy(_vector.__file__, copy)
    copy.write_text(copy.read_text() + "#")
    monkeypatch.setattr(_vector, "__file__", str(copy))
    assert fingerprint(_vector, llama_chunks) != before


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_cache_can_be_turned_off(outside, tmp_path, value):
    cache = tmp_path / "cache"
    run({**outside, "NUMBA_CACHE_DIR": str(cache), "REFIMPL_KERNEL_CACHE": value}, tmp_path)
    assert bool([*cache.rglob("*.nbi")]) == (value == "1")
