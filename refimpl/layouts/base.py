"""What every repack layout has in common (specification: repack-llama.md 1, repack-ik.md 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from refimpl.errors import LayoutError
from refimpl.types import Dialect, TensorType


@dataclass(frozen=True, slots=True)
class Layout:
    """One interleaved layout: the blocks of one column of `rows` rows become one super-block.

    A row group (`rows` rows) keeps the byte range that its rows had. Subclasses add the fields of a super-block.
    """

    name: str
    source_type: TensorType
    rows: int
    dialect: Dialect

    @property
    def super_block_bytes(self) -> int:
        """Bytes that one super-block takes in the source: N blocks."""
        return self.rows * self.source_type.block_bytes

    def group_bytes(self, blocks: int) -> int:
        """Bytes of a row group of `blocks` blocks per row, row metadata included."""
        return self.rows * (self.source_type.row_meta_bytes + blocks * self.source_type.block_bytes)

    def refusal(self, shape: Sequence[int]) -> str | None:
        """Why a tensor of this shape (fastest dimension first) cannot have the layout; None if it can.

        The row test is on ne1 alone, never on the total number of rows.
        """
        if not 1 <= len(shape) <= 4 or not all(
            isinstance(size, Integral) and 0 < int(size) < 1 << 63 for size in shape
        ):
            return "a shape has 1 to 4 dimensions, all of them positive integers below 2^63"
        shape = [int(size) for size in shape]  # NumPy's integers wrap
        if shape[0] % self.source_type.block_length:
            return f"ne0 = {shape[0]} is not a multiple of the block length {self.source_type.block_length}"
        ne1 = shape[1] if len(shape) > 1 else 1
        return f"ne1 % {self.rows} != 0 (ne1 = {ne1})" if ne1 % self.rows else None

    def geometry(self, shape: Sequence[int]) -> tuple[int, int]:
        """(row groups, blocks per row) of an eligible shape. LayoutError E_LAYOUT_SHAPE otherwise."""
        reason = self.refusal(shape)
        if reason:
            raise LayoutError("E_LAYOUT_SHAPE", f"{self.name}: {reason}", layout=self.name, found=list(shape))
        return math.prod(map(int, shape[1:])) // self.rows, int(shape[0]) // self.source_type.block_length
