"""Which tensors an architecture asks for, in which shapes (specification: gguf.md 6.5 and 6.6). So far: llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from refimpl.errors import ModelError
from refimpl.gguf.values import ValueType
from refimpl.model.keys import Keys

WITHOUT_TOKENS = ("none", "no_vocab")
MAX_LAYERS = 512

Has = Callable[[str], bool]
"""Whether the files have a tensor of that name."""


class Wanted(NamedTuple):
    """A tensor that is asked for; missing sizes are 1."""

    name: str
    shape: tuple[int, ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a llama. Every layer is created with those of the first one."""

    layers: int
    embd: int
    ff: int
    head_k: int
    head_v: int
    heads: int
    heads_kv: int
    rot: int
    experts: int
    ff_shared: int
    tokens: int
    long_rope: bool

    @classmethod
    def read(cls, keys: Keys) -> Llama:
        """From the keys, in the loader's order. ModelError as `Keys`, and E_KV_VALUE."""
        keys.check("general.name", ValueType.STR)
        keys.check("llama.context_length", ValueType.U32, needed=True)
        embd = keys.need_u32("llama.embedding_length")
        layers = keys.need_u32("llama.block_count")
        check_layers("llama.block_count", layers)
        experts, used = keys.u32("llama.expert_count") or 0, keys.u32("llama.expert_used_count") or 0
        if used > experts or (experts and not used):
            text = f"llama.expert_used_count is {used}, llama.expert_count {experts}"
            raise ModelError("E_KV_VALUE", text, key="llama.expert_used_count", found=used)
        ff = keys.per_layer("llama.feed_forward_length", layers) or [0]
        heads = keys.per_layer("llama.attention.head_count", layers) or [0]
        heads_kv = keys.per_layer("llama.attention.head_count_kv", layers) or heads
        for key, kind in (
            ("rope.scaling.finetuned", ValueType.BOOL), ("rope.scaling.original_context_length", ValueType.U32),
            ("rope.freq_base", ValueType.F32),
        ):  # fmt: skip
            keys.check(f"llama.{key}", kind)
        scaling = keys.string("llama.rope.scaling.type")
        usual = embd // heads[0] if heads[0] else 0
        head_k = _given(keys.u32("llama.attention.key_length"), usual)
        head_v = _given(keys.u32("llama.attention.value_length"), usual)
        rot = _given(keys.u32("llama.rope.dimension_count"), head_k)
        keys.check("llama.attention.layer_norm_rms_epsilon", ValueType.F32, needed=True)
        shared = keys.u32("llama.expert_shared_feed_forward_length") or 0
        return cls(
            layers, embd, ff[0], head_k, head_v, heads[0], heads_kv[0], rot, experts, shared, _tokens(keys),
            scaling == "longrope",
        )  # fmt: skip

    def tensors(self, has: Has) -> Iterator[Wanted]:
        """Every tensor in the order in which the loader creates them."""
        yield Wanted("token_embd.weight", (self.embd, self.tokens))
        yield Wanted("output_norm.weight", (self.embd,))
        yield Wanted("output.weight", (self.embd, self.tokens), required=False)  # else token_embd.weight again
        if self.layers:
            for name in ("rope_factors_long", "rope_factors_short") if self.long_rope else ("rope_freqs",):
                yield Wanted(f"{name}.weight", (self.rot // 2,), required=False)
        for layer in range(self.layers):
            yield from self._scaled(layer, has)

    def _scaled(self, layer: int, has: Has) -> Iterator[Wanted]:
        """A layer's tensors, and beside each matrix that is there the scales that it may have."""
        for name, shape, required in self._layer(layer, has):
            full = f"blk.{layer}.{name}"
            yield Wanted(full, shape, required)
            stem = full.removesuffix(".weight")
            if len(shape) > 1 and stem != full and "gate_inp" not in stem and has(full):
                count = self.experts if stem.endswith("_exps") else 1
                yield Wanted(f"{stem}.scale", (count,), required=False)
                yield Wanted(f"{stem}.input_scale", (count,), required=False)

    def _layer(self, layer: int, has: Has) -> Iterator[Wanted]:
        embd, ff, experts = self.embd, self.ff, self.experts
        q, k, v = self.head_k * self.heads, self.head_k * self.heads_kv, self.head_v * self.heads_kv
        yield Wanted("attn_norm.weight", (embd,))
        if has(f"blk.{layer}.attn_qkv.weight"):
            yield Wanted("attn_qkv.weight", (embd, q + k + v))
            yield Wanted("attn_qkv.bias", (q + k + v,), required=False)
        else:
            for name, size in (("attn_q", q), ("attn_k", k), ("attn_v", v)):
                yield Wanted(f"{name}.weight", (embd, size))
                yield Wanted(f"{name}.bias", (size,), required=False)
        yield Wanted("attn_output.weight", (q, embd))
        yield Wanted("attn_output.bias", (embd,), required=False)
        yield Wanted("ffn_norm.weight", (embd,))
        if not experts:
            for name, rows, columns in (("ffn_gate", ff, embd), ("ffn_down", embd, ff), ("ffn_up", ff, embd)):
                yield Wanted(f"{name}.weight", (columns, rows))
                yield Wanted(f"{name}.bias", (rows,), required=False)
            return
        yield Wanted("ffn_gate_inp.weight", (embd, experts))
        yield Wanted("ffn_gate_exps.weight", (embd, ff, experts), required=False)
        yield Wanted("ffn_down_exps.weight", (ff, embd, experts))
        yield Wanted("ffn_up_exps.weight", (embd, ff, experts))
        if self.ff_shared:
            yield Wanted("ffn_gate_shexp.weight", (embd, self.ff_shared))
            yield Wanted("ffn_up_shexp.weight", (embd, self.ff_shared))
            yield Wanted("ffn_down_shexp.weight", (self.ff_shared, embd))


def check_layers(key: str, layers: int) -> None:
    """ModelError E_KV_VALUE for a number of layers at which the real program aborts."""
    if not 0 < layers <= MAX_LAYERS:
        text = f"{key} is {layers}; it must be from 1 to {MAX_LAYERS}"
        raise ModelError("E_KV_VALUE", text, key=key, expected=MAX_LAYERS, found=layers)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _tokens(keys: Keys) -> int:
    """Size of the vocabulary: that of its tokens, or a key where there are none."""
    keys.check("tokenizer.ggml.model", ValueType.STR, needed=True)
    if keys.string("tokenizer.ggml.model") in WITHOUT_TOKENS:
        return keys.u32("llama.vocab_size") or 0
    return keys.count_of_strings("tokenizer.ggml.tokens")
