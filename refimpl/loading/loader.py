"""Load a model the llama.cpp way on a CPU: mapped in place, repacked where the CPU has a layout, dead pages given back.

Specification: load.md 2 to 4 and 9 to 11. Modes auto and mmap so far (they are the same on a CPU-only load).
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from refimpl.errors import UsageError
from refimpl.gguf.header import Header, TensorInfo
from refimpl.gguf.packaged import PACKAGED, packaged_model
from refimpl.gguf.remote import is_address
from refimpl.gguf.validate import validate_model
from refimpl.layouts import Layout
from refimpl.loading.arena import Arena
from refimpl.loading.copying import Copy, Progress, Steps, copy_all
from refimpl.loading.mapping import FileMapping
from refimpl.loading.memory import current_rss, peak_rss, reset_peak
from refimpl.loading.model import LoadedModel, LoadedTensor, LoadReport
from refimpl.loading.reclaim import Policy, Reclaimer
from refimpl.model.checks import check_alignment, open_checked
from refimpl.placement.devices import resolve_cpu
from refimpl.placement.llama import Placement, Row, place_header
from refimpl.repacking.llama import CpuFeatures
from refimpl.repacking.tensor import group_function
from refimpl.units import mib, pad

BEHAVES_LIKE = "llama.cpp 0c1e57098"
log = logging.getLogger("refimpl")
log.addHandler(logging.NullHandler())


def load(
    source: str | os.PathLike[str],
    *,
    load_mode: Literal["auto", "mmap"] = "auto",
    repack: bool = True,
    cpu: str | CpuFeatures = "native",
    reclaim: Policy = "progressive",
    prefetch: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    check_tensors: bool = False,
    restart_peak: bool = False,
) -> LoadedModel:
    """Load a model from its file, or from any file of a split set, or a packaged model by name.

    Each file is mapped shared and read-only. Tensors that llama.cpp would put into CPU_REPACK on this `cpu` are copied
    through the repack kernels into one anonymous arena by `threads` threads (default: the CPUs this process may use);
    everything else stays in the mapping. `reclaim`: "progressive" drops source pages right behind the copy, "end" after
    the last copy as llama.cpp pull request 24156 does, "never" keeps them. `prefetch` brings the in-place tensors into
    memory during the load. `progress(done, total)` is called in bytes before each tensor and once at the end;
    returning False cancels. `check_tensors` first judges the bytes in the file of every tensor that is loaded, in its
    own type whatever layout it gets, and refuses the model (E_TENSOR_DATA, naming all bad tensors) if one holds an Inf
    or NaN where scales are; the seconds of the load leave this out. `restart_peak` starts the kernel's counter of this
    process's peak memory again before the first byte is loaded: for a program that owns its process.

    Raises OpenError, MachineError, GGUFError, ModelError (E_ARCH, E_DATA_BOUNDS, E_DATA_ALIGN, ...), UsageError,
    LoadCancelled; then nothing stays in memory.
    """
    if load_mode not in ("auto", "mmap"):
        raise UsageError("E_LOAD_MODE", f"load mode {load_mode!r} is not built; there are auto and mmap")
    if reclaim not in ("progressive", "end", "never"):
        raise UsageError("E_RECLAIM", f"reclaim is progressive, end or never, not {reclaim!r}")
    if isinstance(source, str) and is_address(source):
        raise UsageError("E_USAGE", f"{source} is an address; only its header can be read, download it to load it")
    if not isinstance(source, str | os.PathLike):
        raise UsageError("E_SOURCE", f"load takes a path or a packaged model's name, not {type(source).__name__}")
    threads = _threads(threads)
    features = resolve_cpu(cpu) if isinstance(cpu, str) else cpu
    clock = _Clock()
    path = packaged_model(source) if isinstance(source, str) and source in PACKAGED else source
    with open_checked(path) as header:
        placement = place_header(header.kv, header.tensors, cpu=features, repack=repack)
        check_alignment(header, (header.tensors[row.index] for row in placement.rows if row.buffer_type == "CPU"))
        clock.mark("header")
        if check_tensors:
            _check_tensors(header, placement, threads)
            clock.mark("check")
    repack_groups = _compile({row.layout for row in placement.rows if row.layout})
    clock.mark("compile")
    rss_before = current_rss()
    if restart_peak:
        reset_peak()

    start = time.perf_counter()
    clock.restart()
    resources: list[Any] = []
    try:
        files: list[_File] = []
        for number, shard in enumerate(header.shards):
            mapping = FileMapping(shard.path or path, shard.size, getattr(shard.read, "identity", None))
            resources.append(mapping)
            files.append(_File(mapping, Reclaimer(mapping.advise, reclaim, _dead_ranges(header, placement, number))))
        arena = Arena([row.nbytes for row in placement.rows if row.layout])
        resources.append(arena)
        clock.mark("map")
        steps = partial(Steps, callback=progress)
        tensors = _fill(header, placement, files, arena, repack_groups, steps, clock, prefetch, threads)
    except BaseException as error:
        _forget_views(error)
        for resource in reversed(resources):
            resource.close()
        raise
    seconds = time.perf_counter() - start
    reclaimed = sum(file.reclaimer.reclaimed for file in files)
    if reclaimed:
        log.info("reclaimed %s MiB of source pages of repacked tensors", mib(reclaimed))
    warnings = list(dict.fromkeys(warning for file in files for warning in file.reclaimer.warnings))
    warnings += _placement_warnings(placement)
    for warning in warnings:
        log.warning("%s", warning)
    copied = [row for row in placement.rows if row.layout]
    places = [(tensor.absolute_offset, tensor.shard) for tensor in header.tensors]
    report = LoadReport(
        model=os.fspath(source),
        architecture=placement.architecture,
        behaves_like=BEHAVES_LIKE,
        load_mode="mmap",
        mmap=True,
        reclaim=reclaim,
        threads=threads,
        seconds=seconds,
        phases=clock.phases,
        rss_before=rss_before,
        rss_after=current_rss(),
        peak_total=peak_rss(),
        repacked_tensors=len(copied),
        repacked_bytes=sum(row.nbytes for row in copied),
        layouts=dict(sorted(Counter(row.layout.name for row in copied if row.layout).items())),
        in_place_bytes=sum(row.nbytes for row in placement.rows if row.buffer_type == "CPU"),
        reclaimed_bytes=reclaimed,
        buffers=placement.buffer_bytes([offset for offset, _ in places], [shard for _, shard in places]),
        warnings=warnings,
    )
    return LoadedModel(tensors, report, resources)


@dataclass(frozen=True, slots=True)
class _File:
    """One shard in the address space, and the account of what was given back of it."""

    mapping: FileMapping
    reclaimer: Reclaimer


def _fill(
    header: Header,
    placement: Placement,
    files: list[_File],
    arena: Arena,
    repack_groups: Callable[..., None],
    steps: Callable[..., Steps],
    clock: _Clock,
    prefetch: bool,
    threads: int,
) -> dict[str, LoadedTensor]:
    """Copy what is repacked, prefetch what stays, give the rest back. Frames from here on hold the only views."""
    tensors, copies = _tensors(header, placement, files, arena)
    in_place = [row for row in placement.rows if row.buffer_type == "CPU"]
    calls = steps([row.nbytes for row in in_place], [copy.target.nbytes for copy in copies])
    copy_all(copies, repack_groups, threads, calls)
    clock.mark("copy")
    if prefetch:
        used = [header.tensors[row.index] for row in in_place]
        for number, file in enumerate(files):
            for tensor in _merged(_range(info) for info in used if info.shard == number):
                file.mapping.prefetch(*tensor)
                file.reclaimer.beside(tensor)
        clock.mark("prefetch")
    for file in files:
        file.reclaimer.at_end()
    clock.mark("reclaim")
    return tensors


def _dead_ranges(header: Header, placement: Placement, shard: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a file's tensors that are copied and that nobody reads in place: known before the first copy."""
    kept = {row.index for row in placement.rows if row.buffer_type == "CPU"}
    for row in placement.rows:
        tensor = header.tensors[row.index]
        if row.layout and row.index not in kept and tensor.shard == shard:
            yield _range(tensor)


