"""Which tensors a CPU-only load repacks, and why the others stay (recorded cases: test_conformance_runners.py)."""

from __future__ import annotations

import pytest

from refimpl.errors import ModelError, UsageError
from refimpl.model.architectures import KNOWN, architecture, exact_architectures
from refimpl.model.tensor_ops import use_of
from refimpl.placement.devices import features_from_cpuinfo, features_from_llvm, native_cpu, resolve_cpu
from refimpl.placement.llama import TensorSpec, place, place_header
from refimpl.repacking.llama import ALIASES, PROFILES, CpuFeatures, layout_for, refusal
from refimpl.types import type_by_id, type_by_name

AVX512 = PROFILES["x86-avx512"]


def specs(**types: tuple[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name.replace("__", "."), type_by_name(kind), shape) for name, (kind, shape) in types.items()]


def one(name, kind="q4_0", shape=(256, 256), arch="llama", cpu=AVX512, **options):
    return place(arch, [TensorSpec(name, type_by_name(kind), shape)], cpu=cpu, **options).rows[0]


@pytest.mark.parametrize(
    ("name", "arch", "tensor_class", "op"),
    [
        ("token_embd.weight", "llama", "INPUT", "GET_ROWS"),
        ("output.weight", "llama", "OUTPUT", "MUL_MAT"),
        ("output_norm.weight", "llama", "OUTPUT", "MUL"),
        ("rope_freqs.weight", "llama", "REPEATING", "ROPE"),
        ("blk.0.attn_q.weight", "llama", "REPEATING", "MUL_MAT"),
        ("blk.11.attn_q.bias", "qwen2", "REPEATING", "ADD"),
        ("blk.3.ffn_gate_exps.weight", "gpt-oss", "REPEATING", "MUL_MAT_ID"),
        ("blk.3.ffn_gate_exps.bias", "gpt-oss", "REPEATING", "ADD_ID"),
        ("blk.3.attn_sinks.weight", "gpt-oss", "REPEATING", "SCALE"),
        ("blk.3.exp_probs_b.bias", "glm4moe", "REPEATING", "ADD"),
        ("blk.3.attn_kv_a_norm.weight", "deepseek2", "REPEATING", "MUL"),
        ("blk.3.attn_k_b.weight", "deepseek2", "REPEATING", "MUL_MAT"),
        ("blk.3.post_ffw_norm.weight", "gemma2", "REPEATING", "MUL"),
        ("blk.3.ssm_a", "mamba2", "REPEATING", "SSM_SCAN"),
        ("blk.3.ssm_a", "qwen3next", "REPEATING", "MUL"),
        ("blk.3.ffn_down_exps.scale", "gemma4", "REPEATING", "MUL_MAT_ID"),
        ("blk.3.nobody_knows.weight", "llama", "REPEATING", None),
    ],
)
def test_class_and_operation_by_name(name, arch, tensor_class, op):
    assert use_of(name, arch) == (tensor_class, op)


def test_every_listed_tensor_of_an_exact_architecture_has_an_operation():
    assert set(exact_architectures()) >= {
        "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss", "deepseek2", "glm4moe",
    }  # fmt: skip
    for name in exact_architectures():
        assert name in KNOWN
        tensors = architecture(name).tensors
        assert len(tensors) == len(set(tensors))
        for tensor in tensors:
            assert use_of(tensor.replace("blk.N.", "blk.7."), name).op is not None, (name, tensor)


def test_rows_say_what_and_why():
    assert one("blk.0.attn_q.weight").layout.name == "q4_0_8x8"
    assert one("blk.0.attn_q.weight").certainty == "exact"
    assert one("blk.0.attn_q.weight", arch="olmo2").certainty == "generic"
    assert one("blk.0.attn_q.weight", repack=False).reason == "repack is off"
    assert one("token_embd.weight", kind="q6_K").buffer_type == "CPU"
    unknown = one("blk.0.nobody_knows.weight")
    assert (unknown.certainty, unknown.buffer_type, unknown.layout) == ("unknown", "CPU", None)
    assert unknown.reason.startswith("UNKNOWN")
    assert "not a multiple" in one("blk.0.attn_q.weight", shape=(256, 257)).reason
    assert "no layout" in one("blk.0.attn_q.weight", kind="q6_K").reason
    assert "2 dimensions" in one("blk.0.attn_k_b.weight", shape=(256, 256, 16), arch="deepseek2").reason
    assert "3 dimensions" in one("blk.0.ffn_up_exps.weight", shape=(256, 256, 1)).reason
    assert one("blk.0.ffn_up_exps.weight", shape=(256, 256, 2)).layout.name == "q4_0_8x8"
    assert one("blk.0.attn_output_a.weight", arch="deepseek4").layout is None


def test_q2_k_needs_avx512():
    assert one("blk.0.attn_q.weight", kind="q2_K", cpu=PROFILES["x86-avx2"]).layout is None
    assert one("blk.0.attn_q.weight", kind="q2_K", cpu=AVX512).layout.name == "q2_K_8x8"


