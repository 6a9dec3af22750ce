"""Recipes both ways, sparse files made from them, and the commands that do it."""

from __future__ import annotations

import json
import math
import os
import struct
from importlib import resources
from pathlib import Path

import pytest
from gguf_files import gguf, info, small
from models import LLAMA, write_llama, write_model, write_split

import refimpl
from refimpl.cli import main
from refimpl.conformance import lint
from refimpl.errors import RecipeError, RefimplError
from refimpl.gguf.recipe import make_sparse, read_recipe, recipe_bytes, recipe_header, recipe_lines, recipe_of
from refimpl.gguf.source import open_header
from refimpl.gguf.values import ValueType as V
from refimpl.gguf.writer import write_gguf
from refimpl.types import type_by_name

GOLDEN = Path(str(resources.files("refimpl.golden")))
RECIPES = sorted((GOLDEN / "models").glob("*.json"))
NOTES = {"quantization", "shape_source"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_file_recipe(path: Path, tmp_path: Path) -> None:
    raw = path.read_bytes()
    recipe = read_recipe(raw, path.name)
    assert "".join(recipe_lines(recipe)).encode() == raw
    out = tmp_path / "model.gguf"
    make_sparse(recipe, out)
    assert out.stat().st_size == recipe["file_size"]
    with refimpl.open(out) as header:
        back = recipe_of(header, path.stem)
        assert header.data_start + header.data_bytes == recipe["file_size"]
    assert set(recipe) - set(back) <= NOTES
    assert {**{key: recipe[key] for key in recipe if key in NOTES}, **back} == recipe
    assert list(back["kv"]) == list(recipe["kv"])
    if os.stat(out).st_blocks:
        assert os.stat(out).st_blocks * 512 < 1 << 20


def test_there_are_31_and_the_index_lists_them() -> None:
    index = json.loads((GOLDEN / "index.json").read_bytes())
    assert len(RECIPES) == 31
    assert index["recipes"] == [lint.recipe_row(GOLDEN, path) for path in RECIPES]


SAMPLES = {
    V.U8: [0, 255], V.I8: [-128, 127], V.U16: [0, 65535], V.I16: [-32768, 1], V.U32: [7, 2**32 - 1],
    V.I32: [-(2**31), 1], V.F32: [0.1, 1e-45, 3.4028234663852886e38, -0.0, 16777217.0], V.BOOL: [True, False],
    V.STR: ["", "ü\0x", b"\xff\xfe\x00", "\U0001f600"], V.U64: [0, 2**64 - 1], V.I64: [-(2**63), 1],
    V.F64: [0.1, -1e300, 5e-324],
}  # fmt: skip


def test_every_type_of_value_both_ways(tmp_path: Path) -> None:
    kv = [(f"one.{kind.name}.{i}", kind, value) for kind, values in SAMPLES.items() for i, value in enumerate(values)]
    kv += [(f"arr.{kind.name}", ("arr", kind), values) for kind, values in SAMPLES.items()]
    kv += [(f"none.{kind.name}", ("arr", kind), []) for kind in SAMPLES]
    kv += [(f"odd.{kind.name}", ("arr", kind), [math.inf, -math.inf, math.nan]) for kind in (V.F32, V.F64)]
    kv += [(b"\xffkey\0more", V.U8, 1), ("general.alignment", V.U32, 64)]
    tensors = [(b"t\xff", type_by_name("f16"), (), None), ("u", type_by_name("q8_0"), (32, 0, 3), None)]
    path = tmp_path / "m.gguf"
    write_gguf(path, kv, tensors, alignment=64, version=2)
    with refimpl.open(path) as header:
        text = "".join(recipe_lines(recipe_of(header, "m")))
    recipe = read_recipe(text.encode(), "m")
    assert recipe["kv"]["one.F32.0"] == ["f32", 0.1]
    assert recipe["kv"]["odd.F32"] == ["arr:f32", ["inf", "-inf", "nan"]]
    assert (recipe["gguf_version"], recipe["alignment"]) == (2, 64)
    make_sparse(recipe, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "bits", [0, 1, 0x00800000, 0x3DCCCCCD, 0x7F7FFFFF, 0x7F7FFFFE, 0x4B800001, 0x80000000, 0x3F800001]
)
def test_an_f32_comes_back_bit_for_bit(bits: int) -> None:
    data = gguf([struct.pack("<Q", 1) + b"k" + struct.pack("<iI", 6, bits)])
    recipe = recipe_of(open_header(data), "m")
    assert recipe_bytes(json.loads("".join(recipe_lines(recipe)))) == data


def test_a_header_without_a_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    with refimpl.open(tmp_path / "m.gguf") as header:
        made = recipe_header(recipe_of(header, "m"))
        assert list(made.tensors) == list(header.tensors)
        assert (made.size, made.data_start) == (header.size, header.data_start)
        assert list(made.kv.items()) == list(header.kv.items())


def test_a_download_that_has_only_its_header(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    with refimpl.open(whole) as header:
        recipe, start = recipe_of(header, "m"), header.data_start
    assert recipe_of(open_header(whole[:start]), "m") == {**recipe, "file_size": start}
    assert recipe_of(open_header(whole[: start - 1], partial=True), "m") == recipe


def test_types_of_the_fork_have_their_dialect_in_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, [], [("t", type_by_name("q8_K", "ik_llama.cpp"), (256,), None)])
    with refimpl.open(path, dialect="ik_llama.cpp") as header:
        recipe = recipe_of(header, "m")
    assert recipe["dialect"] == "ik_llama.cpp"
    assert recipe_header(recipe).tensors[0].nbytes == 296


def test_what_no_recipe_describes(tmp_path: Path) -> None:
    with pytest.raises(RefimplError) as caught:
        recipe_of(open_header(gguf([], [info(b"t", (4,), 77, 0)], bytes(32))), "m")
    assert caught.value.code == "E_TENSOR_TYPE"
    gaps = gguf([], [info(b"t", (4,), 0, 32)], bytes(64))
    with pytest.raises(RecipeError):
        recipe_of(open_header(gaps, dialect="ik_llama.cpp", allow_gaps=True), "m")
    write_split(tmp_path, [{name: LLAMA[name] for name in part} for part in (list(LLAMA)[:4], list(LLAMA)[4:])])
    with refimpl.open(tmp_path / "m") as header, pytest.raises(RecipeError):
        recipe_of(header, "m")


GOOD = {
    "name": "m", "arch": "llama", "gguf_version": 3, "alignment": 32, "file_size": 256,
    "kv": {"a": ["u32", 1]}, "tensors": [["t", "f32", [4]]], "tensor_bytes": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"kv": None}, {"kv": []}, {"tensors": {}}, {"alignment": "32"}, {"alignment": True}, {"alignment": 48},
        {"alignment": 64}, {"gguf_version": 4}, {"file_size": 10}, {"file_size": -1}, {"file_size": 1.5},
        {"kv": {"a": 1}}, {"kv": {"a": ["u32"]}}, {"kv": {"a": ["u33", 1]}}, {"kv": {"a": ["u32", -1]}},
        {"kv": {"a": ["u32", "1"]}}, {"kv": {"a": ["u32", 1.0]}}, {"kv": {"a": ["u32", True]}}, {"kv": {"": ["u8", 1]}},
        {"kv": {"a": ["bool", 1]}}, {"kv": {"a": ["str", 1]}}, {"kv": {"a": ["f32", "infinity"]}},
        {"kv": {"a": ["f32", 1e300]}}, {"kv": {"a": ["arr:u8", 1]}}, {"kv": {"a": ["arr:u8", [256]]}},
        {"kv": {"a": ["arr:arr:u8", []]}}, {"kv": {"a": ["str", "\ud800"]}}, {"kv": {"a": [["u8"], 1]}},
        {"tensors": [["t", "f32"]]}, {"tensors": [["t", "f33", [4]]]}, {"tensors": [["t", "q8_0", [33]]]},
        {"tensors": [["t", "f32", [-4]]]}, {"tensors": [["t", "f32", ["4"]]]}, {"tensors": [["t", "f32", [4.0]]]},
        {"tensors": [["t", "f32", [1] * 5]]}, {"tensors": [["t" * 64, "f32", [4]]]}, {"tensors": [[1, "f32", [4]]]},
        {"tensors": [["t", "f32", [4]], ["t", "f32", [4]]]}, {"tensors": [["t", "f32", [2**62]]]}, {"tensors": [7]},
        {"tensors": [["t", "f32", 4]]}, {"dialect": "koboldcpp"},
    ],
)  # fmt: skip
def test_recipes_that_describe_no_file(change: dict[str, object], tmp_path: Path) -> None:
    read_recipe(json.dumps(GOOD).encode(), "good")
    with pytest.raises(RecipeError) as caught:
        read_recipe(json.dumps({**GOOD, **change}).encode(), "bad.json")
    assert (caught.value.code, caught.value.exit_code) == ("E_RECIPE", 3)
    assert "bad.json" in caught.value.text


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"{", b"[" * 100_000, b"GGUF"])
def test_what_is_no_recipe_at_all(raw: bytes) -> None:
    with pytest.raises(RecipeError):
        read_recipe(raw, "x")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "mine.gguf")
    code, text, err = run(capsys, "inspect", tmp_path / "mine.gguf", "--recipe")
    assert (code, err, json.loads(text)["name"]) == (0, "", "mine")
    (tmp_path / "mine.json").write_text(text)
    out = tmp_path / "out.gguf"
    assert run(capsys, "make-sparse", tmp_path / "mine.json", out) == (0, "", "")
    assert out.stat().st_size == (tmp_path / "mine.gguf").stat().st_size
    again = run(capsys, "inspect", "-m", out, "--recipe")[1]
    assert again == text.replace('"mine"', '"out"')
    code, _, err = run(capsys, "make-sparse", tmp_path / "mine.json", out)
    assert (code, err.split(":")[1].strip(), err.count("\n")) == (2, "E_EXISTS", 1)
    out.write_bytes(b"old")
    assert run(capsys, "make-sparse", tmp_path / "mine.json", out, "--force", "--json")[0] == 0
    assert out.stat().st_size == (tmp_path / "mine.gguf").stat().st_size
    for arguments, expected in (
        ((tmp_path / "gone.json", tmp_path / "new"), (3, "E_OPEN")),
        ((tmp_path / "mine.gguf", tmp_path / "new"), (3, "E_RECIPE")),
        ((tmp_path / "mine.json", tmp_path / "gone" / "new"), (3, "E_OPEN")),
    ):
        code, _, err = run(capsys, "make-sparse", *arguments)
        assert (code, err.split(":")[1].strip()) == expected
    assert not (tmp_path / "new").exists()


