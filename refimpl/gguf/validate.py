"""Are there Infs and NaNs where a tensor keeps its scales? What --check-tensors asks (specification: validate.md).

Bad data is a `Verdict`, never an exception; input that nobody could judge is a coded error. What is looked at stands
in validate_rules; the search for the first bad value is in validate_scan (clear) and refimpl.kernels.validate (fast).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import ModelError, RefimplError, UsageError
from refimpl.gguf.header import Header, TensorInfo
from refimpl.gguf.source import Source, open_header
from refimpl.gguf.validate_rules import (
    REASONS,
    TENSOR,
    WIDTHS,
    Function,
    Look,
    Mode,
    Rule,
    function_of,
    rule_of,
)
from refimpl.gguf.validate_scan import Scan, iq1_m_scale
from refimpl.types import Dialect, TensorType, UnknownType, type_by_id, type_by_name

Version = Literal["fast", "clear"]
Progress = Callable[[int, int], bool | None]
Bytes = NDArray[np.uint8]
Kind = TensorType | UnknownType

SLICE_BYTES = 1 << 20
"""What one thread reads of a file at a time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tensor's bytes are good in the eyes of `function`, by its real rule (mode "oracle") or the right one.

    If not: why, and the first bad value: its row in the tensor (None where only a run of blocks was given), its block
    in that row (None for a row scale), its name, its byte offset in the tensor, and its bit pattern. The offset is
    None where the verdict is not about a value.
    """

    valid: bool
    type: str
    dialect: Dialect
    function: Function
    mode: Mode
    reason: str = ""
    row: int | None = None
    block: int | None = None
    field: str = ""
    offset: int | None = None
    bits: int | None = None

    def __bool__(self) -> bool:
        return self.valid

    @property
    def text(self) -> str:
        """One line for people."""
        if self.valid or self.offset is None or self.bits is None:
            return self.reason or "good"
        places = [
            f"{name} {number}" for name, number in (("row", self.row), ("block", self.block)) if number is not None
        ]
        return f"{', '.join([*places, self.field])} at byte {self.offset} is {self.bits:#x}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor of a model that holds bad data, and its first bad value."""

    name: str
    tensor: TensorInfo
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """What validate_model found: `tensors` and `nbytes` that were checked, and every bad tensor in file order."""

    tensors: int
    nbytes: int
    bad: tuple[BadTensor, ...]

    def __bool__(self) -> bool:
        return not self.bad

    def error(self) -> ModelError:
        """E_TENSOR_DATA, naming all bad tensors."""
        found = [(bad.name, bad.verdict.text) for bad in self.bad]
        what = "1 tensor holds" if len(found) == 1 else f"{len(found)} tensors hold"
        text = f"{what} bad data: " + "; ".join(f"{name} ({reason})" for name, reason in found)
        return ModelError("E_TENSOR_DATA", text, tensors=[name for name, _ in found], found=dict(found))


class ValidationCancelled(RefimplError):
    """E_CANCELLED: the progress callback said no."""

    exit_code = 1


def validate_row_data(
    data: Any, type: Kind | str, *, dialect: Dialect, row_bytes: int | None = None, version: Version = "fast"
) -> Verdict:
    """A run of blocks, as `ggml_validate_row_data` sees it: no shape, any number of bytes.

    `row_bytes` serves to name the row of a bad value. Errors as validate_tensor, without those about a shape.
    """
    function = function_of(dialect, None, "oracle")
    kind = type_by_name(type, dialect) if isinstance(type, str) else type
    flat = _flat(data)
    case = _prepare(kind, dialect, function, "oracle", flat.size, row_bytes)
    return case if isinstance(case, Verdict) else case.judge(flat, version)


def validate_tensor(
    data: Any,
    type: Kind | str,
    shape: Sequence[int],
    *,
    dialect: Dialect,
    function: Function | None = None,
    mode: Mode = "oracle",
    version: Version = "fast",
) -> Verdict:
    """Judge the bytes of one tensor.

    Parameters: `data`, any contiguous buffer of exactly the tensor's bytes (read-only is fine, a mapping too); `type`
    and `shape` of the tensor (elements, fastest dimension first); `function`, by default the one behind
    --check-tensors; `mode`, "oracle" for what the real function does, "correct" for the same without its defect.

    GGUFError: E_TENSOR_TYPE (the real function would divide by zero), E_BLOCK (no whole blocks). UsageError: E_TYPE,
    E_DIALECT, E_FUNCTION, E_MODE, E_VERSION, E_DATA_BUFFER, E_DATA_SIZE, E_DATA_SHAPE (interleaved rows that fill no
    group: the real function would read beyond the tensor).

    >>> validate_tensor(bytes(34) + bytes([0, 0x7C]) + bytes(32), "q8_0", (64,), dialect="llama.cpp").text
    'row 0, block 1, d at byte 34 is 0x7c00: Inf or NaN as f16'
    """
    function = function_of(dialect, function, mode)
    kind = type_by_name(type, dialect) if isinstance(type, str) else type
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise UsageError("E_DATA_SHAPE", f"a shape is made of whole numbers, not {list(shape)}", found=list(shape))
    flat = _flat(data)
    row_bytes = None
    if isinstance(kind, TensorType):
        row_bytes, nbytes = kind.row_bytes(shape[0] if shape else 1), kind.tensor_bytes(shape)
        if flat.size != nbytes:
            text = f"data has {flat.size} bytes, {kind.name} of this shape takes {nbytes}"
            raise UsageError("E_DATA_SIZE", text, expected=nbytes, found=flat.size)
    case = _prepare(kind, dialect, function, mode, flat.size, row_bytes)
    return case if isinstance(case, Verdict) else case.judge(flat, version)


