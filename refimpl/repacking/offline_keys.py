"""The key-values of an offline repack (specification: repack-ik.md 8.3, 8.6)."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from refimpl.errors import UsageError
from refimpl.gguf.header import Header
from refimpl.gguf.values import LazyArray, ValueType
from refimpl.model.architectures import KNOWN
from refimpl.types import TensorType, UnknownType

Pair = tuple[bytes, Any, Any]
"""Key, type (an array's is ("arr", element type)) and value, as the writer takes them."""

FILE_TYPE, QUANTIZATION_VERSION = b"general.file_type", b"general.quantization_version"
GUESSED = 1024
"""The bit of a file type that was guessed from the tensors."""

# File type of the input -> file type of the output; what is not here stays.
REPACKED_FILE_TYPE = {
    2: 202, 7: 207, 8: 208, 10: 210, 11: 211, 12: 211, 13: 211, 14: 214, 15: 214, 16: 216, 17: 216, 18: 218, 19: 219,
    20: 220, 23: 223, 24: 224, 25: 225, 26: 226, 29: 229, 30: 230, 31: 231, 32: 232, 135: 335, 137: 337, 138: 338,
    139: 339, 140: 340, 141: 341, 145: 345, 149: 398, 150: 350,
}  # fmt: skip

GUESS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_K": 10, "q3_K": 12, "q4_K": 15,
    "q5_K": 17, "q6_K": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26,
    "iq2_s": 29, "iq4_xs": 30, "iq1_m": 31, "bf16": 32, "q4_0_4x4": 33, "q4_0_4x8": 34, "q4_0_8x8": 35, "mxfp4": 38,
    "q6_0": 135, "iq1_bn": 136, "iq2_bn": 137, "iq2_k": 138, "iq3_k": 139, "iq4_k": 140, "iq5_k": 141, "iq6_k": 142,
    "iq4_ks": 145, "iq2_ks": 147, "iq4_kss": 148, "q8_KV": 149, "iq5_ks": 150, "iq2_kt": 151, "iq3_kt": 152,
    "iq4_kt": 153, "iq3_ks": 154, "iq2_kl": 155, "iq1_kt": 156, "q4_0_r8": 202, "q8_0_r8": 207, "q5_0_r4": 208,
    "q3_k_r4": 211, "q4_k_r4": 214, "q5_k_r4": 216, "q6_k_r4": 218, "iq2_xxs_r4": 219, "iq2_xs_r4": 220,
    "iq3_xxs_r4": 223, "iq1_s_r4": 224, "iq4_nl_r4": 225, "iq3_s_r4": 226, "iq2_s_r4": 229, "iq4_xs_r8": 230,
    "iq1_m_r4": 231, "bf16_r16": 232, "q6_0_r4": 335, "iq2_bn_r4": 337, "iq2_k_r4": 338, "iq3_k_r4": 339,
    "iq4_k_r4": 340, "iq5_k_r4": 341, "iq4_ks_r4": 345, "iq5_ks_r4": 350, "q8_KV_r8": 398, "q8_k_r8": 399,
}  # fmt: skip

_NEEDED = ("context_length", "embedding_length", "block_count")
"""Keys without which the hyper-parameters cannot be read."""


def parse_override(text: str) -> Pair:
    """`KEY=TYPE:VALUE` with the types int, float, bool and str. UsageError E_OVERRIDE."""
    match = re.fullmatch(r"([^=]+)=(int|float|bool|str):(.*)", text, re.DOTALL)
    if match is None:
        raise UsageError("E_OVERRIDE", f"an override is KEY=TYPE:VALUE with TYPE int, float, bool or str, not {text!r}")
    key, kind, value = match.groups()
    try:
        if kind == "int":
            struct.pack("<i", int(value))
            return key.encode(), ValueType.I32, int(value)
        if kind == "float":
            return key.encode(), ValueType.F32, struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except (ValueError, OverflowError, struct.error):
        raise UsageError("E_OVERRIDE", f"{value!r} in {text!r} is no {kind}") from None
    if kind == "bool":
        if value not in ("true", "false"):
            raise UsageError("E_OVERRIDE", f"{value!r} in {text!r} is neither true nor false")
        return key.encode(), ValueType.BOOL, value == "true"
    if len(value.encode()) > 127:
        raise UsageError("E_OVERRIDE", f"the value of {key!r} has more than 127 bytes")
    return key.encode(), ValueType.STR, value.encode()


def output_pairs(header: Header, overrides: Sequence[Pair]) -> list[Pair]:
    """The key-values of the output (of its first shard, without the split keys)."""
    pairs: dict[bytes, Pair] = {}
    for pair in header.kv.items_raw():
        key = _cut(pair.key)
        kind: Any = pair.type
        value: Any = pair.value
        if isinstance(value, LazyArray):
            kind = ("arr", value.element_type)
            value = _plain_strings(value)
        elif pair.type is ValueType.STR:
            value = pair.cstr
        pairs[key] = (key, kind, value)
    file_type = output_file_type(header)
    pairs[QUANTIZATION_VERSION] = (QUANTIZATION_VERSION, ValueType.U32, 2)
    for key in (b"split.no", b"split.count", b"split.tensors.count"):
        pairs.pop(key, None)
    for override in overrides:
        pairs[override[0]] = override
    pairs[FILE_TYPE] = (FILE_TYPE, ValueType.U32, file_type)
    return list(pairs.values())


def output_file_type(header: Header) -> int:
    """The file type that is written."""
    name = header.architecture
    if name not in KNOWN or any(not isinstance(header.kv.get(f"{name}.{key}"), int) for key in _NEEDED):
        found = 0
    else:
        given = header.kv.get(FILE_TYPE.decode())
        found = given if isinstance(given, int) else GUESSED | guess([tensor.type for tensor in header.tensors])
    return REPACKED_FILE_TYPE.get(found, found)


def guess(types: Iterable[TensorType | UnknownType]) -> int:
    """The file type of the most frequent tensor type; among equals, of the one that got there first."""
    counts: Counter[str] = Counter()
    best = ""
    for kind in types:
        counts[kind.name] += 1
        if not best or counts[kind.name] > counts[best]:
            best = kind.name
    return GUESS.get(best, 0)


def _cut(data: bytes) -> bytes:
    return data.partition(b"\0")[0]


def _plain_strings(array: LazyArray) -> Any:
    """Strings are written as C strings: as they are if none holds a NUL, else cut one by one."""
    if array.element_type is not ValueType.STR or not len(array):
        return array
    from refimpl.kernels.strings import any_nul

    data = np.frombuffer(b"".join(array.packed()), np.uint8)
    return array if not any_nul(data, len(array)) else [_cut(item) for item in array.raws()]


def split_pairs(number: int, count: int, tensors: int) -> Iterator[Pair]:
    """The three keys that every shard of several ends with."""
    yield b"split.no", ValueType.U16, number
    yield b"split.count", ValueType.U16, count
    yield b"split.tensors.count", ValueType.I32, tensors
