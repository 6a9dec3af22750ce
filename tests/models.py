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
"""One layer with the names of a qwen3: eligible and not eligible tensors, one with an odd number of rows."""

LLAMA = {**SMALL, "blk.0.ffn_up.weight": ("q4_0", (256, 512))}
"""A llama as its loader wants it, with `LLAMA_KV`: no name and no shape is wrong."""

LLAMA_KV = [
    ("llama.context_length", ValueType.U32, 64),
    ("llama.embedding_length", ValueType.U32, 256),
    ("llama.feed_forward_length", ValueType.U32, 512),
    ("llama.attention.head_count", ValueType.U32, 4),
    ("llama.attention.head_count_kv", ValueType.U32, 2),
    ("llama.attention.layer_norm_rms_epsilon", ValueType.F32, 1e-5),
    ("llama.vocab_size", ValueType.U32, 1000),
    ("tokenizer.ggml.model", ValueType.STR, "no_vocab"),
]

TIED = {name: value for name, value in SMALL.items() if name != "output.weight"}


def write_model(path: Path, tensors=SMALL, *, arch="qwen3", kv=(), seed=1, alignment=32) -> dict[str, bytes]:
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


def write_llama(path: Path, tensors=LLAMA, *, kv=LLAMA_KV, **options) -> dict[str, bytes]:
    """Write a model that passes every check of architecture llama."""
    return write_model(path, tensors, arch="llama", kv=kv, **options)


def write_split(folder: Path, sets, *, prefix="m", kv=LLAMA_KV, total=None, seed=1) -> dict[str, bytes]:
    """Write a llama in as many files as there are sets of tensors, named as llama.cpp names them."""
    data, total = {}, sum(map(len, sets)) if total is None else total
    for number, tensors in enumerate(sets):
        split = [
            ("split.no", ValueType.U16, number),
            ("split.count", ValueType.U16, len(sets)),
            ("split.tensors.count", ValueType.I32, total),
        ]
        path = folder / f"{prefix}-{number + 1:05d}-of-{len(sets):05d}.gguf"
        data |= write_llama(path, tensors, kv=[*(kv if number == 0 else ()), *split], seed=seed + number)
    return data