def validate_model(
    source: Source | Header,
    *,
    dialect: Dialect,
    function: Function | None = None,
    mode: Mode = "oracle",
    version: Version = "fast",
    tensors: Collection[TensorInfo] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ModelVerdict:
    """Judge the tensors of a model (default: all), reading it in slices: two of `SLICE_BYTES` per thread in memory.

    `progress(done, total)` in bytes is called from this thread, and cancels by returning False. A header given here
    stays open.

    Raises what validate_tensor raises for the types in the file, and: ModelError E_DATA_BOUNDS (a tensor ends beyond
    the file; nothing has been read then), E_CHANGED (the file became shorter meanwhile); UsageError E_THREADS;
    ValidationCancelled; whatever opening and reading the source raises.
    """
    function = function_of(dialect, function, mode)
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise UsageError("E_THREADS", f"at least one thread is needed, not {threads}")
    with nullcontext(source) if isinstance(source, Header) else open_header(source, dialect=dialect) as header:
        wanted = list(header.tensors if tensors is None else tensors)
        prepared = [_of_file(info, header.shards[info.shard].size, dialect, function, mode) for info in wanted]
        total = sum(info.nbytes or 0 for info in wanted)
        verdicts = _walk(header, wanted, prepared, version, threads, _Progress(progress, total))
    bad = (BadTensor(info.name, info, verdict) for info, verdict in zip(wanted, verdicts, strict=True) if not verdict)
    return ModelVerdict(len(wanted), total, tuple(bad))


@dataclass(frozen=True, slots=True)
class _Case:
    """A tensor whose bytes must be looked at."""

    good: Verdict
    kind: TensorType
    look: Look
    scan: Scan
    row_bytes: int | None

    def judge(self, data: Bytes, version: Version) -> Verdict:
        """Search all of it."""
        found = search(version)(data, self.scan)
        return self.good if found < 0 else self.bad(found, data[found : found + self.look.width].tobytes())

    def bad(self, offset: int, value: bytes) -> Verdict:
        """The verdict for a first bad value at byte `offset`."""
        unit, rest = divmod(offset - self.scan.start, self.scan.stride)
        number, look = rest // self.look.width, self.look
        row: int | None = None
        block: int | None = None
        field = look.fields[number]
        member = number if look.rows > 1 else 0
        if look.unit == "block":
            block = unit
            if self.row_bytes:
                group, block = divmod(unit, self.row_bytes // self.kind.block_bytes)
                row = group * look.rows + member
        elif look.unit == "group":
            row = unit * look.rows + member
        elif look.rows > 1 and unit % look.rows:
            row, field = unit, f"{field} looked for amid the quants, where no row group starts"
        else:
            row = unit + member
        bits = int.from_bytes(value, "little")
        if look.predicate == "iq1_m":
            bits = int(iq1_m_scale(np.frombuffer(value, "<u8"))[0])
        return replace(
            self.good, valid=False, reason=REASONS[look.predicate], row=row, block=block, field=field, offset=offset,
            bits=bits,
        )  # fmt: skip


def search(version: Version) -> Callable[[Bytes, Scan], int]:
    """first_bad of the clear or the fast version. UsageError E_VERSION for another word."""
    modules = {"clear": "refimpl.gguf.validate_scan", "fast": "refimpl.kernels.validate"}
    if version not in modules:
        raise UsageError("E_VERSION", f"version is 'fast' or 'clear', not {version!r}")
    function: Callable[[Bytes, Scan], int] = import_module(modules[version]).first_bad
    return function


def _prepare(
    kind: Kind, dialect: Dialect, function: Function, mode: Mode, nbytes: int, row_bytes: int | None
) -> Verdict | _Case:
    """The verdict where no byte has to be looked at for it, else the case."""
    rule: Rule | None = rule_of(kind, dialect, function, mode)
    good = Verdict(True, kind.name, dialect, function, mode)

    def bad(reason: str) -> Verdict:
        return replace(good, valid=False, reason=reason)

    if rule is None or isinstance(kind, UnknownType):
        return good if rule == "never" else bad(f"tensor type {kind.id} is outside the enumeration")
    if dialect == "llama.cpp" and nbytes % kind.block_bytes:
        return bad(f"{nbytes} bytes are no whole number of blocks of {kind.block_bytes}")
    if rule == "always":
        return bad(f"{kind.name} is bad whatever its bytes are: {function} has no case for it")
    if rule == "never":
        return good
    stride = rule.unit_bytes(kind.block_bytes, row_bytes or 0)
    units = nbytes // stride if stride else 0
    if rule.unit == "group" and row_bytes:
        units = -(-nbytes // stride)  # a last group that is not full has its scales all the same
    if function == TENSOR and rule.unit == "block" and row_bytes and nbytes // row_bytes % rule.rows:
        rows = nbytes // row_bytes
        text = f"{kind.name} holds {rule.rows} rows together, {rows} rows fill no group: {function} would read beyond"
        raise UsageError("E_DATA_SHAPE", text, expected=rule.rows, found=rows)
    scan = Scan(rule.predicate, rule.offset, stride, units, len(rule.fields))
    scan.check(nbytes)
    return _Case(good, kind, rule, scan, row_bytes)


def _flat(data: Any) -> Bytes:
    """Any contiguous buffer as a flat uint8 array over the same memory. UsageError E_DATA_BUFFER."""
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError("E_DATA_BUFFER", f"data of type {type(data).__name__} has no buffer interface") from None
    if not view.c_contiguous:
        raise UsageError("E_DATA_BUFFER", "data is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _of_file(info: TensorInfo, size: int, dialect: Dialect, function: Function, mode: Mode) -> Verdict | _Case:
    """A tensor in a file of `size` bytes, its id read in `dialect`."""
    kind = type_by_id(info.type.id, dialect)
    if isinstance(kind, UnknownType):
        return _prepare(info.type, dialect, function, mode, info.nbytes or 0, None)
    nbytes = kind.tensor_bytes(info.shape)
    end = info.absolute_offset + nbytes
    if end > size:
        text = f"{info.name} ends at byte {end}, the file at {size}: incomplete download?"
        raise ModelError("E_DATA_BOUNDS", text, tensor=info.name, offset=info.absolute_offset, expected=end, found=size)
    return _prepare(kind, dialect, function, mode, nbytes, kind.row_bytes(info.ne[0]))


class _Progress:
    """Calls of the progress callback."""

    def __init__(self, callback: Progress | None, total: int) -> None:
        self._callback, self._done, self._total = callback, 0, total

    def add(self, nbytes: int) -> None:
        """So much more is done."""
        self._done += nbytes
        if self._callback is not None and self._callback(self._done, self._total) is False:
            raise ValidationCancelled("E_CANCELLED", f"cancelled after {self._done} of {self._total} bytes")


def _slices(scan: Scan) -> Iterator[tuple[int, Scan]]:
    """The scan in pieces that a thread reads at once: where each begins, and what to do there."""
    step = max(1, SLICE_BYTES // scan.stride) if scan.units else 1
    for first in range(0, scan.units, step):
        piece = replace(scan, start=0, units=min(step, scan.units - first))
        yield scan.start + first * scan.stride, piece


def _walk(
    header: Header,
    infos: list[TensorInfo],
    prepared: list[Verdict | _Case],
    version: Version,
    threads: int,
    progress: _Progress,
) -> list[Verdict]:
    """All verdicts. A slice behind the first bad value that is known of its tensor is not read."""
    function = search(version)
    firsts: list[tuple[int, bytes] | None] = [None] * len(infos)

    def run(number: int, start: int, piece: Scan) -> tuple[int, int, bytes] | None:
        if firsts[number] is not None:
            return None
        info = infos[number]
        data = header.shards[info.shard].read(info.absolute_offset + start, piece.end())
        if len(data) < piece.end():
            text = f"the file became shorter while {info.name} was read"
            raise ModelError("E_CHANGED", text, tensor=info.name)
        found = function(np.frombuffer(data, np.uint8), piece)
        return None if found < 0 else (number, start + found, data[found : found + WIDTHS[piece.predicate]])

    def finish(part: Future[tuple[int, int, bytes] | None], nbytes: int) -> None:
        result = part.result()
        if result is not None:
            number, offset, value = result
            if firsts[number] is None:  # slices end in their order, so what is found first is the first
                firsts[number] = offset, value
        progress.add(nbytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="refimpl-validate") as pool:
        running: deque[tuple[Future[tuple[int, int, bytes] | None], int]] = deque()
        try:
            for number, (info, case) in enumerate(zip(infos, prepared, strict=True)):
                left = info.nbytes or 0
                for start, piece in _slices(case.scan) if isinstance(case, _Case) else ():
                    if len(running) >= 2 * threads:
                        finish(*running.popleft())
                    share = min(left, piece.units * piece.stride)
                    left -= share
                    running.append((pool.submit(run, number, start, piece), share))
                if left:
                    progress.add(left)
            while running:
                finish(*running.popleft())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [
        case if isinstance(case, Verdict) else case.bad(*first) if first else case.good
        for case, first in zip(prepared, firsts, strict=True)
    ]