def test_inspect_shows_sizes_layers_files_and_oddities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = list(LLAMA)
    write_split(tmp_path, [{name: LLAMA[name] for name in part} for part in (names[:4], names[4:])])
    code, out, _ = run(capsys, "inspect", tmp_path / "m", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["hyperparameters"] == {
        "layers": 1, "context": 64, "embedding": 256, "feed forward": 512, "heads": 4, "KV heads": 2,
        "vocabulary": 1000,
    }  # fmt: skip
    assert [shard["tensors"] for shard in data["shards"]] == [4, 8]
    assert [layer["layer"] for layer in data["layers"]] == [None, 0]
    assert sum(layer["bytes"] for layer in data["layers"]) == data["tensor_bytes"]
    assert data["anomalies"] == []
    assert {tensor["shard"] for tensor in data["tensors"]} == {0, 1}
    assert "m-00002-of-00002.gguf" in run(capsys, "inspect", tmp_path / "m")[1]

    (tmp_path / "odd").write_bytes(small() + b"rest")
    out = run(capsys, "inspect", tmp_path / "odd")[1]
    assert "note: 4 bytes behind the data" in out
    assert "note: the loader refuses it: E_KEY_MISSING" in out
    assert "note: one file of 2; the others are not looked at" in run_bytes(tmp_path)


def run_bytes(folder: Path) -> str:
    """Notes on a shard that is looked at alone."""
    from refimpl.placement.devices import resolve_cpu
    from refimpl.render.inspect import inspection

    with open_header((folder / "m-00002-of-00002.gguf").read_bytes()) as header:
        notes = inspection(header, "bytes", resolve_cpu("x86-avx2"), "x86-avx2")["anomalies"]
    return "\n".join(f"note: {note}" for note in notes)


def test_the_linter_finds_damage_to_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "golden"
    (root / "models").mkdir(parents=True)
    (root / "schemas").mkdir()
    for schema in (GOLDEN / "schemas").iterdir():
        (root / "schemas" / schema.name).write_bytes(schema.read_bytes())
    good = RECIPES[0].read_bytes()
    path = root / "models" / RECIPES[0].name

    def findings(raw: bytes, name: str = path.name, *, index: bool = True) -> list[str]:
        for old in (root / "models").iterdir():
            old.unlink()
        (root / "models" / name).write_bytes(raw)
        if index:
            lint.write_index(root)
        code = lint.main([str(root)])
        lines = capsys.readouterr().out.splitlines()
        assert code == (1 if lines else 0)
        return lines

    assert findings(good) == []
    for raw, name, found in (
        (good.replace(b'": ', b'":  ', 1), path.name, "not in the form in which recipes are written"),
        (good, "other.json", "its name is"),
        (good.replace(b'"tensor_bytes": 1', b'"tensor_bytes": 2'), path.name, "tensor_bytes is not what"),
        (good.replace(b'"arch": "bert"', b'"arch": "llama"'), path.name, "arch is not what"),
        (good.replace(b'"quantization": "', b'"quantization": 7, "x": "', 1), path.name, "$.quantization: 7 is not"),
    ):
        assert any(found in line for line in findings(raw, name)), found
    assert findings(good) == []
    assert any("sha256 is" in line for line in findings(good.replace(b"memory", b"memorx"), index=False))
    assert any(
        "E_BLOCK" in line
        for line in findings(good.replace(b"[1024,", b"[1023,").replace(b'"f16"', b'"q8_0"'), index=False)
    )
    lines = findings(good, "stray.json", index=False)
    assert any("not listed" in line for line in lines)
    assert any("but not there" in line for line in lines)
