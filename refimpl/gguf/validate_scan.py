"""The search for the first bad value: the clear version, straight from the definitions of validate.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.gguf.validate_rules import WIDTHS, Predicate

Bytes = NDArray[np.uint8]
Values = NDArray[Any]
"""Little-endian bit patterns; the predicates make a truth value of each."""

_PART_BYTES = 1 << 20
"""Of values that are judged at a time."""


@dataclass(frozen=True, slots=True)
class Scan:
    """Where to look: `count` values side by side at byte `start`, again `stride` bytes on, `units` times in all."""

    predicate: Predicate
    start: int
    stride: int
    units: int
    count: int

    @property
    def span(self) -> int:
        """Bytes from the first value to the end of the last one of a unit."""
        return self.count * WIDTHS[self.predicate]

    def end(self) -> int:
        """Where the last value ends."""
        return self.start + (self.units - 1) * self.stride + self.span if self.units else 0

    def check(self, nbytes: int) -> None:
        """ValueError if the scan would leave a buffer of that size."""
        if self.units and not (self.start >= 0 and self.stride >= self.span and self.end() <= nbytes):
            raise ValueError(f"a scan up to byte {self.end()} in a buffer of {nbytes}")


def first_bad(data: Bytes, scan: Scan) -> int:
    """Byte offset of the first bad value, or -1. ValueError if the scan would leave the data."""
    scan.check(data.size)
    width = WIDTHS[scan.predicate]
    step = max(1, _PART_BYTES // scan.span)
    for first in range(0, scan.units, step):
        units = min(step, scan.units - first)
        start = scan.start + first * scan.stride
        part = data[start : start + (units - 1) * scan.stride + scan.span]
        values = np.lib.stride_tricks.as_strided(part, (units, scan.span), (scan.stride, 1), writeable=False)
        bad = _BAD[scan.predicate](np.ascontiguousarray(values).reshape(-1).view(f"<u{width}"))
        if bad.any():
            unit, number = divmod(int(bad.argmax()), scan.count)
            return start + unit * scan.stride + number * width
    return -1


def _bad16(u: Values) -> Any:
    return (u & 0x7C00) == 0x7C00


def _nan16(u: Values) -> Any:
    return _bad16(u) & ((u & 0x3FF) != 0)


def _bad32(u: Values) -> Any:
    return (u & 0x7F80_0000) == 0x7F80_0000


def _f64(u: Values) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return ~np.isfinite(u.view("<f8").astype("<f4"))


def iq1_m_scale(u: Values) -> Any:
    """The f16 pattern made of the top nibbles of four words, from low to high."""
    z = u.view("<u2").reshape(-1, 4)
    return (z[:, 0] >> 12) | ((z[:, 1] >> 8) & 0x00F0) | ((z[:, 2] >> 4) & 0x0F00) | (z[:, 3] & 0xF000)


_BAD: dict[Predicate, Callable[[Values], Any]] = {
    "bad16": _bad16,
    "nan16": _nan16,
    "bf16": lambda u: (u & 0x7F80) == 0x7F80,
    "bad32": _bad32,
    "f64": _f64,
    "ff": lambda u: u == 0xFF,
    "iq1_m": lambda u: _bad16(iq1_m_scale(u)),
}
