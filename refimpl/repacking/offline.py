"""Offline repack: a model file with interleaved tensors, byte for byte as `llama-quantize --repack` of ik_llama.cpp
writes it (specification: repack-ik.md 8), in a stream.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import MachineError, ModelError, UsageError
from refimpl.gguf.files import coded, new_files
from refimpl.gguf.header import Header, TensorInfo
from refimpl.gguf.source import open_header
from refimpl.gguf.validate import validate_row_data
from refimpl.gguf.writer import Info, header_pieces
from refimpl.layouts import IkLayout
from refimpl.repacking.ik import layout_for
from refimpl.repacking.ik import refusal as ik_refusal
from refimpl.repacking.offline_keys import Pair, output_pairs, parse_override, split_pairs
from refimpl.repacking.tensor import group_function
from refimpl.types import TensorType, UnknownType
from refimpl.units import human, pad

ALIGNMENT = 32
"""Of every output, whatever `general.alignment` says."""
SLICE_BYTES = 4 << 20
Progress = Callable[[int, int], None]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output: from which tensor, in which layout (None: copied), where its data begin."""

    source: TensorInfo
    layout: IkLayout | None
    reason: str
    offset: int
    nbytes: int

    @property
    def kind(self) -> TensorType:
        """The type that the output says."""
        kind = self.layout.target_type if self.layout else self.source.type
        assert isinstance(kind, TensorType)
        return kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Trailing sizes of 1 are dropped, down to one dimension."""
        shape = self.source.shape or (1,)
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        return shape


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of the output."""

    path: Path
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file, the last tensor's padding included."""
        last = self.tensors[-1] if self.tensors else None
        return len(self.header) + (last.offset + pad(last.nbytes, ALIGNMENT) if last else 0)


@dataclass(slots=True)
class RepackReport:
    """What was done. `files` is empty if there was nothing to repack."""

    files: list[str]
    tensors: int
    repacked: int
    nbytes: int
    types: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "files": self.files,
            "tensors": self.tensors,
            "repacked": self.repacked,
            "bytes": self.nbytes,
            "types": self.types,
        }


def offline_repack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    patterns: Sequence[str] = (),
    keep_split: bool = False,
    overrides: Sequence[str] = (),
    bf16: bool = False,
    force: bool = False,
    fsync: bool = True,
    check: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> RepackReport:
    """Write `source` to `out` with every eligible tensor interleaved.

    `patterns`: only tensors in whose name one of them is found (each text is split at its commas). `keep_split`: a
    split set gives a split set, named after `out`. `overrides`: KEY=TYPE:VALUE. `bf16`: bf16 and f16 too, as builds
    for AVX512-BF16 do. `force` replaces an existing `out`; `fsync` waits for the disk; `check` refuses NaN and
    infinity in scales first, as the real tool does.

    Nothing is written if nothing is to be repacked. `out` appears complete or not at all.

    UsageError: E_SAME_FILE, E_EXISTS, E_PATTERN, E_OVERRIDE. ModelError: E_TENSOR_DATA, E_DATA_BOUNDS. MachineError:
    E_SPACE, E_IO, E_PERMISSION. GGUFError, OpenError as refimpl.open.
    """
    chosen = [compile_pattern(part) for text in patterns for part in text.split(",")]
    pairs = [parse_override(text) for text in overrides]
    with open_header(os.fspath(source), dialect="ik_llama.cpp") as header:
        _check_bounds(header)
        files = plan(header, Path(out), chosen, keep_split, pairs, bf16=bf16)
        repacked = [tensor for file in files for tensor in file.tensors if tensor.layout]
        total = sum(file.nbytes for file in files)
        report = RepackReport([], len(header.tensors), len(repacked), total)
        for tensor in repacked:
            report.types[tensor.kind.name] = report.types.get(tensor.kind.name, 0) + 1
        if not repacked:
            return report
        _check_places(header, files, force, total)
        with ExitStack() as stack:
            inputs = [stack.enter_context(open(str(shard.path), "rb", buffering=0)) for shard in header.shards]
            outputs = stack.enter_context(new_files([file.path for file in files], fsync=fsync))
            work = _Work(check=check, progress=progress, total=total)
            for file, output in zip(files, outputs, strict=True):
                output.write(file.header)
                output.truncate(file.nbytes)
                work.add(file, output.fileno(), [stream.fileno() for stream in inputs])
            work.run(threads or os.cpu_count() or 1)
    report.files = [os.fspath(file.path) for file in files]
    return report


