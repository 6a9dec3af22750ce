"""The linter of golden/: the delivered tree is clean, and each class of damage is found."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from refimpl.conformance import lint
from refimpl.conformance.schema import KINDS

GOLDEN = Path(str(resources.files("refimpl.golden")))
REPACK, DISPATCH, PLACEMENT, VALIDATE = (
    "repack/repack-llama.json",
    "repack/repack-llama-dispatch.json",
    "placement/repack-llama-placement.json",
    "gguf/validate.json",
)


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The delivered tree with the first entries of each file."""
    root = tmp_path_factory.mktemp("small") / "golden"
    shutil.copytree(GOLDEN / "schemas", root / "schemas")
    for name in (REPACK, DISPATCH, PLACEMENT, VALIDATE):
        content = json.loads((GOLDEN / name).read_bytes())
        for key in ("cases", "op_cases"):
            if key in content:
                content[key] = content[key][:10]
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(lint.canonical(content))
    lint.write_index(root)
    return root


@pytest.fixture
def tree(small_tree: Path, tmp_path: Path) -> Path:
    """A golden tree to be damaged."""
    return Path(shutil.copytree(small_tree, tmp_path / "golden"))


def findings(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    code = lint.main([str(argument) for argument in arguments])
    lines = capsys.readouterr().out.splitlines()
    assert code == (1 if lines else 0)
    return lines


def test_the_delivered_tree_is_clean() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "refimpl.conformance.lint"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_delivered_index_is_what_the_linter_writes() -> None:
    rows = [lint.index_row(GOLDEN, path) for path in lint.vectors_files(GOLDEN)]
    assert json.loads((GOLDEN / "index.json").read_bytes())["files"] == rows
    assert [row["entries"] for row in rows] == [
        {"cases": 134},
        {"cases": 1272},
        {"cases": 53},
        {"cases": 21},
        {"cases": 342},
        {"cases": 630, "op_cases": 1376},
        {"cases": 230},
    ]


def test_the_readme_names_every_file_and_every_kind() -> None:
    text = (GOLDEN / "README.md").read_text("utf-8")
    names = [path.relative_to(GOLDEN).as_posix() for path in lint.vectors_files(GOLDEN)]
    assert [name for name in (*names, *KINDS) if name not in text] == []


def test_a_small_tree_is_clean(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(capsys, tree) == []


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("name", "edit", "found"),
    [
        (REPACK, lambda d: d["cases"][0].pop("seed"), "$.cases[0]: 'seed' is a required property"),
        (REPACK, lambda d: d["cases"][0].update(src_sha256="AB"), "$.cases[0].src_sha256: 'AB' does not match"),
        (REPACK, lambda d: d["cases"][0].update(dst_sha256=None), "$.cases[0].dst_sha256: None is not of type"),
        (REPACK, lambda d: d["cases"][0].update(eligible=0), "$.cases[0].eligible: 0 is not of type 'boolean'"),
        (REPACK, lambda d: d["cases"][0].update(eligible=False), "$.cases[0].dst_sha256"),
        (REPACK, lambda d: d["cases"][0].update(mask="fin16"), "$.cases[0].mask"),
        (REPACK, lambda d: d["cases"][0].pop("dst_b64"), "'dst_b64' is a dependency of 'src_b64'"),
        (REPACK, lambda d: d["cases"][0].update(src_b64="%"), "$.cases[0].src_b64"),
        (REPACK, lambda d: d["cases"][1].update(id=d["cases"][0]["id"]), "id q1_0_4x4/min occurs 2 times"),
        (REPACK, lambda d: d.update(dialect="llama"), "$.dialect: 'llama' is not one of"),
        (REPACK, lambda d: d.update(source={"project": "llama.cpp"}), "$.source"),
        (REPACK, lambda d: d.update(count=3), "count is 3, entries are 10"),
        (REPACK, lambda d: d.update(schema="refimpl-golden/9"), "schema is 'refimpl-golden/9'"),
        (DISPATCH, lambda d: d["profiles"]["x86-avx2"].pop("avx2"), "'avx2' is a required property"),
        (DISPATCH, lambda d: d["profiles"]["x86-avx2"].update(avx2=2), "$.profiles['x86-avx2'].avx2: 2 is not one of"),
        (DISPATCH, lambda d: d["profiles"].pop("x86-sse42"), "profiles has no 'x86-sse42'"),
        (DISPATCH, lambda d: d["cases"][0]["layout_by_ne1"].update(a=None), "'a' does not match"),
        (DISPATCH, lambda d: d["cases"][0]["layout_by_ne1"].update({"8": "x8"}), "$.cases[0].layout_by_ne1['8']"),
        (DISPATCH, lambda d: d["op_cases"][0].update(supported=1), "$.op_cases[0].supported"),
        (VALIDATE, lambda d: d["cases"][0].update(valid=None), "$.cases[0].valid: None is not of type 'boolean'"),
        (VALIDATE, lambda d: d["cases"][0].update(dialect="llama"), "$.cases[0].dialect: 'llama' is not one of"),
        (VALIDATE, lambda d: d["cases"][0].update(bytes_b64="AAA"), "$.cases[0].bytes_b64: 'AAA' does not match"),
        (VALIDATE, lambda d: d["cases"][0].update(function="iqk_validate_tensor"), "'ne' is a required property"),
        (VALIDATE, lambda d: d["cases"][0].update(ne=[16]), "$.cases[0]: False schema does not allow [16]"),
        (VALIDATE, lambda d: d["cases"][0].pop("type_id"), "'type_id' is a required property"),
        (PLACEMENT, lambda d: d["cases"][0].update(model="gone"), "models has no 'gone'"),
        (PLACEMENT, lambda d: d["cases"][0]["options"].pop("mmap"), "'mmap' is a required property"),
        (PLACEMENT, lambda d: d["cases"][0]["options"].update(override_tensor=["x=RPC0"]), "'x=RPC0' does not match"),
        (PLACEMENT, lambda d: d["cases"][0].update(buffer_mib={"CPU": 0}), "$.cases[0].buffer_mib.CPU"),
        (PLACEMENT, lambda d: d["cases"][0]["cpu_repack"].append(["a"]), "$.cases[0].cpu_repack"),
        (PLACEMENT, lambda d: d["models"]["tied-q4_K"].pop("tensors"), "'tensors' is a required property"),
    ],
)
def test_damage_to_a_document_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, edit: Edit, found: str
) -> None:
    """The index is written anew where it can be, so that nothing but the damage itself is left to be found."""
    document = json.loads((tree / name).read_bytes())
    edit(document)
    (tree / name).write_bytes(lint.canonical(document))
    if document["schema"] == "refimpl-golden/1":
        lint.write_index(tree)
    lines = findings(capsys, tree)
    assert lines
    assert all(line.startswith(name) for line in lines)
    assert any(found in line for line in lines), lines


