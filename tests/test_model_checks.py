"""What the model loader refuses after the container: one broken rule each, and their order (gguf.md 6)."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

import pytest
from gguf_files import STR, gguf, info, pair, string
from models import LLAMA, LLAMA_KV, write_llama, write_model

import refimpl
from refimpl.cli import main
from refimpl.errors import ModelError, RefimplError
from refimpl.gguf.recipe import read_recipe, recipe_header
from refimpl.gguf.source import open_header
from refimpl.gguf.values import ValueType as V
from refimpl.model.architectures import KNOWN
from refimpl.model.checks import all_findings, check_alignment, check_model, model_findings, open_checked

RECIPES = sorted(Path(str(resources.files("refimpl.golden") / "models")).glob("*.json"))


def keys(**changes):
    """The keys of a good llama, changed: None takes a key away. `__` is a dot, `llama.` is put before."""
    result = {key: (kind, value) for key, kind, value in LLAMA_KV}
    for name, value in changes.items():
        key = name.replace("__", ".")
        key = key if key.startswith(("tokenizer.", "general.")) else f"llama.{key}"
        result.pop(key, None)
        if value is not None:
            result[key] = value
    return [(key, *value) for key, value in result.items()]


def findings(path) -> list[str]:
    header, found = all_findings(path)
    if header is not None:
        header.close()
    return [error.code for error in found]


def load_code(path, **options) -> str | None:
    try:
        refimpl.load(path, cpu="x86-avx512", **options).close()
    except RefimplError as error:
        return error.code
    return None


def test_a_good_llama_has_nothing_against_it(tmp_path):
    write_llama(tmp_path / "m")
    assert findings(tmp_path / "m") == []
    assert load_code(tmp_path / "m") is None


ONE = [1, 1]
KEYS = {
    "no context": (keys(context_length=None), "E_KEY_MISSING"),
    "context u64": (keys(context_length=(V.U64, 64)), "E_KV_TYPE_MISMATCH"),
    "no embedding": (keys(embedding_length=None), "E_KEY_MISSING"),
    "embedding i32": (keys(embedding_length=(V.I32, 256)), "E_KV_TYPE_MISMATCH"),
    "no epsilon": (keys(attention__layer_norm_rms_epsilon=None), "E_KEY_MISSING"),
    "epsilon f64": (keys(attention__layer_norm_rms_epsilon=(V.F64, 1e-5)), "E_KV_TYPE_MISMATCH"),
    "no tokenizer": (keys(tokenizer__ggml__model=None), "E_KEY_MISSING"),
    "tokenizer u8": (keys(tokenizer__ggml__model=(V.U8, 1)), "E_KV_TYPE_MISMATCH"),
    "a real tokenizer without tokens": (keys(tokenizer__ggml__model=(V.STR, "gpt2")), "E_KEY_MISSING"),
    "tokens of another type": (
        keys(tokenizer__ggml__model=(V.STR, "gpt2"), tokenizer__ggml__tokens=(("arr", V.U8), [1])), "E_ARRAY_TYPE",
    ),
    "tokens that are no array": (
        keys(tokenizer__ggml__model=(V.STR, "gpt2"), tokenizer__ggml__tokens=(V.U32, 7)), "E_KV_TYPE_MISMATCH",
    ),
    "vocabulary size i32": (keys(vocab_size=(V.I32, 1000)), "E_KV_TYPE_MISMATCH"),
    "another vocabulary size": (keys(vocab_size=(V.U32, 999)), "E_TENSOR_SHAPE"),
    "heads as an array": (keys(attention__head_count=(("arr", V.U32), [4])), None),
    "heads as i32": (keys(attention__head_count=(("arr", V.I32), [4])), None),
    "two heads for one layer": (keys(attention__head_count=(("arr", V.U32), ONE)), "E_ARRAY_LENGTH"),
    "heads as u64": (keys(attention__head_count=(("arr", V.U64), [4])), "E_ARRAY_TYPE"),
    "length before type": (keys(attention__head_count=(("arr", V.U64), ONE)), "E_ARRAY_LENGTH"),
    "heads as a scalar u64": (keys(attention__head_count=(V.U64, 4)), "E_KV_TYPE_MISMATCH"),
    "no heads": (keys(attention__head_count=(V.U32, 0)), "E_TENSOR_SHAPE"),
    "KV heads default to heads": (keys(attention__head_count_kv=None), "E_TENSOR_SHAPE"),
    "key length": (keys(attention__key_length=(V.U32, 32)), "E_TENSOR_SHAPE"),
    "experts without use": (keys(expert_count=(V.U32, 4)), "E_KV_VALUE"),
    "used without experts": (keys(expert_used_count=(V.U32, 1)), "E_KV_VALUE"),
    "experts, dense tensors": (keys(expert_count=(V.U32, 4), expert_used_count=(V.U32, 2)), "E_TENSOR_MISSING"),
    "rope base f64": (keys(rope__freq_base=(V.F64, 1e4)), "E_KV_TYPE_MISMATCH"),
    "scaling type u8": (keys(rope__scaling__type=(V.U8, 1)), "E_KV_TYPE_MISMATCH"),
    "name u8": (keys(general__name=(V.U8, 1)), "E_KV_TYPE_MISMATCH"),
    "a string with a NUL": (keys(tokenizer__ggml__model=(V.STR, b"no_vocab\0x")), None),
    "the first broken one decides": (keys(context_length=None, embedding_length=(V.I8, 1)), "E_KEY_MISSING"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys(tmp_path, name):
    kv, code = KEYS[name]
    write_llama(tmp_path / "m", kv=kv)
    assert load_code(tmp_path / "m") == code
    assert findings(tmp_path / "m")[:1] == ([code] if code else [])


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ((V.U32, 0), "E_KV_VALUE"),
        ((V.U32, 513), "E_KV_VALUE"),
        ((V.U32, 512), "E_TENSOR_MISSING"),
        ((V.U64, 1), "E_KV_TYPE_MISMATCH"),
        (None, "E_KEY_MISSING"),
    ],
)
def test_number_of_layers(value, code):
    kv = [("general.architecture", V.STR, "llama"), *LLAMA_KV]
    if value is not None:
        kv.append(("llama.block_count", *value))
    recipe = {
        "arch": "llama", "gguf_version": 3, "alignment": 32, "file_size": 10_000_000,
        "kv": {key: [kind.name.lower(), value] for key, kind, value in kv},
        "tensors": [[name, kind, list(shape)] for name, (kind, shape) in LLAMA.items()],
    }  # fmt: skip
    with pytest.raises(ModelError) as caught:
        check_model(recipe_header(recipe))
    assert caught.value.code == code


def changed(**changes):
    result = dict(LLAMA)
    for name, value in changes.items():
        result.pop(name.replace("__", "."), None)
        if value is not None:
            result[name.replace("__", ".")] = value
    return result


F32 = "f32"
TENSORS = {
    "no output": (changed(output__weight=None), None),
    "no norm": (changed(output_norm__weight=None), "E_TENSOR_MISSING"),
    "no up": (changed(blk__0__ffn_up__weight=None), "E_TENSOR_MISSING"),
    "a wrong norm": (changed(output_norm__weight=(F32, (255,))), "E_TENSOR_SHAPE"),
    "ones at the end are no difference": (changed(output_norm__weight=(F32, (256, 1, 1))), None),
    "a size at the end": (changed(output_norm__weight=(F32, (256, 2))), "E_TENSOR_SHAPE"),
    "transposed": (changed(blk__0__ffn_down__weight=("q2_K", (256, 512))), "E_TENSOR_SHAPE"),
    "a stranger": (changed(stranger=(F32, (4,))), "E_TENSOR_EXTRA"),
    "a layer too many": (changed(blk__1__attn_norm__weight=(F32, (256,))), "E_TENSOR_EXTRA"),
    "biases": (changed(blk__0__attn_q__bias=(F32, (256,)), blk__0__ffn_down__bias=(F32, (256,))), None),
    "a wrong bias": (changed(blk__0__attn_k__bias=(F32, (256,))), "E_TENSOR_SHAPE"),
    "rope frequencies": (changed(rope_freqs__weight=(F32, (32,))), None),
    "rope factors without longrope": (changed(rope_factors_long__weight=(F32, (32,))), "E_TENSOR_EXTRA"),
    "scales": (changed(blk__0__ffn_up__scale=(F32, (1,)), blk__0__ffn_up__input_scale=(F32, (1,))), None),
    "one matrix for q, k and v": (
        {
            **changed(blk__0__attn_q__weight=None, blk__0__attn_k__weight=None, blk__0__attn_v__weight=None),
            "blk.0.attn_qkv.weight": ("q4_0", (256, 512)),
        },
        None,
    ),
    "that and q too": (changed(blk__0__attn_qkv__weight=("q4_0", (256, 512))), "E_TENSOR_EXTRA"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path, name):
    tensors, code = TENSORS[name]
    write_llama(tmp_path / "m", tensors)
    assert load_code(tmp_path / "m") == code
    assert findings(tmp_path / "m")[:1] == ([code] if code else [])


def test_experts(tmp_path):
    dense = [name for name in LLAMA if ".ffn_" in name and "norm" not in name]
    tensors = {name: value for name, value in LLAMA.items() if name not in dense}
    tensors |= {
        "blk.0.ffn_gate_inp.weight": (F32, (256, 4)),
        "blk.0.ffn_gate_exps.weight": ("q4_0", (256, 512, 4)),
        "blk.0.ffn_down_exps.weight": ("q4_0", (512, 256, 4)),
        "blk.0.ffn_up_exps.weight": ("q4_0", (256, 512, 4)),
    }
    kv = keys(expert_count=(V.U32, 4), expert_used_count=(V.U32, 2))
    write_llama(tmp_path / "m", tensors, kv=kv)
    assert load_code(tmp_path / "m") is None
    write_llama(tmp_path / "m", {**tensors, "blk.0.ffn_up_exps.weight": ("q4_0", (256, 512, 3))}, kv=kv)
    assert load_code(tmp_path / "m") == "E_TENSOR_SHAPE"


def test_several_findings_are_all_listed(tmp_path, capsys):
    write_llama(tmp_path / "m", changed(stranger=(F32, (4,)), output_norm__weight=None, token_embd__weight=(F32, (9,))))
    assert findings(tmp_path / "m") == ["E_TENSOR_SHAPE", "E_TENSOR_MISSING", "E_TENSOR_EXTRA"]
    assert main(["check", str(tmp_path / "m")]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == findings(tmp_path / "m")
    assert err == ""
    assert main(["check", str(tmp_path / "m"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in report["findings"]] == findings(tmp_path / "m")
    assert report["findings"][1]["tensor"] == "output_norm.weight"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_real_models_have_nothing_against_them(recipe):
    """Real programs load what is made from these."""
    header = recipe_header(read_recipe(recipe.read_bytes(), recipe.name))
    assert list(model_findings(header)) == []


def raw_model(*infos: bytes, architecture: bytes = b"qwen3", data: bytes = bytes(96)) -> bytes:
    pairs = [pair(b"general.architecture", STR, string(architecture))] if architecture else []
    return gguf(pairs, infos, data)


def test_architecture(tmp_path):
    one = info(b"t", (4,), 0, 0)
    for data, code in (
        (raw_model(one), None),
        (raw_model(one, architecture=b""), "E_ARCH"),
        (raw_model(one, architecture=b"lama"), "E_ARCH"),
        (raw_model(one, architecture=b"qwen3\0x"), None),
        (gguf([pair(b"general.architecture", 4, bytes(4))], [one], bytes(32)), "E_KV_TYPE_MISMATCH"),
    ):
        (tmp_path / "m").write_bytes(data)
        assert load_code(tmp_path / "m") == code
        assert findings(tmp_path / "m")[:1] == ([code] if code else [])
    assert len(KNOWN) == 153


def test_the_number_of_layers_of_any_architecture(tmp_path):
    for arch in ("qwen3", "gemma3", "mamba2"):
        write_model(tmp_path / "m", arch=arch)
        with refimpl.open(tmp_path / "m") as header:
            position = header.kv.raw(f"{arch}.block_count").offset + 8 + len(f"{arch}.block_count")
        raw = bytearray((tmp_path / "m").read_bytes())
        raw[position + 4 : position + 8] = (513).to_bytes(4, "little")
        (tmp_path / "m").write_bytes(raw)
        assert load_code(tmp_path / "m") == "E_KV_VALUE"


def test_names_that_are_equal_up_to_a_nul(tmp_path):
    data = raw_model(info(b"a\0x", (4,), 0, 0), info(b"b", (4,), 0, 32), info(b"a\0y", (4,), 0, 64))
    (tmp_path / "m").write_bytes(data)
    open_header(tmp_path / "m").close()
    assert load_code(tmp_path / "m") == "E_NAME_DUPLICATE"


def test_the_first_tensor_in_file_order_decides(tmp_path):
    infos = [info(b"a\0x", (4,), 0, 0), info(b"b", (4,), 0, 32), info(b"a", (4,), 0, 64)]
    (tmp_path / "m").write_bytes(raw_model(*infos, data=bytes(40)))
    assert load_code(tmp_path / "m") == "E_DATA_BOUNDS"
    assert findings(tmp_path / "m") == ["E_DATA_BOUNDS", "E_NAME_DUPLICATE", "E_DATA_BOUNDS"]
    (tmp_path / "m").write_bytes(raw_model(*infos, data=bytes(64)))
    assert load_code(tmp_path / "m") == "E_NAME_DUPLICATE"


def test_every_length_of_a_file_that_is_still_coming_in(tmp_path):
    """Cut inside the keys it is no header; from the end of the infos on it can be planned with, never loaded."""
    path = tmp_path / "m"
    write_llama(path, {name: LLAMA[name] for name in list(LLAMA)[:2]})
    whole = path.read_bytes()
    with refimpl.open(path) as header:
        start, last = header.data_start, header.tensors[-1]
    end = last.absolute_offset + last.nbytes
    infos = start - len(whole[:start]) + len(whole[:start].rstrip(b"\0")) - 2
    for size in [*range(infos, start + 70), start + 1000, end - 1, end, len(whole)]:
        path.write_bytes(whole[:size])
        try:
            with open_header(path, dialect="llama.cpp", partial=True) as header:
                planned = len(header.tensors)
        except RefimplError as error:
            planned = error.code
        expected = "E_DATA_START" if size < start else "E_DATA_BOUNDS" if size < end else "E_TENSOR_MISSING"
        if planned == "E_TRUNCATED":
            assert size < start - 15
            expected = "E_TRUNCATED"
        else:
            assert planned == 2
        assert load_code(path) == expected, size
        assert main(["inspect", str(path)]) == (3 if planned == "E_TRUNCATED" else 0)


def test_check_says_what_is_missing_of_a_download(tmp_path, capsys):
    path = tmp_path / "m"
    write_llama(path)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with refimpl.open(path) as header:
        padded = header.data_start + header.data_bytes > header.tensors[-1].absolute_offset + header.tensors[-1].nbytes
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out.startswith("E_DATA_SHORT: " if padded else "E_DATA_BOUNDS: ")
    with refimpl.open(path) as header:
        os.truncate(path, header.data_start)
    assert main(["check", str(path)]) == 1
    assert {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()} == {"E_DATA_BOUNDS"}
    os.truncate(path, 300)
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out.startswith("E_TRUNCATED: ")
    assert main(["check", str(tmp_path / "nowhere")]) == 3
    assert main(["check", str(path), "--allow-gaps"]) == 2


def test_a_buffer_over_mapped_memory_begins_at_a_multiple_of_32(tmp_path):
    for extra in range(8):
        write_llama(tmp_path / "m", alignment=8, kv=[*LLAMA_KV, ("x" * (extra + 1), V.U8, 1)])
        with open_checked(tmp_path / "m") as header:
            aligned = header.tensors[0].absolute_offset % 32 == 0
            if aligned:
                check_alignment(header)
            else:
                with pytest.raises(ModelError, match="E_DATA_ALIGN"):
                    check_alignment(header)
                check_alignment(header, [t for t in header.tensors if t.absolute_offset % 32 == 0][:1])
        assert load_code(tmp_path / "m") == (None if aligned else "E_DATA_ALIGN")


def test_a_llama_of_very_many_tensors_is_refused_in_linear_time(tmp_path):
    count = 40_000
    infos = [info(b"%d" % i, (), 0, 32 * i) for i in range(count)]
    kv = [("general.architecture", V.STR, "llama"), ("llama.block_count", V.U32, 512), *LLAMA_KV]
    from refimpl.gguf.writer import header_bytes

    head = header_bytes(kv, [])[24:]
    data = b"GGUF" + (3).to_bytes(4, "little") + count.to_bytes(8, "little") + len(kv).to_bytes(8, "little")
    data += head + b"".join(infos)
    data += bytes(-len(data) % 32)
    with open(tmp_path / "m", "wb") as file:
        file.write(data)
        file.truncate(len(data) + 32 * count)
    assert load_code(tmp_path / "m") == "E_TENSOR_MISSING"
