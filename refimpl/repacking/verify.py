"""Is one file a correct offline repack of another? The first difference, to the bit (specification: repack-ik.md 8).

What is asked of OUT: the tensors of IN in the same order, each either as it was or in the interleaved type of its own
type, with exactly the bytes that repack gives; and the key-values that an offline repack writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.gguf.header import Header, TensorInfo
from refimpl.gguf.source import open_header
from refimpl.gguf.values import LazyArray
from refimpl.layouts import IK_LAYOUTS, IkLayout
from refimpl.repacking.bitmap import field_of_bit
from refimpl.repacking.offline_keys import FILE_TYPE, output_pairs
from refimpl.repacking.tensor import group_function

SLICE_BYTES = 4 << 20
MOST = 20
"""Differences of key-values and tensor lists that are told one by one."""
Bytes = NDArray[np.uint8]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `what` in words; the place of the first wrong byte where bytes differ."""

    what: str
    tensor: str | None = None
    place: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Verdict:
    """`differences` is empty if OUT is a correct repack of IN. `repacked` counts its interleaved tensors."""

    differences: list[Difference]
    tensors: int
    repacked: int

    @property
    def correct(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "correct": self.correct,
            "tensors": self.tensors,
            "repacked": self.repacked,
            "differences": [{"what": d.what, "tensor": d.tensor, "place": d.place} for d in self.differences],
        }


def verify(source: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: Progress | None = None) -> Verdict:
    """Compare a repacked file with its source: key-values, tensors, and every byte up to the first wrong one.

    GGUFError, OpenError, MachineError as refimpl.open, for either file.
    """
    with (
        open_header(os.fspath(source), dialect="ik_llama.cpp") as before,
        # Two layouts are shorter than the place that the offline tool keeps for them: gaps are part of the format.
        open_header(os.fspath(out), dialect="ik_llama.cpp", allow_gaps=True) as after,
    ):
        differences = _keys(before, after)[:MOST]
        pairs = list(zip(before.tensors, after.tensors, strict=False))
        if len(before.tensors) != len(after.tensors):
            what = f"{len(before.tensors)} tensors before, {len(after.tensors)} after"
            differences.append(Difference(what))
        total, done, repacked = sum(old.nbytes or 0 for old, _ in pairs), 0, 0
        for old, new in pairs:
            if progress:
                progress(done, total)
            found, layout = _tensor(before, after, old, new)
            differences += [found] if found else []
            repacked += layout is not None
            done += old.nbytes or 0
            if found and found.place:
                break  # bytes: the first difference is what helps
        if progress:
            progress(total, total)
        return Verdict(differences, len(after.tensors), repacked)


def _keys(before: Header, after: Header) -> list[Difference]:
    expected = {key: (kind, _value(value)) for key, kind, value in output_pairs(before, ())}
    found = {key: (kind, _value(value)) for key, kind, value in output_pairs(after, ())}
    raw = after.kv.get(FILE_TYPE.decode())
    found[FILE_TYPE] = (expected[FILE_TYPE][0], raw)  # output_pairs would repack the file type a second time
    differences = []
    for key in expected.keys() | found.keys():
        name = key.decode("utf-8", "replace")
        if key not in found:
            differences.append(Difference(f"key {name} is missing"))
        elif key not in expected:
            differences.append(Difference(f"key {name} is new"))
        elif expected[key] != found[key]:
            differences.append(
                Difference(f"key {name} is {_short(found[key][1])}, expected {_short(expected[key][1])}")
            )
    return sorted(differences, key=lambda difference: difference.what)


def _value(value: Any) -> Any:
    return b"".join(value.packed()) if isinstance(value, LazyArray) else value


def _short(value: Any) -> str:
    text = f"{len(value)} bytes" if isinstance(value, bytes) and len(value) > 60 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _tensor(
    before: Header, after: Header, old: TensorInfo, new: TensorInfo
) -> tuple[Difference | None, IkLayout | None]:
    """The first difference of one tensor, and the layout it has now."""
    if old.name != new.name:
        return Difference(f"tensor {old.name} is called {new.name}", old.name), None
    shape = _trimmed(old.shape)
    if shape != _trimmed(new.shape):
        return Difference(f"shape {old.shape} became {new.shape}", old.name), None
    layout = None
    if old.type != new.type:
        layout = next(
            (x for x in IK_LAYOUTS if x.source_type.name == old.type.name and x.target_type.name == new.type.name), None
        )
        if layout is None:
            return Difference(f"{new.type.name} is no repack of {old.type.name}", old.name), None
        reason = layout.refusal(shape)
        if reason:
            return Difference(f"{new.type.name}, although {reason}", old.name), layout
    return _bytes(before, after, old, new, layout), layout


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape or (1,)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _bytes(
    before: Header, after: Header, old: TensorInfo, new: TensorInfo, layout: IkLayout | None
) -> Difference | None:
    """Compare slice by slice."""
    total, unit, blocks = old.nbytes or 0, 1, 0
    if layout:
        blocks = old.ne[0] // layout.source_type.block_length
        unit = layout.group_bytes(blocks)
    step = max(1, SLICE_BYTES // unit) * unit
    for start in range(0, total, step):
        count = min(step, total - start)
        expected = np.frombuffer(before.shards[old.shard].read(old.absolute_offset + start, count), np.uint8)
        found = np.frombuffer(after.shards[new.shard].read(new.absolute_offset + start, count), np.uint8)
        if len(expected) < count or len(found) < count:
            where = "IN" if len(expected) < count else "OUT"
            return Difference(f"{where} ends inside this tensor", old.name, {"byte": start})
        if layout:
            source, expected = expected, np.empty_like(expected)
            group_function("repack_groups", layout, "fast")(layout, source, expected, count // unit, blocks)
        wrong = np.flatnonzero(expected != found)
        if len(wrong):
            at = int(wrong[0])
            place = _place(layout, blocks, start + at, int(expected[at] ^ found[at]))
            values = f"0x{found[at]:02x}, expected 0x{expected[at]:02x}"
            return Difference(f"byte {start + at} is {values}", old.name, place)
    return None


def _place(layout: IkLayout | None, blocks: int, byte: int, changed: int) -> dict[str, Any]:
    """Where in a tensor a byte lies: row group, block, field and bit."""
    bit = (changed & -changed).bit_length() - 1
    place: dict[str, Any] = {"byte": byte, "bit": bit}
    if layout is None:
        return place
    group, inside = divmod(byte, layout.group_bytes(blocks))
    place["row_group"] = group
    place["rows"] = [group * layout.rows, group * layout.rows + layout.rows - 1]
    head = layout.rows * layout.source_type.row_meta_bytes
    if layout.whole != "bits" or inside < head:
        return place | {"field": "row metadata" if inside < head else "values"}
    block, in_block = divmod(inside - head, layout.super_block_bytes)
    return place | {"block": block, "byte_of_block": in_block, **field_of_bit(layout, in_block, bit)}
