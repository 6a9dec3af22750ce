"""A model in memory: its tensors, where they lie, and the report of how they got there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refimpl.errors import ClosedError
from refimpl.layouts import Layout
from refimpl.loading.memory import Rss
from refimpl.types import TensorType, UnknownType

DIGEST_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTensor:
    """One tensor in memory.

    `shape` has the fastest dimension first. `data` is a flat, read-only uint8 array over the tensor's own memory
    (nothing is copied): a piece of the file mapping in buffer "CPU", of the repack arena in "CPU_REPACK".
    `layout` is None for rows as they are in the file.
    """

    name: str
    type: TensorType | UnknownType
    layout: Layout | None
    shape: tuple[int, ...]
    buffer_type: str
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, the same in every layout."""
        return int(self.data.nbytes)

    def __bytes__(self) -> bytes:
        return self.data.tobytes()

    def sha256(self) -> str:
        """Hex digest of the bytes as they lie in memory."""
        state = hashlib.sha256()
        for start in range(0, self.nbytes, DIGEST_CHUNK):
            state.update(self.data[start : start + DIGEST_CHUNK].data)
        return state.hexdigest()


@dataclass(slots=True)
class LoadReport:
    """How the load went; bytes are exact integers, seconds are wall time without imports and compilation."""

    model: str
    architecture: str
    behaves_like: str
    load_mode: str
    mmap: bool
    reclaim: str
    threads: int
    seconds: float
    phases: dict[str, float]
    rss_before: Rss
    rss_after: Rss
    peak_total: int | None
    repacked_tensors: int
    repacked_bytes: int
    layouts: dict[str, int]
    in_place_bytes: int
    reclaimed_bytes: int
    buffers: dict[str, int]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `refimpl load --json` prints it."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "behaves_like": self.behaves_like,
            "load_mode": self.load_mode,
            "mmap": self.mmap,
            "reclaim": self.reclaim,
            "threads": self.threads,
            "seconds": self.seconds,
            "phases": self.phases,
            "rss": {"before": self.rss_before.to_json(), "after": self.rss_after.to_json()},
            "peak": {"total": self.peak_total},
            "repacked": {"tensors": self.repacked_tensors, "bytes": self.repacked_bytes, "layouts": self.layouts},
            "in_place_bytes": self.in_place_bytes,
            "reclaimed_bytes": self.reclaimed_bytes,
            "buffers": self.buffers,
            "warnings": self.warnings,
        }


class LoadedModel(Mapping[str, LoadedTensor]):
    """The tensors of a loaded model by name, in file order.

    A tied embedding that is held twice is found as `token_embd.weight` (rows, for look-ups) and
    `token_embd.weight#output` (interleaved). Reading from several threads is safe. close() is idempotent; arrays
    taken before stay valid, since the memory lives as long as its last view.
    """

    def __init__(self, tensors: dict[str, LoadedTensor], report: LoadReport, resources: list[Any]) -> None:
        self._tensors: dict[str, LoadedTensor] | None = tensors
        self._resources = resources
        self.report = report

    def _open(self) -> dict[str, LoadedTensor]:
        if self._tensors is None:
            raise ClosedError("E_CLOSED", f"{self.report.model} is closed")
        return self._tensors

    def __getitem__(self, name: str) -> LoadedTensor:
        return self._open()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    __eq__ = object.__eq__  # a model is itself; comparing weights is for digests()
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "closed" if self._tensors is None else f"{len(self._tensors)} tensors"
        return f"<LoadedModel {self.report.model}: {state}>"

    def digests(self, threads: int | None = None) -> dict[str, str]:
        """sha256 of every tensor as it lies in memory, sorted by name."""
        tensors = self._open()
        names = sorted(tensors)
        with ThreadPoolExecutor(threads or self.report.threads) as pool:
            return dict(zip(names, pool.map(lambda name: tensors[name].sha256(), names), strict=True))

    def close(self) -> None:
        """Let go of all memory and of the file."""
        self._tensors = None
        resources, self._resources = self._resources, []
        for resource in resources:
            resource.close()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