def compile_pattern(pattern: str) -> re.Pattern[bytes]:
    """An ECMAScript pattern of the plain kind, which Python reads the same way. UsageError E_PATTERN for others."""
    odd = re.search(r"\(\?|\\[^.dwsDWS\[\](){}|*+?^$\\/-]|\[\[|\[\^?\]|\[[.=:]|[*+?}][*+]|[^\x20-\x7e]", pattern)
    if odd:
        raise UsageError("E_PATTERN", f"{odd.group()!r} in the pattern {pattern!r} is not supported")
    try:
        return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern).encode())
    except re.error as error:
        raise UsageError("E_PATTERN", f"the pattern {pattern!r}: {error}") from None


def plan(
    header: Header,
    out: Path,
    patterns: Sequence[re.Pattern[bytes]],
    keep_split: bool,
    overrides: Sequence[Pair],
    *,
    bf16: bool,
) -> list[OutputFile]:
    """The output files: every tensor's layout and place, and the finished headers."""
    count = len(header.shards) if keep_split else 1
    pairs = output_pairs(header, overrides)
    files = []
    for number in range(count):
        tensors, offset = [], 0
        for source in header.tensors:
            if count > 1 and source.shard != number:
                continue
            layout, reason = _decide(source, patterns, bf16)
            tensors.append(OutputTensor(source, layout, reason, offset, source.nbytes or 0))
            offset += pad(source.nbytes or 0, ALIGNMENT)
        keys = pairs if number == 0 else []
        if count > 1:
            keys = [*keys, *split_pairs(number, count, len(header.tensors))]
        infos = [Info(t.source.raw_name.partition(b"\0")[0], t.kind.id, t.shape, t.offset) for t in tensors]
        path = out
        if keep_split:
            path = out.with_name(f"{out.name.removesuffix('.gguf')}-{number + 1:05d}-of-{count:05d}.gguf")
        files.append(OutputFile(path, b"".join(header_pieces(keys, infos, ALIGNMENT)), tuple(tensors)))
    return files


def _decide(tensor: TensorInfo, patterns: Sequence[re.Pattern[bytes]], bf16: bool) -> tuple[IkLayout | None, str]:
    if isinstance(tensor.type, UnknownType):
        raise ModelError(
            "E_TENSOR_TYPE", f"{tensor.name} has type {tensor.type.id}, which nobody knows", tensor=tensor.name
        )
    shape = tensor.shape or (1,)
    reason = ik_refusal(tensor.name, tensor.type, shape, bf16=bf16)
    if reason is None and patterns and not any(p.search(tensor.name.encode()) for p in patterns):
        reason = "no pattern fits its name"
    return (None, reason) if reason else (layout_for(tensor.name, tensor.type, shape, bf16=bf16), "")


def _check_bounds(header: Header) -> None:
    for tensor in header.tensors:
        end, size = tensor.absolute_offset + (tensor.nbytes or 0), header.shards[tensor.shard].size
        if end > size:
            text = f"{tensor.name} ends at byte {end}, the file at {size}: incomplete download?"
            raise ModelError("E_DATA_BOUNDS", text, tensor=tensor.name, expected=end, found=size)


def _check_places(header: Header, files: Sequence[OutputFile], force: bool, total: int) -> None:
    """Never onto an input, onto an existing file only by force, and only where there is room."""
    for file in files:
        for shard in header.shards:
            if shard.path is None:
                raise UsageError("E_SOURCE", "offline repack needs files, not bytes or addresses")
            if file.path.exists() and os.path.samefile(file.path, shard.path):
                raise UsageError("E_SAME_FILE", f"{file.path} is an input")
        if file.path.exists() and not force:
            raise UsageError("E_EXISTS", f"{file.path} exists; --force replaces it")
        if file.path.exists() and not file.path.is_file():
            raise UsageError("E_EXISTS", f"{file.path} is not a regular file")
    folder = files[0].path.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise coded(error, f"cannot write to {folder}") from error
    if free < total:
        raise MachineError("E_SPACE", f"{folder} has {human(free)} free, the output takes {human(total)}")


