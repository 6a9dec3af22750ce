"""Where llama.cpp puts each tensor of a model (specification: placement-llama.md, repack-llama.md 5).

This chapter so far: a CPU-only load. Each tensor gets a class, an operation, a buffer type and, in CPU_REPACK, a
layout; or the reason why it stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from refimpl.errors import ModelError
from refimpl.layouts import Layout
from refimpl.model.architectures import architecture, layer_of
from refimpl.model.tensor_ops import USED_AS_3D, TensorClass, stem_of, use_of
from refimpl.repacking.llama import CpuFeatures, layout_for, refusal
from refimpl.types import TensorType, UnknownType
from refimpl.units import pad

BUFFER_ALIGNMENT = 32

EMBEDDING_TWICE = frozenset({"gemma4", "gemma3n"})
"""The output copy of a tied embedding is made before the embedding, which never merges with it (2026 page, 4.3)."""
LOADS_UNUSED_BIAS = frozenset({"glm-dsa", "deepseek32"})
"""These create the router bias of layers that are not loaded (2026 page, 4.4)."""

BufferType = Literal["CPU", "CPU_REPACK"]
Certainty = Literal["exact", "generic", "unknown"]
"""exact: the architecture's own tensor list; generic: the rules by name alone; unknown: no rule covers the name."""


