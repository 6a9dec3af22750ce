"""The fast twin of gguf.validate_scan. One kernel per width of a value, none per type.

Every predicate of the specification asks the same thing of a bit pattern u: (u & mask) >= limit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numpy.typing import NDArray

from refimpl.kernels._jit import kernel

if TYPE_CHECKING:
    from refimpl.gguf.validate_scan import Scan

PATTERNS: dict[str, tuple[int, int, int]] = {
    "bad16": (2, 0x7FFF, 0x7C00),
    "nan16": (2, 0x7FFF, 0x7C01),
    "bf16": (2, 0x7FFF, 0x7F80),
    "bad32": (4, 0x7FFF_FFFF, 0x7F80_0000),
    # The smallest double that rounds to an f32 Inf lies half a step above the largest f32, and a tie goes to even.
    "f64": (8, 0x7FFF_FFFF_FFFF_FFFF, 0x47EF_FFFF_F000_0000),
    "ff": (1, 0xFF, 0xFF),
    # The exponent's five bits: three on top of the fourth word, two on top of the third.
    "iq1_m": (8, 0x7000_C000_0000_0000, 0x7000_C000_0000_0000),
}
"""Predicate -> bytes of the value, mask, limit."""

STEP_BYTES = 32 << 10
"""How far the search goes before it asks whether it met something bad; if so, that part is searched for the place."""

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@intrinsic(prefer_literal=True)
def _bad(typingctx: Any, width: Any, start: Any, offset: Any, mask: Any, limit: Any) -> Any:
    """1 if the little-endian value of `width` bytes at start + offset is bad, else 0; any alignment."""
    if not isinstance(width, types.IntegerLiteral):
        raise TypingError("the width is a compile-time constant")
    kind = ir.IntType(8 * width.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, start, offset, mask, limit = args
        place = builder.gep(builder.inttoptr(start, _I8.as_pointer()), [offset])
        value = builder.load(builder.bitcast(place, kind.as_pointer()), align=1)
        mask, limit = (x if kind.width == 64 else builder.trunc(x, kind) for x in (mask, limit))
        return builder.zext(builder.icmp_unsigned(">=", builder.and_(value, mask), limit), _I64)

    return types.int64(width, types.int64, types.int64, types.int64, types.int64), codegen


@cache
def compiled(width: int) -> Any:
    """The kernel for values of `width` bytes: f(address, stride, units, count, mask, limit) -> offset or -1."""

    @kernel
    def run(start: int, stride: int, units: int, count: int, mask: int, limit: int) -> int:
        step = max(1, STEP_BYTES // stride)
        for first in range(0, units, step):
            last = min(first + step, units)
            bad = 0
            if stride == width:
                for unit in range(first, last):
                    bad |= _bad(width, start, unit * width, mask, limit)
            else:
                for i in range(count):
                    for unit in range(first, last):
                        bad |= _bad(width, start + i * width, unit * stride, mask, limit)
            if bad:
                for unit in range(first, last):
                    for i in range(count):
                        if _bad(width, start, unit * stride + i * width, mask, limit):
                            return unit * stride + i * width
        return -1

    return run


def first_bad(data: NDArray[np.uint8], scan: Scan) -> int:
    """Byte offset of the first bad value, or -1; arguments as in refimpl.gguf.validate_scan.first_bad."""
    width, mask, limit = PATTERNS[scan.predicate]
    if not scan.units:
        return -1
    scan.check(data.size)
    stride, units, count = scan.stride, scan.units, scan.count
    if stride == count * width:  # one value after the other
        stride, units, count = width, units * count, 1
    found = compiled(width)(data.ctypes.data + scan.start, stride, units, count, mask, limit)
    return scan.start + int(found) if found >= 0 else -1
