"""Offline repack and verify: the right file or none (recorded files: test_conformance_files.py and conformance)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from models import SMALL, write_model

import refimpl
from refimpl.cli import main
from refimpl.errors import RefimplError, UsageError
from refimpl.gguf.values import ValueType
from refimpl.repacking import offline
from refimpl.repacking.ik import PassTensor, run_time_pass
from refimpl.repacking.offline import compile_pattern, offline_repack
from refimpl.repacking.offline_keys import guess, parse_override
from refimpl.repacking.verify import verify
from refimpl.types import type_by_name

TENSORS = {name: ("iq4_k" if len(shape) > 1 else "iq2_k", shape) for name, (_, shape) in SMALL.items()}
"""Types whose bytes are never refused."""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "in.gguf"
    write_model(path, TENSORS, arch="llama")
    return path


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_the_run_time_pass_says_what_and_why():
    q4_k, f16 = type_by_name("q4_K"), type_by_name("f16")
    tensors = {
        "repacked to q4_k_r4": PassTensor("blk.0.ffn_up.weight", q4_k, (256, 8)),
        "its buffer is not host memory": PassTensor("blk.1.ffn_up.weight", q4_k, (256, 8), host=False),
        "a view": PassTensor("blk.2.ffn_up.weight", q4_k, (256, 8), view=True),
        "not contiguous": PassTensor("blk.3.ffn_up.weight", q4_k, (256, 8), contiguous=False),
        "read row by row: this name is never repacked": PassTensor("token_embd.weight", q4_k, (256, 8)),
        "ne1 % 4 != 0 (ne1 = 2)": PassTensor("blk.4.ffn_up.weight", q4_k, (256, 2, 2)),
        "f16 is repacked in builds for AVX512-BF16 only": PassTensor("blk.5.ffn_up.weight", f16, (256, 16)),
        "f32 has no interleaved type": PassTensor("blk.6.ffn_up.weight", type_by_name("f32"), (256, 16)),
    }
    results = run_time_pass(tensors.values(), bf16=False)
    assert [result.reason for result in results] == list(tensors)
    assert [result.layout is not None for result in results] == [True] + [False] * 7
    assert run_time_pass([tensors["f16 is repacked in builds for AVX512-BF16 only"]], bf16=True)[0].layout is not None


@pytest.mark.parametrize("slice_bytes", [1, 10_000, 4 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_repacked_file_is_verified(model, tmp_path, monkeypatch, slice_bytes, threads):
    monkeypatch.setattr(offline, "SLICE_BYTES", slice_bytes)
    out = tmp_path / "out.gguf"
    calls = []
    report = offline_repack(model, out, threads=threads, progress=lambda done, total: calls.append((done, total)))
    assert report.repacked == 7
    assert report.files == [str(out)]
    assert calls == sorted(calls)
    verdict = verify(model, out)
    assert verdict.correct
    assert verdict.repacked == report.repacked
    with refimpl.open(out, dialect="ik_llama.cpp") as header:
        assert header.tensor("blk.0.attn_q.weight").type.name == "iq4_k_r4"
        assert header.tensor("token_embd.weight").type.name == "iq4_k"
        assert header.kv["general.quantization_version"] == 2
    assert not leftovers(tmp_path)


def test_first_differences(model, tmp_path):
    out = tmp_path / "out.gguf"
    offline_repack(model, out)
    good = out.read_bytes()
    with refimpl.open(out, dialect="ik_llama.cpp") as header:
        tensor = header.tensor("blk.0.attn_q.weight")
    for offset, field in ((tensor.absolute_offset + 576 * 3 + 2, "d"), (tensor.absolute_offset + 576 * 64 - 1, "qs")):
        out.write_bytes(good[:offset] + bytes([good[offset] ^ 0x20]) + good[offset + 1 :])
        verdict = verify(model, out)
        assert not verdict.correct
        (difference,) = verdict.differences
        assert difference.tensor == tensor.name
        inside = offset - tensor.absolute_offset
        assert difference.place["byte"] == inside
        assert (difference.place["row_group"], difference.place["byte_of_block"]) == divmod(inside, 576)
        assert (difference.place["bit"], difference.place["field"]) == (5, field)


def test_differences_of_keys_and_tensors(model, tmp_path):
    out, other = tmp_path / "out.gguf", tmp_path / "other.gguf"
    offline_repack(model, out, overrides=["general.name=str:x"])
    assert [d.what for d in verify(model, out).differences] == ["key general.name is new"]
    write_model(other, {name: t for name, t in TENSORS.items() if name != "output.weight"}, arch="llama")
    assert any("tensors before" in d.what for d in verify(model, other).differences)
    write_model(other, TENSORS | {"output.weight": ("iq4_k", (256, 996))}, arch="llama")
    assert any("shape" in d.what for d in verify(model, other).differences)
    write_model(other, TENSORS | {"output.weight": ("iq2_k", (256, 1000))}, arch="llama")
    assert any("is no repack of" in d.what for d in verify(model, other).differences)


def test_nothing_to_repack_writes_nothing(tmp_path):
    path = tmp_path / "in.gguf"
    write_model(path, {"token_embd.weight": ("iq4_k", (256, 8))}, arch="llama")
    report = offline_repack(path, tmp_path / "out.gguf")
    assert (report.repacked, report.files) == (0, [])
    assert not (tmp_path / "out.gguf").exists()


def test_never_onto_an_input_and_onto_others_only_by_force(model, tmp_path):
    before = model.read_bytes()
    link, hard = tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(model)
    os.link(model, hard)
    for out in (model, link, hard, tmp_path / "x" / ".." / "in.gguf"):
        with pytest.raises(RefimplError) as caught:
            offline_repack(model, out, force=True)
        assert caught.value.code in ("E_SAME_FILE", "E_OPEN")
    assert model.read_bytes() == before
    other = tmp_path / "other.gguf"
    other.write_bytes(b"mine")
    with pytest.raises(UsageError) as caught:
        offline_repack(model, other)
    assert caught.value.code == "E_EXISTS"
    assert other.read_bytes() == b"mine"
    offline_repack(model, other, force=True)
    assert verify(model, other).correct


def test_bad_scales_are_refused(tmp_path):
    path, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_model(path, {"blk.0.attn_q.weight": ("q4_0", (256, 8))}, arch="llama")
    with refimpl.open(path) as header:
        offset = header.tensors[0].absolute_offset
    data = bytearray(path.read_bytes())
    data[offset + 1 :: 18] = bytes(len(data[offset + 1 :: 18]))
    path.write_bytes(data)
    offline_repack(path, out)
    data[offset + 18 * 5 + 1] = 0x7C
    path.write_bytes(data)
    out.unlink()
    with pytest.raises(RefimplError) as caught:
        offline_repack(path, out)
    assert caught.value.code == "E_TENSOR_DATA"
    assert "blk.0.attn_q.weight" in str(caught.value)
    assert not out.exists()
    assert not leftovers(tmp_path)
    offline_repack(path, out, check=False)
    assert verify(path, out).correct


def test_a_full_disk_and_errors_leave_nothing(model, tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offline.os, "pwrite", full)
    with pytest.raises(RefimplError) as caught:
        offline_repack(model, out)
    assert (caught.value.code, caught.value.exit_code) == ("E_IO", 4)
    monkeypatch.undo()
    monkeypatch.setattr(offline.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(RefimplError) as caught:
        offline_repack(model, out)
    assert caught.value.code == "E_SPACE"
    monkeypatch.undo()
    with pytest.raises(RefimplError) as caught:
        offline_repack(model, tmp_path / "nowhere" / "out.gguf")
    assert caught.value.code == "E_OPEN"
    assert not out.exists()
    assert not leftovers(tmp_path)


def test_a_file_cut_while_it_is_read(model, tmp_path, monkeypatch):
    real = offline._read_fully

    def cut(descriptor, data, offset, name):
        os.truncate(model, 5000)
        real(descriptor, data, offset, name)

    monkeypatch.setattr(offline, "_read_fully", cut)
    with pytest.raises(RefimplError) as caught:
        offline_repack(model, tmp_path / "out.gguf")
    assert caught.value.code == "E_DATA_BOUNDS"
    assert not (tmp_path / "out.gguf").exists()
    assert not leftovers(tmp_path)


KILLS = int(os.environ.get("REFIMPL_KILLS", "40"))
"""REFIMPL_KILLS=500 pytest tests/test_offline.py -k killed: the long run."""

KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import refimpl.kernels.ik_repack
from refimpl.repacking import offline

source, out, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
offline.SLICE_BYTES = 4096
offline.offline_repack(source, out)
complete, random = out.read_bytes(), random.Random(1)
absent = partial = 0
for _ in range(kills):
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        while True:
            offline.offline_repack(source, out, force=True, threads=2)
    time.sleep(random.random() * 0.15)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    absent += not out.exists()
    left = list(out.parent.glob(".*.tmp"))
    partial += bool(left)
    assert not out.exists() or out.read_bytes() == complete
    for path in left:
        path.unlink()
print(absent, partial)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork and SIGKILL are POSIX's")
def test_killed_at_random_moments(tmp_path, outside):
    """OUT is absent or complete, never half; the moments are spread over absent, being written, and done."""
    source, out = tmp_path / "in.gguf", tmp_path / "out" / "out.gguf"
    out.parent.mkdir()
    write_model(source, {f"blk.{i}.attn_q.weight": ("iq4_k", (256, 512)) for i in range(4)}, arch="llama")
    command = [sys.executable, "-c", KILLER, str(source), str(out), str(KILLS)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=outside, cwd=tmp_path)
    absent, partial = map(int, result.stdout.split())
    assert 0 < absent < KILLS
    assert partial > 0
    print(f"{KILLS} kills: OUT absent after {absent}, a temporary file left after {partial}")


def test_an_interrupt_leaves_nothing(model, tmp_path, outside):
    code = """