class Described(Protocol):
    """What placement needs to know of a tensor: a TensorInfo of a header, or a TensorSpec."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> TensorType | UnknownType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without a file: name, type, shape (fastest dimension first)."""

    name: str
    type: TensorType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The place of one tensor.

    `index` is its number in the file; `nbytes` its size in either form. `buffer_type` is "CPU", "CPU_REPACK", or
    None for a tensor that is not loaded at all. `layout` is set exactly in CPU_REPACK. `copy` marks the second
    copy of a tied embedding, held beside the first. `reason` says why this place.
    """

    index: int
    name: str
    type: TensorType
    shape: tuple[int, ...]
    nbytes: int
    tensor_class: TensorClass
    op: str | None
    buffer_type: BufferType | None
    layout: Layout | None
    reason: str
    certainty: Certainty
    copy: bool = False

    @property
    def key(self) -> str:
        """The name that is unique in a loaded model: `NAME#output` for the second copy."""
        return f"{self.name}#output" if self.copy else self.name


@dataclass(frozen=True, slots=True)
class Placement:
    """All rows, tensors in file order, a tied copy right after its original."""

    architecture: str
    rows: tuple[Row, ...]
    mmap: bool

    @property
    def model_bytes(self) -> int:
        """Bytes of all tensors of the file, a doubly held one counted once."""
        return sum(row.nbytes for row in self.rows if not row.copy)

    def buffer_bytes(self, offsets: Sequence[int] | None = None, shards: Sequence[int] | None = None) -> dict[str, int]:
        """Bytes per buffer as the real program logs them; only buffers that hold something.

        With mmap, "CPU_Mapped" is the span from the first in-place byte to the last, repacked tensors in between
        included; it needs the tensors' `offsets` (by index), or takes those of a file without gaps. Tensors of several
        files (`shards`, by index) have a span in each, and the sum is given.
        """
        if offsets is None:
            offsets, position = [], 0
            for row in self.rows:
                if not row.copy:
                    offsets.append(position)
                    position += pad(row.nbytes, BUFFER_ALIGNMENT)
        in_place = [row for row in self.rows if row.buffer_type == "CPU"]
        copied = [row for row in self.rows if row.buffer_type == "CPU_REPACK"]
        sizes = {}
        if in_place and self.mmap:
            spans: dict[int, tuple[int, int]] = {}
            for row in in_place:
                shard, start = shards[row.index] if shards else 0, offsets[row.index]
                low, high = spans.get(shard, (start, start))
                spans[shard] = min(low, start), max(high, start + row.nbytes)
            sizes["CPU_Mapped"] = sum(high - low for low, high in spans.values())
        elif in_place:
            sizes["CPU"] = sum(pad(row.nbytes, BUFFER_ALIGNMENT) for row in in_place)
        if copied:
            sizes["CPU_REPACK"] = sum(pad(row.nbytes, BUFFER_ALIGNMENT) for row in copied)
        return sizes


def place(
    architecture_name: str,
    tensors: Sequence[Described],
    *,
    cpu: CpuFeatures,
    repack: bool = True,
    mmap: bool = True,
    n_layer: int | None = None,
    unused_layers: int = 0,
) -> Placement:
    """Place the tensors of a model for a load without any device.

    `n_layer` counts all layers; the last `unused_layers` of them are next-token-prediction blocks, which are not
    loaded. ModelError: E_ARCH (architecture unknown), E_TENSOR_TYPE (a type nobody knows), E_TENSOR_MISSING
    (output.weight, where the architecture needs its own).
    """
    known = architecture(architecture_name)
    first_unused = None if n_layer is None or not unused_layers else n_layer - unused_layers
    rows: list[Row] = []
    for index, tensor in enumerate(tensors):
        layer = layer_of(tensor.name)
        unused = first_unused is not None and layer is not None and layer >= first_unused
        if unused and known.name in LOADS_UNUSED_BIAS and stem_of(tensor.name) == "exp_probs_b":
            unused = False
        rows.append(_row(known.name, index, tensor, cpu, repack, unused, known.lists(tensor.name)))
        if tensor.name == "token_embd.weight" and all(other.name != "output.weight" for other in tensors):
            if not known.tied and known.exact:
                raise ModelError("E_TENSOR_MISSING", f"{known.name} needs output.weight", field="output.weight")
            copy = _tied_copy(known.name, rows[-1], cpu, repack) if known.tied else None
            rows += [copy] if copy else []
    return Placement(known.name, tuple(rows), mmap)


def place_header(
    kv: Mapping[str, object], tensors: Sequence[Described], *, cpu: CpuFeatures, repack: bool = True, mmap: bool = True
) -> Placement:
    """place() with architecture and layer counts taken from a header's key-values.

    ModelError E_ARCH without `general.architecture`, E_KV_TYPE_MISMATCH if it is no string.
    """
    name = kv.get("general.architecture")
    if name is None:
        raise ModelError("E_ARCH", "general.architecture is missing", field="general.architecture")
    if not isinstance(name, str):
        raise ModelError("E_KV_TYPE_MISMATCH", "general.architecture is not a string", field="general.architecture")
    name = name.partition("\0")[0]  # as a C program sees it
    layers, unused = kv.get(f"{name}.block_count"), kv.get(f"{name}.nextn_predict_layers")
    return place(
        name,
        tensors,
        cpu=cpu,
        repack=repack,
        mmap=mmap,
        n_layer=layers if isinstance(layers, int) else None,
        unused_layers=unused if isinstance(unused, int) else 0,
    )


def _row(arch: str, index: int, tensor: Described, cpu: CpuFeatures, repack: bool, unused: bool, listed: bool) -> Row:
    """The row of one tensor of the file."""
    if isinstance(tensor.type, UnknownType):
        text = f"{tensor.name} has type {tensor.type.id}, which nobody knows"
        raise ModelError("E_TENSOR_TYPE", text, tensor=tensor.name, found=tensor.type.id)
    use = use_of(tensor.name, arch)
    layout, reason = None, ""
    buffer_type: BufferType | None = "CPU"
    if unused:
        buffer_type, reason = None, "next-token-prediction layer: not loaded"
    elif use.op is None:
        reason = "UNKNOWN: no rule covers this name; kept as it is"
    elif not repack:
        reason = "repack is off"
    elif (arch, stem_of(tensor.name)) in USED_AS_3D:
        reason = f"{use.op} on a weight that is used with three dimensions"
    else:
        reason = refusal(use.op, tensor.type, tensor.shape, cpu) or ""
        if not reason:
            layout, buffer_type = layout_for(tensor.type, tensor.shape[1], cpu), "CPU_REPACK"
            reason = f"{use.op} in {layout.name}" if layout else ""
    return Row(
        index=index,
        name=tensor.name,
        type=tensor.type,
        shape=tensor.shape,
        nbytes=tensor.type.tensor_bytes(tensor.shape),
        tensor_class=use.tensor_class,
        op=use.op,
        buffer_type=buffer_type,
        layout=layout,
        reason=reason,
        certainty="unknown" if use.op is None else "exact" if listed else "generic",
    )


def _tied_copy(architecture_name: str, embedding: Row, cpu: CpuFeatures, repack: bool) -> Row | None:
    """The embedding used again as output: a second tensor only if it lands in another buffer than the first."""
    reason = refusal("MUL_MAT", embedding.type, embedding.shape, cpu) if repack else "repack is off"
    if reason and architecture_name not in EMBEDDING_TWICE:
        return None
    layout = None if reason else layout_for(embedding.type, embedding.shape[1], cpu)
    return Row(
        index=embedding.index,
        name=embedding.name,
        type=embedding.type,
        shape=embedding.shape,
        nbytes=embedding.nbytes,
        tensor_class="OUTPUT",
        op="MUL_MAT",
        buffer_type="CPU_REPACK" if layout else "CPU",
        layout=layout,
        reason="no output.weight: the embedding is held a second time as output",
        certainty=embedding.certainty,
        copy=True,
    )