@pytest.mark.parametrize(
    ("name", "rewrite"),
    [
        (REPACK, lambda text: text.rstrip("\n")),
        (REPACK, lambda text: text + "\n"),
        (REPACK, lambda text: "\ufeff" + text),
        (REPACK, lambda text: text.replace(",", ", ", 1)),
        (REPACK, lambda text: text.replace("seed", r"\u0073eed", 1)),
        (REPACK, lambda text: text.replace('"commit"', '"remark":"\u00e9","commit"', 1)),
        (REPACK, lambda text: text.replace('"kind":"repack"', '"kind":"repack","kind":"repack"', 1)),
        (PLACEMENT, lambda text: text.replace("0.38", "0.380", 1)),
        (DISPATCH, lambda text: json.dumps(dict(sorted(json.loads(text).items())), separators=(",", ":")) + "\n"),
    ],
)
def test_another_way_of_writing_the_same_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, rewrite: Callable[[str], str]
) -> None:
    path = tree / name
    text = path.read_text("utf-8")
    assert rewrite(text) != text
    path.write_text(rewrite(text), "utf-8")
    lines = findings(capsys, tree)
    assert any(line.startswith(f"{name}: ") for line in lines)
    assert any(word in line for line in lines for word in ("canonical", "first keys", "not JSON")), lines


def test_damage_to_the_tree_is_found(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "repack" / "notes.txt").write_text("x")
    (tree / "repack" / "stray.json").write_bytes((tree / REPACK).read_bytes())
    (tree / DISPATCH).unlink()
    document = json.loads((tree / PLACEMENT).read_bytes())
    document["cases"].pop()
    (tree / PLACEMENT).write_bytes(lint.canonical(document))
    lines = "\n".join(findings(capsys, tree))
    assert "repack/notes.txt: not JSON" in lines
    assert "repack/notes.txt: not listed in index.json" in lines
    assert "repack/stray.json: not listed in index.json" in lines
    assert f"{DISPATCH}: listed in index.json, but not there" in lines
    assert f"{PLACEMENT}: entries is {{'cases': 9}}, index.json says {{'cases': 10}}" in lines
    assert f"{PLACEMENT}: sha256 is" in lines


@pytest.mark.parametrize(
    ("raw", "found"),
    [(None, "cannot be read"), (b"[]\n", "cannot be read"), (b"{", "cannot be read"), (b" ", "canonical")],
)
def test_damage_to_the_index_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], raw: bytes | None, found: str
) -> None:
    path = tree / "index.json"
    if raw is None:
        path.unlink()
    else:
        path.write_bytes(raw + path.read_bytes() if raw == b" " else raw)
    assert any(line.startswith("index.json: ") and found in line for line in findings(capsys, tree))


@pytest.mark.parametrize(
    ("raw", "found"),
    [(b"{", "Expecting"), (b'{"type":"strang"}', "strang"), (None, "no envelope.schema.json")],
)
def test_damage_to_a_schema_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], raw: bytes | None, found: str
) -> None:
    path = tree / "schemas" / "envelope.schema.json"
    if raw is None:
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(raw)
    assert any(line.startswith("schemas") and found in line for line in findings(capsys, tree))


def test_the_index_is_written_anew(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = (tree / "index.json").read_bytes()
    packed = tree / "repack" / "more.json.gz"
    packed.write_bytes(gzip.compress((tree / REPACK).read_bytes()))
    assert findings(capsys, tree) == ["repack/more.json.gz: not listed in index.json"]
    assert findings(capsys, "--write-index", tree) == []
    rows = {row["path"]: row for row in json.loads((tree / "index.json").read_bytes())["files"]}
    assert rows["repack/more.json.gz"]["sha256"] == rows[REPACK]["sha256"]
    packed.unlink()
    assert findings(capsys, "--write-index", tree) == []
    assert (tree / "index.json").read_bytes() == index


def test_files_are_checked_alone_anywhere(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = json.loads((tree / REPACK).read_bytes())
    extra["cases"] = extra["cases"][:1]
    extra["cases"][0]["extra"] = {}
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_bytes(lint.canonical(extra))
    bad.write_bytes(lint.canonical({**extra, "cases": []}))
    assert findings(capsys, good) == []
    assert findings(capsys, good, bad) == [f"{bad}: $.cases: [] should be non-empty"]
    assert findings(capsys, tmp_path / "gone.json") == [f"{tmp_path / 'gone.json'}: No such file or directory"]


def test_without_jsonschema_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert findings(capsys) == ["the linter needs the package jsonschema (pip install jsonschema)"]
