"""What ik_llama.cpp's run-time repack does to which tensor (specification: repack-ik.md 6, 7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from refimpl.layouts import IK_LAYOUTS, IkLayout
from refimpl.types import TensorType, UnknownType

FORBIDDEN_NAMES = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})
"""Read row by row, so they must stay in rows. No other name matters."""

_BY_SOURCE = {layout.source_type.name: layout for layout in IK_LAYOUTS}


@dataclass(frozen=True, slots=True)
class PassTensor:
    """A tensor as the pass meets it: `host` says whether its buffer reports host memory, `view` that it is a view."""

    name: str
    type: TensorType | UnknownType
    shape: tuple[int, ...]
    host: bool = True
    view: bool = False
    contiguous: bool = True


@dataclass(frozen=True, slots=True)
class PassResult:
    """What became of it: `layout` (its `target_type` is the new type), or None and the reason."""

    tensor: PassTensor
    layout: IkLayout | None
    reason: str


def refusal(
    name: str, tensor_type: TensorType | UnknownType, shape: Sequence[int], *, bf16: bool, contiguous: bool = True
) -> str | None:
    """Why a tensor keeps its type, tests in the real order; None if it is repacked.

    `bf16`: whether the build targets AVX512-BF16; without it bf16 and f16 have no layout.
    """
    if not contiguous:
        return "not contiguous"
    if name in FORBIDDEN_NAMES:
        return "read row by row: this name is never repacked"
    layout = _BY_SOURCE.get(tensor_type.name)
    if layout is None:
        return f"{tensor_type.name} has no interleaved type"
    if layout.whole in ("bf16", "f16") and not bf16:
        return f"{tensor_type.name} is repacked in builds for AVX512-BF16 only"
    return layout.refusal(shape)


def layout_for(
    name: str, tensor_type: TensorType | UnknownType, shape: Sequence[int], *, bf16: bool, contiguous: bool = True
) -> IkLayout | None:
    """The layout that a tensor gets, or None; refusal() says why."""
    if refusal(name, tensor_type, shape, bf16=bf16, contiguous=contiguous) is not None:
        return None
    return _BY_SOURCE[tensor_type.name]


def run_time_pass(tensors: Iterable[PassTensor], *, bf16: bool) -> list[PassResult]:
    """The pass at the end of a load with `-rtr`: every tensor repacked to what, or the reason why not."""
    results = []
    for tensor in tensors:
        if not tensor.host:
            reason: str | None = "its buffer is not host memory"
        elif tensor.view:
            reason = "a view"
        else:
            reason = refusal(tensor.name, tensor.type, tensor.shape, bf16=bf16, contiguous=tensor.contiguous)
        layout = None if reason else _BY_SOURCE[tensor.type.name]
        results.append(PassResult(tensor, layout, reason or f"repacked to {layout.name if layout else ''}"))
    return results
