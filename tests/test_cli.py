"""The commands as a user types them: output, one-line errors, exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from models import SMALL, write_model

from refimpl.cli import main
from refimpl.layouts import LAYOUTS


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.gguf"
    write_model(path)
    return path


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *arguments):
    """Run a command that must fail with one line on stderr and nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("refimpl: E_")
    assert "Traceback" not in err
    return code, err.split(":")[1].strip()


def test_load_reports(capsys, model):
    code, out, err = run(capsys, "load", model, "--cpu", "x86-avx512", "--digest", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert {"seconds", "rss", "peak", "repacked", "reclaimed_bytes", "buffers", "load_mode", "mmap", "threads"} <= set(
        report
    )
    assert set(report["rss"]["before"]) == set(report["rss"]["after"]) == {"total", "anon", "file"}
    assert report["peak"]["total"] >= report["rss"]["after"]["total"] * 0.98
    assert report["repacked"]["tensors"] == 5
    assert sorted(report["digests"]) == sorted(SMALL)
    assert report["behaves_like"].startswith("llama.cpp")


def test_load_in_words(capsys, model):
    code, out, err = run(capsys, "load", "-m", model, "--cpu", "x86-64-v3", "--reclaim", "end", "--load-threads", 1)
    assert (code, err) == (0, "")
    for words in ("repacked", "4 tensors", "q4_0_8x8", "reclaim end", "peak", "CPU_Mapped", "CPU_REPACK"):
        assert words in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_digest_lines_are_those_of_sha256sum(capsys, model):
    _, out, _ = run(capsys, "load", model, "--cpu", "x86-avx512", "--digest")
    lines = [line.split("  ") for line in out.splitlines() if len(line) > 66 and line[64:66] == "  "]
    assert sorted(name for _, name in lines) == sorted(SMALL)


def test_no_repack(capsys, model):
    code, out, _ = run(capsys, "load", model, "-nr", "--json")
    assert code == 0
    assert json.loads(out)["repacked"] == {"tensors": 0, "bytes": 0, "layouts": {}}


def test_inspect(capsys, model):
    code, out, err = run(capsys, "inspect", model, "--tensors", "--cpu", "x86-avx512")
    assert (code, err) == (0, "")
    for words in ("general.architecture", "'qwen3'", "q4_0", "blk.0.attn_q.weight", "q4_0_8x8", "no: ", "256x513"):
        assert words in out
    code, out, _ = run(capsys, "inspect", model, "--json")
    data = json.loads(out)
    assert code == 0
    assert [t["name"] for t in data["tensors"]] == list(SMALL)
    assert data["tensor_bytes"] == sum(t["bytes"] for t in data["tensors"])
    ik = {t["name"]: t["ik_llama.cpp"] for t in data["tensors"]}
    assert ik["blk.0.attn_q.weight"]["layout"] == "q4_0_r8"
    assert ik["token_embd.weight"]["layout"] is None
    assert "never repacked" in ik["token_embd.weight"]["reason"]
    assert "ne1" in ik["blk.0.ffn_up.weight"]["reason"]


def test_inspect_shows_what_no_loader_takes(capsys, tmp_path):
    path = tmp_path / "odd.gguf"
    write_model(path, arch="nobody")
    code, out, _ = run(capsys, "inspect", path)
    assert code == 0
    assert "E_ARCH" in out
    assert refused(capsys, "load", path) == (3, "E_ARCH")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.source_type.name}-{layout.name}")
def test_layout(capsys, layout):
    arguments = ["layout", layout.name.upper(), "--source", layout.source_type.name]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert layout.name in out
    _, out, _ = run(capsys, *arguments, "--json")
    data = json.loads(out)
    if "rule" in data:
        assert refused(capsys, *arguments, "--find", "0") == (2, "E_LAYOUT_BITS")
        return
    assert len(data["source_of_target_bit"]) == 8 * data["super_block_bytes"]
    starts = [field["target_offset"] for field in data["fields"]]
    assert starts == sorted(starts)


def test_find_in_both_directions(capsys):
    _, out, _ = run(capsys, "layout", "q4_k_r4", "--find", "100:6", "--json")
    (origin,) = json.loads(out)["target"]
    assert (origin["row"], origin["source_byte"], origin["source_bit"]) == (1, 28, 2)
    _, out, _ = run(capsys, "layout", "q4_k_r4", "--find", "28:2", "--json")
    goes = [x for x in json.loads(out)["source"] if x["row"] == origin["row"]]
    assert [(x["target_byte"], x["target_bit"]) for x in goes] == [(100, 6)]
    _, out, _ = run(capsys, "layout", "q4_0_8x8", "--find", "20")
    assert out.count("inverted") == 2
    assert "goes to" not in out  # a source block has 18 bytes
    for wrong in ("576", "1:8", "x", "-1", "1:", "1:1:1", "٣"):
        assert refused(capsys, "layout", "q4_k_r4", f"--find={wrong}") == (2, "E_USAGE")
    assert refused(capsys, "layout", "--find", "1") == (2, "E_USAGE")


def test_picture(capsys):
    code, out, _ = run(capsys, "layout", "iq3_s_r4", "--svg")
    assert code == 0
    root = ElementTree.fromstring(out)
    assert root.tag.endswith("svg")
    assert out.count("<rect") > 440


