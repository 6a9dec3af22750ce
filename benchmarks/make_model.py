"""Write the benchmark model: a synthetic llama of 2450 MiB in Q4_0, the same bytes on every machine.

    python benchmarks/make_model.py OUT.gguf [--layers 36] [--type q4_0]

36 layers, 3072 wide, feed-forward 8192, 24 heads with 8 key/value heads, an output matrix of its own, 151936 tokens and
151387 merges. The weights are one splitmix64 stream (seed 7) over all quantized tensors in file order, with every block
scale made finite: high byte = (byte & 0x83) | 0x1C. Norms are 1.0.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from refimpl.conformance.streams import splitmix64
from refimpl.gguf.values import ValueType
from refimpl.gguf.writer import Counted, Pair, write_gguf
from refimpl.types import TensorType, type_by_name

SEED = 7
GAMMA = 0x9E3779B97F4A7C15
PIECE_BLOCKS = 1 << 18
TOKEN_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Recipe:
    """The sizes of a synthetic llama; the defaults are the benchmark model."""

    layers: int = 36
    embd: int = 3072
    ff: int = 8192
    heads: int = 24
    kv_heads: int = 8
    tokens: int = 151936
    merges: int = 151387
    type: str = "q4_0"
    tied: bool = False

    def shapes(self) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
        """(name, quantized, shape) of every tensor in file order."""
        kv_width = self.embd // self.heads * self.kv_heads
        yield "token_embd.weight", True, (self.embd, self.tokens)
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", False, (self.embd,)
            yield f"blk.{i}.attn_q.weight", True, (self.embd, self.embd)
            yield f"blk.{i}.attn_k.weight", True, (self.embd, kv_width)
            yield f"blk.{i}.attn_v.weight", True, (self.embd, kv_width)
            yield f"blk.{i}.attn_output.weight", True, (self.embd, self.embd)
            yield f"blk.{i}.ffn_norm.weight", False, (self.embd,)
            yield f"blk.{i}.ffn_gate.weight", True, (self.embd, self.ff)
            yield f"blk.{i}.ffn_up.weight", True, (self.embd, self.ff)
            yield f"blk.{i}.ffn_down.weight", True, (self.ff, self.embd)
        yield "output_norm.weight", False, (self.embd,)
        if not self.tied:
            yield "output.weight", True, (self.embd, self.tokens)


def word(number: int) -> str:
    """A token for a number, all different: at least three letters, like a vocabulary's."""
    letters = ""
    while number or len(letters) < 3:
        number, digit = divmod(number, len(TOKEN_LETTERS))
        letters += TOKEN_LETTERS[digit]
    return letters + "ing" * (number % 2 == 0 and len(letters) == 3)


def key_values(recipe: Recipe) -> list[Pair]:
    """The keys that a llama needs, and its vocabulary."""
    STR, U32, F32, I32 = ValueType.STR, ValueType.U32, ValueType.F32, ValueType.I32
    sizes = {
        "context_length": 4096,
        "embedding_length": recipe.embd,
        "block_count": recipe.layers,
        "feed_forward_length": recipe.ff,
        "attention.head_count": recipe.heads,
        "attention.head_count_kv": recipe.kv_heads,
        "rope.dimension_count": recipe.embd // recipe.heads,
    }
    tokens = Counted(recipe.tokens, (word(i) for i in range(recipe.tokens)))
    merges = Counted(recipe.merges, (f"{word(i % 52)[:1]} {word(i)[1:]}" for i in range(recipe.merges)))
    return [
        ("general.architecture", STR, "llama"),
        ("general.name", STR, "synthetic benchmark model"),
        *((f"llama.{key}", U32, value) for key, value in sizes.items()),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.freq_base", F32, 10000.0),
        ("general.file_type", U32, 2),
        ("tokenizer.ggml.model", STR, "gpt2"),
        ("tokenizer.ggml.pre", STR, "qwen2"),
        ("tokenizer.ggml.tokens", ("arr", STR), tokens),
        ("tokenizer.ggml.token_type", ("arr", I32), Counted(recipe.tokens, (1 for _ in range(recipe.tokens)))),
        ("tokenizer.ggml.merges", ("arr", STR), merges),
        ("tokenizer.ggml.eos_token_id", U32, 0),
        ("tokenizer.ggml.bos_token_id", U32, 0),
    ]


# Where each type keeps the fp16 scales of a block: the high bytes to be made finite.
SCALE_HIGH_BYTES = {
    "q4_0": (1,), "q8_0": (1,), "iq4_nl": (1,), "q4_K": (1, 3), "q5_K": (1, 3), "q6_K": (209,), "q2_K": (81, 83),
}  # fmt: skip


class Stream:
    """The weights of all quantized tensors, one after the other, in pieces."""

    def __init__(self) -> None:
        self._word = 0  # of the whole stream

    def tensor(self, kind: TensorType, nbytes: int) -> Iterator[memoryview]:
        """The next `nbytes` bytes, a tensor of this type. A tensor starts at a word of the stream."""
        size = PIECE_BLOCKS // kind.block_length * 8 * kind.block_bytes
        for start in range(0, nbytes, size):
            count = min(size, nbytes - start)
            piece = splitmix64((SEED + self._word * GAMMA) % 2**64, count)
            self._word += -(-count // 8)
            for byte in SCALE_HIGH_BYTES[kind.name]:
                scales = piece[byte :: kind.block_bytes]
                scales &= 0x83
                scales |= 0x1C
            yield memoryview(piece)


def make_model(out: str | os.PathLike[str], recipe: Recipe = Recipe()) -> None:
    """Write the model; existing files are replaced when the new one is complete."""
    kind, f32, stream = type_by_name(recipe.type), type_by_name("f32"), Stream()
    tensors = []
    for name, quantized, shape in recipe.shapes():
        if quantized:
            tensors.append((name, kind, shape, stream.tensor(kind, kind.tensor_bytes(shape))))
        else:
            tensors.append((name, f32, shape, np.ones(shape[0], "<f4").tobytes()))
    write_gguf(out, key_values(recipe), tensors)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--layers", type=int, default=Recipe.layers)
    parser.add_argument("--tokens", type=int, default=Recipe.tokens)
    parser.add_argument("--type", choices=sorted(SCALE_HIGH_BYTES), default=Recipe.type)
    parser.add_argument("--tied", action="store_true", help="no output.weight")
    options = parser.parse_args()
    start = time.perf_counter()
    recipe = Recipe(layers=options.layers, tokens=options.tokens, type=options.type, tied=options.tied)
    make_model(options.out, recipe)
    size = os.stat(options.out).st_size
    print(f"{options.out}: {size} bytes ({size / 2**20:.0f} MiB) in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
