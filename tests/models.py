"""Small models for tests: valid files that the loader takes, made in a moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from refimpl.gguf.values import ValueType
from refimpl.gguf.writer import write_gguf
from refimpl.types import type_by_name

SMALL = {
    "token_embd.weight": ("q4_0", (256, 1000)),
    "output_norm.weight": ("f32", (256,)),
    "output.weight": ("q4_K", (256, 1000)),
    "blk.0.attn_norm.weight": ("f32", (256,)),
    "blk.0.attn_q.weight": ("q4_0", (256, 256)),
    "blk.0.attn_k.weight": ("q8_0", (256, 128)),
    "blk.0.attn_v.weight": ("iq4_nl", (256, 128)),
    "blk.0.attn_output.weight": ("q6_K", (256, 256)),
    "blk.0.ffn_norm.weight": ("f32", (256,)),
    "blk.0.ffn_gate.weight": ("mxfp4", (256, 512)),
    "blk.0.ffn_up.weight": ("q4_0", (256, 513)),
    "blk.0.ffn_down.weight": ("q2_K", (512, 256)),
}
"""A llama of one layer: eligible and not eligible tensors, one with an odd number of rows."""

TIED = {name: value for name, value in SMALL.items() if name != "output.weight"}


def write_model(path: Path, tensors=SMALL, *, arch="llama", kv=(), seed=1, alignment=32) -> dict[str, bytes]:
    """Write a model of random weights; returns each tensor's bytes as they are in the file."""
    rng = np.random.default_rng(seed)
    rows, data = [], {}
    for name, (kind_name, shape) in tensors.items():
        kind = type_by_name(kind_name)
        data[name] = rng.bytes(kind.tensor_bytes(shape))
        rows.append((name, kind, shape, data[name]))
    pairs = [("general.architecture", ValueType.STR, arch), (f"{arch}.block_count", ValueType.U32, 1), *kv]
    write_gguf(path, pairs, rows, alignment=alignment)
    return data