def test_all_layouts(capsys):
    _, out, _ = run(capsys, "layout")
    assert all(layout.name in out for layout in LAYOUTS)
    _, out, _ = run(capsys, "layout", "--json")
    assert len(json.loads(out)) == len(LAYOUTS)


def test_files_that_cannot_be_loaded(capsys, tmp_path, model):
    whole = model.read_bytes()
    files = {"empty": b"", "text": b"Not a model.\n" * 100, "cut": whole[:-100_000]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for command in ("load", "inspect"):
        assert refused(capsys, command, tmp_path / "missing") == (3, "E_OPEN")
        assert refused(capsys, command, tmp_path) == (3, "E_OPEN")
        assert refused(capsys, command, tmp_path / "empty") == (3, "E_TRUNCATED")
        assert refused(capsys, command, tmp_path / "text") == (3, "E_MAGIC")
    assert refused(capsys, "load", tmp_path / "cut") == (3, "E_DATA_BOUNDS")


def test_an_unreadable_file(capsys, model, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    model.chmod(0)
    if os.access(model, os.R_OK):  # a user who may read everything
        monkeypatch.setattr("refimpl.gguf.source.io.FileIO", refuse)
    assert refused(capsys, "load", model) == (4, "E_PERMISSION")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "E_USAGE"),
        (["lood"], "E_USAGE"),
        (["load"], "E_USAGE"),
        (["load", "", "-m", "x"], "E_USAGE"),
        (["load", "a", "-m", "b"], "E_USAGE"),
        (["load", "MODEL", "--nonsense"], "E_USAGE"),
        (["load", "MODEL", "--load-threads", "many"], "E_USAGE"),
        (["load", "MODEL", "--load-threads", "0"], "E_THREADS"),
        (["load", "MODEL", "--reclaim", "later"], "E_RECLAIM"),
        (["load", "MODEL", "--cpu", "pentium"], "E_CPU"),
        (["load", "MODEL", "--load-mode", "dio"], "E_LOAD_MODE"),
        (["layout", "q4_0_9x9"], "E_LAYOUT"),
        (["conformance", "--kind", "nonsense"], "E_KIND"),
        (["conformance", "--dialect", "nonsense"], "E_USAGE"),
    ],
)
def test_bad_usage(capsys, model, arguments, code):
    assert refused(capsys, *(model if a == "MODEL" else a for a in arguments)) == (2, code)


def test_control_characters_and_odd_bytes_stay_on_one_line(capsys, tmp_path):
    assert refused(capsys, "load", f"{tmp_path}/a\nb\tc")[1] == "E_OPEN"
    assert refused(capsys, "load", "\udcff\udcfe")[1] == "E_OPEN"


def test_help_loads_neither_numba_nor_numpy(outside, tmp_path):
    code = """
import sys, refimpl.cli
try:
    refimpl.cli.main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"numba", "numpy", "rich", "psutil", "gguf"} & set(sys.modules)
assert not heavy, heavy
"""
    for arguments in (["--help"], ["load", "--help"], ["--version"], ["lood"]):
        command = [sys.executable, "-c", code, *arguments]
        result = subprocess.run(command, env=outside, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert "refimpl" in result.stdout + result.stderr


def test_a_closed_pipe_is_no_error(outside, tmp_path):
    command = f'"{sys.executable}" -m refimpl layout --json | head -c 10'
    result = subprocess.run(command, shell=True, env=outside, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (len(result.stdout), result.stderr) == (10, "")


def test_output_that_the_encoding_cannot_hold(outside, tmp_path):
    environment = {**outside, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for arguments, code in ((["layout", "q4_k_r4"], 0), (["layout", "--json"], 0), (["load", "é"], 3)):
        command = [sys.executable, "-m", "refimpl", *arguments]
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
        assert result.returncode == code
        assert result.stdout.isascii()
        assert b"Traceback" not in result.stderr
        assert (result.stderr == b"") == (code == 0)


def test_the_verdict_stands_when_nobody_reads_the_report(outside, tmp_path):
    impl = f"{sys.executable} -c pass"
    command = f"('{sys.executable}' -m refimpl conformance --kind repack-placement --impl '{impl}'; echo $? >rc) | true"
    subprocess.run(command, shell=True, env=outside, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "rc").read_text() == "1\n"


def test_closed_streams(outside, tmp_path):
    for redirect, code in ((">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)):
        command = f"'{sys.executable}' -m refimpl layout q4_0_8x8 {redirect}"
        result = subprocess.run(command, shell=True, env=outside, cwd=tmp_path, check=False, capture_output=True)
        assert (result.returncode, result.stderr) == (code, b"")
    command = f"'{sys.executable}' -m refimpl load nothing 2>&-"
    assert subprocess.run(command, shell=True, env=outside, cwd=tmp_path, check=False).returncode == 3


def test_names_in_a_file_cannot_steer_the_terminal(capsys, tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, {**SMALL, "\x1b[31mred\n": ("f32", (8,))}, arch="qwen3")
    for arguments in (["load", path, "--digest"], ["inspect", path, "--tensors"]):
        code, out, err = run(capsys, *arguments)
        assert code == 0
        assert "\x1b" not in out + err
        assert "\\x1b[31mred\\n" in out


@pytest.mark.model
def test_the_packaged_model_by_name(capsys, gemma):
    code, out, err = run(capsys, "load", "gemma3-270m", "--cpu", "x86-avx512", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["repacked"]["bytes"] == 13271040
