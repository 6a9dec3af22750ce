"""The bytes that a seed stands for: a splitmix64 stream, cut and masked (golden/README.md, "Bytes from a seed")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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


MASKS: dict[str, Callable[[Bytes, TensorType], None]] = {
    "none": lambda data, source_type: None,
}
"""Mask name -> what it changes in place in the bytes of a stream, so that the recorded program takes them."""


def masked_stream(seed: int, nbytes: int, mask: str, source_type: TensorType) -> Bytes:
    """The source bytes of an entry of kind repack. KeyError for a mask that MASKS does not have."""
    apply = MASKS[mask]
    data = splitmix64(seed, nbytes)
    apply(data, source_type)
    return data