def _forget_views(error: BaseException) -> None:
    """Empty our own finished frames: as long as they hold views, the error would keep the memory it reports on."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__package__") == __package__:
            with suppress(RuntimeError):  # still running: this call's own caller
                frame.clear()


def _threads(threads: int | None) -> int:
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UsageError("E_THREADS", f"threads is a whole number of at least 1, not {threads!r}")
    return threads


def _check_tensors(header: Header, placement: Placement, threads: int) -> None:
    """All that is loaded is looked at before one error is raised (validate.md 1; a tensor held twice is one)."""
    loaded = sorted({row.index for row in placement.rows if row.buffer_type is not None})
    found = validate_model(header, dialect="llama.cpp", tensors=[header.tensors[i] for i in loaded], threads=threads)
    if not found:
        raise found.error()


def _range(tensor: TensorInfo) -> tuple[int, int]:
    """The tensor's bytes in the file, [start, end). Placement has refused unknown types, so the size is known."""
    return tensor.absolute_offset, tensor.absolute_offset + (tensor.nbytes or 0)


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Byte ranges in file order, those that share or touch a page merged; empty ones left out."""
    start = end = None
    for low, high in sorted(ranges):
        if low == high:
            continue
        if start is None or end is None or low > pad(end, mmap.PAGESIZE):
            if start is not None and end is not None:
                yield start, end
            start, end = low, high
        end = max(end, high)
    if start is not None and end is not None:
        yield start, end


def _compile(layouts: set[Layout]) -> Callable[..., None]:
    """The kernels of these layouts, ready to run: compiling is not part of a load."""
    if not layouts:
        return lambda *_: None
    repack_groups = group_function("repack_groups", next(iter(layouts)), "fast")  # all of one dialect
    nothing = np.empty(0, np.uint8)
    for layout in layouts:
        repack_groups(layout, nothing, nothing, 0, 1)
    return repack_groups


def _tensors(
    header: Header, placement: Placement, files: list[_File], arena: Arena
) -> tuple[dict[str, LoadedTensor], list[Copy]]:
    """Every tensor's memory (nothing is copied yet), and the copies to be made, by file offset."""
    tensors: dict[str, LoadedTensor] = {}
    copies: list[tuple[int, Copy]] = []  # by shard
    for row in placement.rows:
        if row.buffer_type is None:
            continue
        info = header.tensors[row.index]
        file = files[info.shard]
        start, end = _range(info)
        if row.layout is None:
            data = file.mapping.bytes[start:end]
        else:
            target = arena.tensor(len(copies))
            geometry = row.layout.geometry(row.shape)
            copy = Copy(file.mapping.bytes, file.reclaimer, row.layout, (start, end), *geometry, target)
            copies.append((info.shard, copy))
            data = np.frombuffer(target.data.toreadonly(), np.uint8)
        key = row.key
        while key in tensors:  # names that differ only in bytes that are no text
            key += "#2"
        tensors[key] = LoadedTensor(key, row.type, row.layout, row.shape, row.buffer_type, data)
    copies.sort(key=lambda item: (item[0], item[1].source))
    return tensors, [copy for _, copy in copies]


def _placement_warnings(placement: Placement) -> list[str]:
    """What is not certain about this placement, in a line per kind."""

    def names(rows: list[Row]) -> str:
        return ", ".join(row.name for row in rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")

    unknown = [row for row in placement.rows if row.certainty == "unknown"]
    generic = [row for row in placement.rows if row.certainty == "generic"]
    warnings = []
    if unknown:
        warnings.append(f"placement UNKNOWN for {names(unknown)}: no rule covers the name; kept as in the file")
    if generic:
        warnings.append(
            f"placement by generic name rules, not by {placement.architecture}'s own list: {names(generic)}"
        )
    return warnings


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self._last = now
