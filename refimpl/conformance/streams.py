"""The bytes that a seed stands for: a splitmix64 stream, cut and masked (golden/README.md, "Bytes from a seed")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refimpl.layouts import IK_LAYOUTS
from refimpl.types import TensorType

Bytes = NDArray[np.uint8]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_STEPS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def splitmix64(seed: int, nbytes: int) -> Bytes:
    """The first `nbytes` bytes of the stream of `seed`: 64-bit words, each stored little endian.

    >>> splitmix64(20261001001, 4).tobytes().hex()
    '53dbd96b'
    """
    count = -(-nbytes // 8)
    z = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA + np.uint64(seed)  # state of word i: seed + (i + 1) * gamma
    for shift, factor in _STEPS:
        z = (z ^ (z >> np.uint64(shift))) * factor
    return (z ^ (z >> np.uint64(31))).astype("<u8").view(np.uint8)[:nbytes].copy()


def _finite_halves(data: Bytes, source_type: TensorType) -> None:
    """Clear bit 14 of every f16 or bf16 scale of a block, and of every element of these two types."""
    places = [1] if source_type.name in ("f16", "bf16") else []
    for layout in IK_LAYOUTS:
        if layout.source_type.name == source_type.name:
            places += [part.source(0, 15)[0] for part in layout.parts if part.name in ("d", "dmin")]
    for place in places:
        data[place :: source_type.block_bytes] &= 0xBF


def _small_floats(data: Bytes, source_type: TensorType) -> None:
    """The top byte of the f32 scale of every q8_K block becomes (byte & 0x87) | 0x38."""
    data[3 :: source_type.block_bytes] = (data[3 :: source_type.block_bytes] & 0x87) | 0x38


def _counter(data: Bytes, source_type: TensorType) -> None:
    """No stream: 16-bit word number i is i mod 65536."""
    data.view("<u2")[:] = np.arange(data.size // 2) % 65536


MASKS: dict[str | None, Callable[[Bytes, TensorType], None]] = {
    None: lambda data, source_type: None,
    "none": lambda data, source_type: None,
    "fin16": _finite_halves,
    "q8k_d": _small_floats,
    "u16_counter": _counter,
}
"""Mask name -> what it changes in place in the bytes of a stream, so that the recorded program takes them."""


def masked_stream(seed: int, nbytes: int, mask: str | None, source_type: TensorType) -> Bytes:
    """The source bytes of an entry of kind repack. KeyError for a mask that MASKS does not have."""
    apply = MASKS[mask]
    data = splitmix64(seed, nbytes)
    apply(data, source_type)
    return data