def test_tied_embedding_is_held_twice_only_if_the_copies_differ():
    for kind, keys in (("q4_K", ["token_embd.weight", "token_embd.weight#output"]), ("q6_K", ["token_embd.weight"])):
        placement = place("llama", specs(token_embd__weight=(kind, (256, 1000))), cpu=AVX512)
        assert [row.key for row in placement.rows] == keys
        assert placement.model_bytes == placement.rows[0].nbytes
    assert len(place("bert", specs(token_embd__weight=("q4_K", (256, 1000))), cpu=AVX512).rows) == 1
    with pytest.raises(ModelError) as caught:
        place("gpt-oss", specs(token_embd__weight=("q4_K", (256, 1000))), cpu=AVX512)
    assert caught.value.code == "E_TENSOR_MISSING"


def test_next_token_prediction_layers_are_not_loaded():
    names = [TensorSpec(f"blk.{i}.attn_q.weight", type_by_name("q4_0"), (256, 256)) for i in (0, 45, 46)]
    kv = {"general.architecture": "glm4moe", "glm4moe.block_count": 47, "glm4moe.nextn_predict_layers": 1}
    rows = place_header(kv, names, cpu=AVX512).rows
    assert [row.buffer_type for row in rows] == ["CPU_REPACK", "CPU_REPACK", None]


@pytest.mark.parametrize(
    ("kv", "code"),
    [
        ({}, "E_ARCH"),
        ({"general.architecture": "nobody"}, "E_ARCH"),
        ({"general.architecture": 7}, "E_KV_TYPE_MISMATCH"),
    ],
)
def test_architectures_that_are_refused(kv, code):
    with pytest.raises(ModelError) as caught:
        place_header(kv, [], cpu=AVX512)
    assert caught.value.code == code


def test_a_type_that_nobody_knows_is_refused():
    tensor = TensorSpec("blk.0.attn_q.weight", type_by_id(9999), (256, 256))  # type: ignore[arg-type]
    with pytest.raises(ModelError) as caught:
        place("llama", [tensor], cpu=AVX512)
    assert caught.value.code == "E_TENSOR_TYPE"


def test_fall_through_to_the_next_rule():
    q4_0, sve256 = type_by_name("q4_0"), PROFILES["arm-sve256-i8mm"]
    assert [layout_for(q4_0, ne1, sve256).name for ne1 in (16, 12)] == ["q4_0_8x8", "q4_0_4x8"]
    assert layout_for(q4_0, 6, sve256) is None
    assert refusal("MUL_MAT", q4_0, (256, 16), sve256) is None
    assert "f16" in refusal("MUL_MAT", q4_0, (256, 16), sve256, "f16")
    assert "GET_ROWS" in refusal("GET_ROWS", q4_0, (256, 16), sve256)


def test_named_cpus():
    for name in [*PROFILES, *ALIASES, "native"]:
        assert isinstance(resolve_cpu(name), CpuFeatures)
    with pytest.raises(UsageError) as caught:
        resolve_cpu("pentium")
    assert caught.value.code == "E_CPU"


@pytest.mark.parametrize(
    ("machine", "text", "features"),
    [
        ("x86_64", "processor : 0\nflags\t\t: fpu sse4_2 avx2 fma\n", CpuFeatures(avx2=True)),
        ("AMD64", "flags : avx2 avx512f avx512_bf16", PROFILES["x86-avx512-bf16"]),
        ("x86_64", "flags : fpu\nbugs : avx2", CpuFeatures()),
        ("aarch64", "Features\t: fp asimd", CpuFeatures(neon=True)),
        (
            "aarch64",
            "Features : asimd asimddp i8mm sve",
            CpuFeatures(neon=True, dotprod=True, i8mm=True, sve=True, sve_bytes=32),
        ),
        ("aarch64", "Features : asimd asimddp", CpuFeatures(neon=True, dotprod=True)),
        ("s390x", "features\t: esan3 zarch vx vxe vxe2", CpuFeatures(vxe=True)),
        ("riscv64", "isa\t\t: rv64imafdcv_zvfh_zvl256b", CpuFeatures(rvv=True, vlen=256, zvfh=True)),
        ("riscv64", "isa : rv64imafdc_zicsr", CpuFeatures(vlen=128)),
        ("mips", "whatever : yes", CpuFeatures()),
    ],
)
def test_features_from_cpuinfo(machine, text, features):
    assert features_from_cpuinfo(text, machine, sve_bytes=32) == features


def test_features_without_proc():
    assert features_from_llvm({"avx2": True, "avx512f": False}, "AMD64") == CpuFeatures(avx2=True)
    assert features_from_llvm({"dotprod": True, "i8mm": True}, "arm64") == PROFILES["arm-i8mm"]
    assert features_from_llvm({}, "unheard-of") == CpuFeatures()


def test_both_ways_to_detect_agree_here():
    import platform

    from refimpl.placement.devices import _llvm_features

    if platform.machine() != "x86_64":
        pytest.skip("compared on x86-64 only: LLVM names the features of other CPUs differently")
    assert native_cpu() == features_from_llvm(_llvm_features(), "x86_64")
