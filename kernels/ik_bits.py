"""Any rearrangement of bits as vector code: what most layouts of ik_llama.cpp are (specification: repack-ik.md 3, 4).

A *window* is a vector in a register together with the names of its sixteen bytes. A wanted vector is put together from
windows in layers: one shuffle, one mask and one shift serve all bits that come from the same window over the same
distance. Bytes of rows are read in windows of four rows by four bytes, since that is how the targets hold them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from refimpl.kernels._vector import I16, V16, WIDTH, Emitter, Value
from refimpl.layouts.ik import IkLayout, bit_sources, sign_code_bytes

Byte = tuple[int, int]
"""A byte by its row and its offset in that row's block; for a super-block the row is 0."""
Origin = tuple[Byte, int]
"""A bit of such a byte."""
QUAD = 4


@dataclass(frozen=True)
class Window:
    """A vector and what its bytes are."""

    vector: Value
    names: tuple[Byte, ...]


@dataclass(frozen=True)
class _Layer:
    """Bits that move `distance` places up, from one window: lane -> (lane of the window, mask of target bits)."""

    window: Window
    distance: int
    lanes: dict[int, tuple[int, int]]

    def bits(self) -> int:
        return sum(mask.bit_count() for _, mask in self.lanes.values())

    def in_place(self) -> int:
        return sum(lane == source for lane, (source, _) in self.lanes.items())

    def whole_bytes(self) -> bool:
        return self.distance == 0 and all(mask == 0xFF for _, mask in self.lanes.values())


def assemble(emit: Emitter, windows: Sequence[Window], wanted: Sequence[Sequence[Origin]]) -> Value:
    """A vector whose lane i has the bits wanted[i], lowest first; lanes with nothing wanted are of no account."""
    needs: list[dict[tuple[Byte, int], int]] = []
    for bits in wanted:
        need: dict[tuple[Byte, int], int] = defaultdict(int)
        for place, (byte, bit) in enumerate(bits):
            need[byte, place - bit] |= 1 << place
        needs.append(need)
    layers: list[_Layer] = []
    while any(needs):
        best = max(_candidates(windows, needs), key=lambda layer: (layer.bits(), layer.in_place()))
        layers.append(best)
        for lane, (source, _) in best.lanes.items():
            del needs[lane][best.window.names[source], best.distance]
    return _combine(emit, layers, [lane for lane, bits in enumerate(wanted) if bits])


def _candidates(windows: Sequence[Window], needs: Sequence[dict[tuple[Byte, int], int]]) -> list[_Layer]:
    """Every window and distance that serves something, with the most that it can serve."""
    places: dict[Byte, list[tuple[int, int]]] = defaultdict(list)
    for number, window in enumerate(windows):
        for lane, byte in enumerate(window.names):
            places[byte].append((number, lane))
    found: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
    for lane, need in enumerate(needs):
        for (byte, distance), mask in need.items():
            for number, source in places[byte]:
                lanes = found[number, distance]
                if lane not in lanes or lanes[lane][1].bit_count() < mask.bit_count():
                    lanes[lane] = (source, mask)
    return [_Layer(windows[number], distance, lanes) for (number, distance), lanes in found.items()]


def _combine(emit: Emitter, layers: Sequence[_Layer], used: Sequence[int]) -> Value:
    """Whole bytes by shuffles alone; the rest masked, shifted and or-ed together."""
    moved, filled = None, set[int]()
    parts = []
    for layer in layers:
        indices = [layer.lanes[lane][0] if lane in layer.lanes else lane for lane in range(WIDTH)]
        vector = layer.window.vector
        if indices != list(range(WIDTH)):
            vector = emit.shuffle(vector, vector, indices)
        if layer.whole_bytes():
            if moved is not None:
                vector = emit.shuffle(moved, vector, [i if i in filled else WIDTH + i for i in range(WIDTH)])
            moved = vector
            filled |= layer.lanes.keys()
            continue
        masks = [0] * WIDTH
        for lane, (_, mask) in layer.lanes.items():
            masks[lane] = mask >> layer.distance if layer.distance >= 0 else mask << -layer.distance
        parts.append(_shifted(emit, emit.builder.and_(vector, ir.Constant(V16, masks)), layer.distance))
    if moved is not None and parts and not filled.issuperset(used):
        keep = ir.Constant(V16, [0xFF if lane in filled else 0 for lane in range(WIDTH)])
        moved = emit.builder.and_(moved, keep)
    return emit.any(*([moved] if moved is not None else []), *parts)