class _Work:
    """Slices of tensors, each read, checked, repacked and written by one thread; nothing is held between them."""

    def __init__(self, *, check: bool, progress: Progress | None, total: int) -> None:
        self._check, self._progress, self._total = check, progress, total
        self._jobs: list[tuple[OutputTensor, int, int, int]] = []
        self._largest = 1

    def add(self, file: OutputFile, output: int, inputs: Sequence[int]) -> None:
        """All tensors of one output file; `output` and `inputs` are descriptors."""
        for tensor in file.tensors:
            self._jobs.append((tensor, inputs[tensor.source.shard], output, len(file.header) + tensor.offset))
            self._largest = max(self._largest, *(count for _, count in self._slices(tensor)), 1)

    def run(self, threads: int) -> None:
        """Do it all."""
        for layout in {tensor.layout for tensor, *_ in self._jobs if tensor.layout}:
            group_function("repack_groups", layout, "fast")(layout, np.empty(0, np.uint8), np.empty(0, np.uint8), 0, 1)
        buffers: SimpleQueue[tuple[Bytes, Bytes]] = SimpleQueue()
        for _ in range(threads):
            buffers.put((np.empty(self._largest, np.uint8), np.empty(self._largest, np.uint8)))

        def job(tensor: OutputTensor, source: int, output: int, place: int, start: int, count: int) -> int:
            pair = buffers.get()
            try:
                data = pair[0][:count]
                _read_fully(source, data, tensor.source.absolute_offset + start, tensor.source.name)
                if self._check:
                    _check_data(tensor.source, data, start)
                if tensor.layout:
                    data = _repacked(tensor, data, pair[1][:count])
                _write_fully(output, data, place + start)
            finally:
                buffers.put(pair)
            return count

        done = 0
        with ThreadPoolExecutor(threads) as pool:
            try:
                running: list[Future[int]] = []
                for tensor, source, output, place in self._jobs:
                    for start, count in self._slices(tensor):
                        running.append(pool.submit(job, tensor, source, output, place, start, count))
                        if len(running) > 2 * threads:
                            done = self._report(done + running.pop(0).result())
                for future in running:
                    done = self._report(done + future.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _report(self, done: int) -> int:
        if self._progress:
            self._progress(done, self._total)
        return done

    @staticmethod
    def _slices(tensor: OutputTensor) -> Iterator[tuple[int, int]]:
        """(start, bytes) of slices of whole row groups, or rows, near SLICE_BYTES."""
        shape = tensor.source.shape or (1,)
        assert isinstance(tensor.source.type, TensorType)
        unit = tensor.source.type.row_bytes(shape[0]) * (tensor.layout.rows if tensor.layout else 1)
        step = max(1, SLICE_BYTES // max(unit, 1)) * unit
        for start in range(0, tensor.nbytes, max(step, 1)):
            yield start, min(step, tensor.nbytes - start)


def _repacked(tensor: OutputTensor, data: Bytes, target: Bytes) -> Bytes:
    layout = tensor.layout
    assert layout is not None
    blocks = (tensor.source.shape or (1,))[0] // layout.source_type.block_length
    groups = data.size // layout.group_bytes(blocks)
    group_function("repack_groups", layout, "fast")(layout, data, target, groups, blocks)
    return target


def _check_data(tensor: TensorInfo, data: Bytes, start: int) -> None:
    assert isinstance(tensor.type, TensorType)
    verdict = validate_row_data(data, tensor.type, dialect="ik_llama.cpp")
    if not verdict.valid:
        text = f"{tensor.name}: {verdict.reason} (byte {start + (verdict.offset or 0)} of the tensor)"
        raise ModelError("E_TENSOR_DATA", text, tensor=tensor.name)


def _read_fully(descriptor: int, data: Bytes, offset: int, name: str) -> None:
    view, done = data.data, 0
    while done < view.nbytes:
        try:
            got = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise coded(error, f"cannot read {name}") from error
        if got == 0:
            raise ModelError(
                "E_DATA_BOUNDS", f"{name}: the file ended at byte {offset + done} while it was read", tensor=name
            )
        done += got


def _write_fully(descriptor: int, data: Bytes, offset: int) -> None:
    view, done = data.data, 0
    while done < view.nbytes:
        try:
            done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            raise coded(error, "cannot write the output") from error