import sys, time, refimpl.cli
import refimpl.repacking.offline as offline
write = offline._write_fully
offline._write_fully = lambda *arguments: (time.sleep(0.2), write(*arguments))
offline.SLICE_BYTES = 1000
sys.exit(refimpl.cli.main(sys.argv[1:]))
"""
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-c", code, "repack", str(model), str(tmp_path / "out.gguf")]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=outside, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while not leftovers(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130
        assert err == "refimpl: E_INTERRUPTED: interrupted\n"
        assert not leftovers(tmp_path)
        assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=int:-7", (b"a.b", ValueType.I32, -7)),
        ("a=float:0.1", (b"a", ValueType.F32, float(np.float32(0.1)))),
        ("a=bool:true", (b"a", ValueType.BOOL, True)),
        ("a=str:x=y:z", (b"a", ValueType.STR, b"x=y:z")),
        ("a=int:1.5", None), ("a=int:3000000000", None), ("a=bool:1", None), ("a", None), ("=int:1", None),
        ("a=u8:1", None), ("a=str:" + "x" * 128, None), ("a=float:x", None),
    ],
)  # fmt: skip
def test_overrides(text, expected):
    if expected is not None:
        assert parse_override(text) == expected
        return
    with pytest.raises(UsageError) as caught:
        parse_override(text)
    assert caught.value.code == "E_OVERRIDE"


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (r"blk\.0\.", b"blk.0.x", True),
        (r"blk\.[0-3]\..*exps$", b"blk.3.ffn_up_exps", True),
        (r"^exps", b"blk.3.ffn_up_exps", False),
        (r"(up|down)_exps", b"blk.3.ffn_up_exps", True),
        (r"exps$", b"exps\n", False),
    ],
)
def test_patterns(pattern, name, found):
    assert bool(compile_pattern(pattern).search(name)) is found


@pytest.mark.parametrize(
    "pattern", ["(?i)x", r"\bx", "[[:alpha:]]", "a**", "(", "x{2,1}", r"\1", "é", r"\A", "[]a]", "[^]"]
)
def test_patterns_that_are_not_certain_are_refused(pattern):
    with pytest.raises(UsageError) as caught:
        compile_pattern(pattern)
    assert caught.value.code == "E_PATTERN"


def test_the_guess_takes_the_type_that_got_there_first():
    kinds = [type_by_name(name) for name in ("q4_K", "q8_0", "q8_0", "q4_K", "f32")]
    assert guess(kinds) == 7
    assert guess([]) == 0


def test_commands(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert main(["repack", str(model), str(out), "--no-fsync"]) == 0
    assert "7 of 12 tensors" in capsys.readouterr().out
    assert main(["verify", str(model), str(out)]) == 0
    assert "correct" in capsys.readouterr().out
    assert main(["repack", str(model), str(out)]) == 2
    assert capsys.readouterr().err.startswith("refimpl: E_EXISTS")
    assert main(["verify", str(model), str(model)]) == 1
    assert "general.file_type" in capsys.readouterr().out
    assert main(["verify", str(model), str(tmp_path / "missing")]) == 3
    assert main(["repack", str(model), str(tmp_path / "o2"), "--repack-pattern", "(?=x)"]) == 2
    assert main(["repack", str(model), str(tmp_path / "o2"), "--repack-pattern", "nothing"]) == 0
    assert "nothing to repack" in capsys.readouterr().out