def _shifted(emit: Emitter, vector: Value, distance: int) -> Value:
    """Bits moved within their bytes; nothing crosses a byte, so wider units than bytes do."""
    if distance == 0:
        return vector
    wide = ir.VectorType(I16, WIDTH // 2)
    halves = emit.builder.bitcast(vector, wide)
    amount = ir.Constant(wide, [abs(distance)] * wide.count)
    shifted = emit.builder.shl(halves, amount) if distance > 0 else emit.builder.lshr(halves, amount)
    return emit.builder.bitcast(shifted, V16)


def prefix_parity(emit: Emitter, vector: Value, inverse: bool = False) -> Value:
    """The sign code map T on bits 1..7 of every byte, or its inverse; bit 0 stays."""
    code = emit.masked(vector, 0xFE)
    for distance in (1,) if inverse else (1, 2, 4):
        code = emit.builder.xor(code, emit.masked(code, 0xFF, distance))
    return emit.any(code, emit.masked(vector, 0x01))


class RowWindows:
    """Windows of four rows by four bytes, made when a byte is asked for."""

    def __init__(self, emit: Emitter, layout: IkLayout, rows: Sequence[Value]) -> None:
        self._emit, self._rows = emit, rows
        self._starts = row_loads(layout)
        self._made: dict[tuple[int, int], list[Window]] = {}

    def with_bytes(self, wanted: set[Byte]) -> list[Window]:
        """All windows that hold any of these bytes."""
        found = []
        for row, byte in sorted(wanted):
            for start in self._starts:
                if start <= byte < start + WIDTH:
                    found += [w for w in self._quad(row // QUAD, start) if (row, byte) in w.names and w not in found]
        return found

    def _quad(self, quad: int, start: int) -> list[Window]:
        if (quad, start) not in self._made:
            numbers = range(QUAD * quad, QUAD * quad + QUAD)
            vectors = self._emit.transpose4([self._emit.load(self._rows[row], start) for row in numbers])
            self._made[quad, start] = [
                Window(vector, tuple((row, start + 4 * m + i) for row in numbers for i in range(4)))
                for m, vector in enumerate(vectors)
            ]
        return self._made[quad, start]


def row_loads(layout: IkLayout) -> list[int]:
    """Where in a source block sixteen bytes are loaded: along large parts, then what is left; never past the end."""
    size = layout.source_type.block_bytes
    spans = []
    for part in layout.parts:
        held = {part.source(t, b)[0] for t in range(part.count) for b in range(part.bits)}
        spans.append((min(held), max(held) + 1))
    large = [span for span in spans if span[1] - span[0] >= WIDTH]
    starts: list[int] = []
    for low, high in [*sorted(large), *sorted(span for span in spans if span not in large)]:
        for start in range(low, high, WIDTH):
            held = range(start, min(high, start + WIDTH))
            if not all(any(s <= byte < s + WIDTH for s in starts) for byte in held):
                starts.append(min(start, size - WIDTH))
    return starts


def pack(emit: Emitter, rows: Sequence[Value], packed: Value, layout: IkLayout) -> None:
    """One source block of every row into a super-block."""
    sources, codes = bit_sources(layout), set(sign_code_bytes(layout))
    windows = RowWindows(emit, layout, rows)
    size = layout.super_block_bytes
    for first in range(0, size, WIDTH):
        last = min(first + WIDTH, size)
        wanted: list[list[Origin]] = [
            [((row, bit // 8), bit % 8) for row, bit in sources[8 * byte : 8 * byte + 8]] for byte in range(first, last)
        ]
        wanted += [[]] * (WIDTH - len(wanted))
        vector = assemble(emit, windows.with_bytes({byte for bits in wanted for byte, _ in bits}), wanted)
        vector = _on_lanes(emit, vector, [i - first for i in codes if first <= i < last], inverse=False)
        emit.store(
            packed, first, vector if last - first == WIDTH else emit.shuffle(vector, vector, range(last - first))
        )


def unpack(emit: Emitter, rows: Sequence[Value], packed: Value, layout: IkLayout) -> None:
    """The inverse: a super-block into one block of every row."""
    size, total, codes = layout.source_type.block_bytes, layout.super_block_bytes, set(sign_code_bytes(layout))
    back: dict[Origin, Origin] = {}
    for place, (row, bit) in enumerate(bit_sources(layout)):
        back[(row, bit // 8), bit % 8] = ((0, place // 8), place % 8)
    windows = []
    for start in [*range(0, total - WIDTH, WIDTH), total - WIDTH]:
        vector = emit.load(packed, start)
        vector = _on_lanes(emit, vector, [i - start for i in codes if start <= i < start + WIDTH], inverse=True)
        windows.append(Window(vector, tuple((0, start + i) for i in range(WIDTH))))
    for quad in range(0, layout.rows, QUAD):
        for start in dict.fromkeys([*range(0, size - WIDTH, WIDTH), size - WIDTH]):
            words = []
            for m in range(4):
                lanes = [(quad + k, start + 4 * m + i) for k in range(QUAD) for i in range(4)]
                wanted = [[back[byte, bit] for bit in range(8)] for byte in lanes]
                needed = {byte for bits in wanted for byte, _ in bits}
                words.append(assemble(emit, [w for w in windows if needed & set(w.names)], wanted))
            for k, vector in enumerate(emit.transpose4(words)):
                emit.store(rows[quad + k], start, vector)


def _on_lanes(emit: Emitter, vector: Value, lanes: Sequence[int], *, inverse: bool) -> Value:
    """Prefix parity, or its inverse, on some lanes of a vector."""
    if not lanes:
        return vector
    changed = prefix_parity(emit, vector, inverse)
    return emit.shuffle(vector, changed, [WIDTH + i if i in lanes else i for i in range(WIDTH)])
