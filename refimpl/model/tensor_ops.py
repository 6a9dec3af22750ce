"""From a tensor's name to its class and operation (specification: placement-llama.md 7, architectures-2026.md 3).

The loader knows what a weight is used for only by its name; the operation decides which buffers may hold it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from refimpl.model.architectures import layer_of

TensorClass = Literal["INPUT", "OUTPUT", "REPEATING"]


class Use(NamedTuple):
    """Where a weight belongs and the operation that reads it; `op` None when nobody knows the name."""

    tensor_class: TensorClass
    op: str | None


def _table(**ops: str) -> dict[str, str]:
    return {name: op for op, names in ops.items() for name in names.split()}


INPUT_OPS = _table(GET_ROWS="token_embd per_layer_token_embd position_embd token_types")

OUTPUT_OPS = _table(
    MUL_MAT="output cls cls.output output_hc_fn output_hc_down output_hc_up",
    MUL="output_norm output_hc_norm output_hc_scale",
    ADD="output_hc_base",
)

# Without `blk.N.` in their name, and yet treated as part of layer 0; rope factors serve every layer.
LAYER0_OPS = _table(
    MUL_MAT="per_layer_model_proj",
    MUL="per_layer_proj_norm token_embd_norm",
    ROPE="rope_freqs rope_factors_long rope_factors_short",
)

REPEATING_OPS = _table(
    MUL_MAT="""
        attn_q attn_k attn_v attn_qkv attn_output attn_gate attn_q_a attn_q_b attn_kv attn_kv_a_mqa attn_kv_b attn_k_b
        attn_v_b attn_output_a attn_output_b attn_compressor_kv attn_compressor_gate
        ffn_gate ffn_up ffn_down ffn_gate_inp ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_gate_inp_shexp
        ffn_latent_down ffn_latent_up
        ssm_in ssm_x ssm_dt ssm_out ssm_ba ssm_alpha ssm_beta ssm_f_a ssm_f_b ssm_g_a ssm_g_b
        indexer.proj indexer.attn_k indexer.attn_q_b indexer.q_proj indexer.k_proj
        indexer_compressor_kv indexer_compressor_gate
        hc_attn_fn hc_attn_down hc_attn_up hc_attn_inject hc_ffn_fn hc_ffn_down hc_ffn_up hc_ffn_inject
        ple_key ple_value inp_gate proj nextn.eh_proj nextn.shared_head_head
        """,
    MUL_MAT_ID="ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_up_exps",
    GET_ROWS="ffn_gate_tid2eid attn_compressor_ape nextn.embed_tokens",
    ADD="exp_probs_b hc_attn_base hc_ffn_base",
    MUL="""
        ssm_d layer_output_scale hc_attn_scale hc_ffn_scale ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v
        nextn.enorm nextn.hnorm
        """,
    SCALE="attn_sinks",
    SSM_CONV="ssm_conv1d ple_conv1d",
    SSM_SCAN="ssm_a",
)

_ARCHITECTURE_OPS = {
    ("qwen3next", "ssm_a"): "MUL",
    ("qwen35", "ssm_a"): "MUL",
    ("qwen35moe", "ssm_a"): "MUL",
    ("deepseek4", "indexer_compressor_ape"): "GET_ROWS",
    ("glm5-next", "indexer_compressor_ape"): "ADD",
}
USED_AS_3D = frozenset({("deepseek4", "attn_output_a")})
"""Two-dimensional in the file, split into groups by the graph: judged as a three-dimensional weight."""

_SUFFIXES = (".weight", ".bias", ".scale")


def stem_of(tensor: str) -> str:
    """The name without `blk.N.` and without its suffix."""
    stem = tensor if layer_of(tensor) is None else tensor.split(".", 2)[2]
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    return stem


def use_of(tensor: str, architecture: str) -> Use:
    """Class and operation of a tensor name; `op` is None for a name that no rule covers."""
    stem = stem_of(tensor)
    tensor_class: TensorClass = "REPEATING"
    op: str | None
    if layer_of(tensor) is not None:
        op = _ARCHITECTURE_OPS.get((architecture, stem)) or REPEATING_OPS.get(stem)
        if op is None and "_norm" in stem:
            op = "MUL"
    elif stem in INPUT_OPS:
        tensor_class, op = "INPUT", INPUT_OPS[stem]
    elif stem in OUTPUT_OPS:
        tensor_class, op = "OUTPUT", OUTPUT_OPS[stem]
    else:
        op = LAYER0_OPS.get(stem)
    if op is not None and tensor.endswith(".bias"):
        op = "ADD_ID" if op == "MUL_MAT_ID" else "ADD"
    return Use(tensor_class, op)
