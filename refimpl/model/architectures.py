"""The architectures that the real loader knows, and the tensor lists of those that are exact here.

Specification: gguf.md 6.1, placement-llama.md 7. An architecture is exact when arch/NAME.txt lists its tensors; every
other known one goes by the generic name rules of tensor_ops.py and is marked so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from refimpl.errors import ModelError

KNOWN = frozenset(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom chameleon
    chatglm clip codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32
    deepseek4 dflash dots1 dots3note dream eagle3 ernie4_5 ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon
    falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa glm4 glm4moe glm5-next
    gpt-oss gpt2 gptj gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text
    hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-k3
    kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama-embed llama4 maincoder mamba mamba2 maple mellum
    mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 modern-bert mpt muse-glimmer nanbeige
    nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr
    pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35
    qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss
    smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 t5 t5encoder talkie wavtokenizer-dec xverse
    """.split()
)

WITHOUT_OUTPUT = frozenset(
    """
    bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
    nomic-bert-moe t5encoder wavtokenizer-dec
    """.split()
)
"""Encoders: no output matrix, and no second use of the embedding in its place."""

_BLOCK = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is known of one architecture.

    `tensors` holds the tensor names it may ask for, with `blk.N.` for any layer, in the order in which the real
    program creates them; it is empty when only the generic name rules are known. `tied` says whether a missing
    output.weight means that token_embd.weight is used a second time.
    """

    name: str
    tensors: tuple[str, ...]
    tied: bool

    @property
    def exact(self) -> bool:
        """Whether the tensor list is known."""
        return bool(self.tensors)

    def lists(self, tensor: str) -> bool:
        """Whether the architecture asks for a tensor of this name (whatever the layer)."""
        return _BLOCK.sub("blk.N.", tensor, count=1) in self.tensors


def layer_of(tensor: str) -> int | None:
    """The N of `blk.N.`, or None."""
    match = _BLOCK.match(tensor)
    return int(match.group(1)) if match else None


@cache
def architecture(name: str) -> Architecture:
    """The architecture of that name. ModelError E_ARCH if the real loader does not know it."""
    if name not in KNOWN:
        raise ModelError(
            "E_ARCH", f"the loader knows no architecture {name!r}", field="general.architecture", found=name
        )
    data = files("refimpl.model") / "arch" / f"{name}.txt"
    if not data.is_file():
        return Architecture(name, (), name not in WITHOUT_OUTPUT)
    tensors, tied = [], True
    for line in data.read_text("utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("output:"):
            tied = text.removeprefix("output:").strip() == "tied-if-missing"
        elif text:
            tensors.append(text)
    return Architecture(name, tuple(tensors), tied)


@cache
def exact_architectures() -> tuple[str, ...]:
    """The names of the architectures whose tensor lists are known, sorted."""
    folder = files("refimpl.model") / "arch"
    return tuple(sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir() if entry.name.endswith(".txt")))
