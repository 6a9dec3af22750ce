"""Which layout a CPU gets in llama.cpp, and which operations it serves (specification: repack-llama.md 4, 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refimpl.errors import UsageError
from refimpl.layouts import Layout, layout_by_name
from refimpl.types import TensorType, UnknownType


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """What the CPU back-end was compiled for. `sve_bytes` is the SVE vector length, `vlen` the RISC-V VLEN in bits."""

    avx2: bool = False
    avx512f: bool = False
    neon: bool = False
    dotprod: bool = False
    i8mm: bool = False
    sve: bool = False
    sve_bytes: int = 0
    vxe: bool = False
    rvv: bool = False
    vlen: int = 0
    zvfh: bool = False
    avx512_bf16: bool = False
    """Decides nothing here; ik_llama.cpp repacks bf16 and f16 only with it."""


def _arm(sve_bytes: int = 0, **features: bool) -> CpuFeatures:
    return CpuFeatures(neon=True, sve=sve_bytes > 0, sve_bytes=sve_bytes, **features)


def _riscv(vlen: int, zvfh: bool = True) -> CpuFeatures:
    return CpuFeatures(rvv=True, vlen=vlen, zvfh=zvfh)


PROFILES: dict[str, CpuFeatures] = {
    "x86-sse42": CpuFeatures(),
    "x86-avx2": CpuFeatures(avx2=True),
    "x86-avx512": CpuFeatures(avx2=True, avx512f=True),
    "x86-avx512-bf16": CpuFeatures(avx2=True, avx512f=True, avx512_bf16=True),
    "arm-neon": _arm(),
    "arm-dotprod": _arm(dotprod=True),
    "arm-i8mm": _arm(dotprod=True, i8mm=True),
    "arm-sve128-i8mm": _arm(16, dotprod=True, i8mm=True),
    "arm-sve256-i8mm": _arm(32, dotprod=True, i8mm=True),
    "arm-sve512-i8mm": _arm(64, dotprod=True, i8mm=True),
    "arm-sve256-no-i8mm": _arm(32, dotprod=True),
    "arm-i8mm-no-dotprod": _arm(i8mm=True),
    "s390x-vxe": CpuFeatures(vxe=True),
    "riscv-rvv128-zvfh": _riscv(128),
    "riscv-rvv256-zvfh": _riscv(256),
    "riscv-rvv512-zvfh": _riscv(512),
    "riscv-rvv1024-zvfh": _riscv(1024),
    "riscv-rvv2048-zvfh": _riscv(2048),
    "riscv-rvv256-no-zvfh": _riscv(256, zvfh=False),
}

ALIASES = {
    "x86-64": "x86-sse42",
    "x86-64-v2": "x86-sse42",
    "x86-64-v3": "x86-avx2",
    "x86-64-v4": "x86-avx512",
    "zen4": "x86-avx512-bf16",
    "sapphirerapids": "x86-avx512-bf16",
    "apple-m1": "arm-dotprod",
    "apple-m2": "arm-i8mm",
    "neoverse-n1": "arm-dotprod",
    "neoverse-v1": "arm-sve256-i8mm",
    "neoverse-v2": "arm-sve128-i8mm",
}


def cpu_profile(name: str) -> CpuFeatures:
    """The features of a named profile or alias. UsageError E_CPU for a name that is neither."""
    profile = ALIASES.get(name, name)
    if profile not in PROFILES:
        known = ", ".join(["native", *PROFILES, *ALIASES])
        raise UsageError("E_CPU", f"no CPU profile is called {name!r}; there are {known}")
    return PROFILES[profile]


def _conditions(cpu: CpuFeatures) -> dict[str, bool]:
    """The CPU conditions of the dispatch table, by the names used there."""
    return {
        "avx2": cpu.avx2,
        "avx512": cpu.avx512f,
        "avx2 or sve256": cpu.avx2 or (cpu.sve and cpu.i8mm and cpu.sve_bytes == 32),
        "neon i8mm": cpu.neon and cpu.i8mm,
        "neon dotprod": cpu.neon and cpu.dotprod,
        "vxe": cpu.vxe,
        "rvv256": cpu.rvv and cpu.zvfh and cpu.vlen == 256,
    }


# Per type the rules from top to bottom; a layout's own N is its row condition, and the first rule whose CPU
# condition and row condition both hold wins.
DISPATCH: dict[str, tuple[tuple[str, str], ...]] = {
    "q4_0": (
        ("avx2 or sve256", "q4_0_8x8"),
        ("neon i8mm", "q4_0_4x8"),
        ("neon dotprod", "q4_0_4x4"),
        ("vxe", "q4_0_4x4"),
        ("rvv256", "q4_0_16x1"),
    ),
    "q4_K": (
        ("avx2", "q4_K_8x8"),
        ("neon i8mm", "q4_K_8x8"),
        ("neon dotprod", "q4_K_8x4"),
        ("rvv256", "q4_K_16x1"),
    ),
    "q2_K": (("avx512", "q2_K_8x8"), ("rvv256", "q2_K_16x1")),
    "q5_K": (("neon i8mm", "q5_K_8x8"), ("neon dotprod", "q5_K_8x4")),
    "q6_K": (("neon i8mm", "q6_K_8x8"), ("neon dotprod", "q6_K_8x4")),
    "iq4_nl": (("avx2", "iq4_nl_8x8"), ("neon dotprod", "iq4_nl_4x4"), ("rvv256", "iq4_nl_16x1")),
    "mxfp4": (("avx2", "mxfp4_8x8"), ("neon dotprod", "mxfp4_4x4")),
    "q8_0": (("neon i8mm", "q8_0_4x8"), ("neon dotprod", "q8_0_4x4"), ("rvv256", "q8_0_16x1")),
    "q1_0": (("neon i8mm", "q1_0_4x8"), ("neon dotprod", "q1_0_4x4")),
}


def layout_for(tensor_type: TensorType | UnknownType, ne1: int, cpu: CpuFeatures) -> Layout | None:
    """The layout that CPU_REPACK gives a tensor of this type with `ne1` rows per matrix, or None (never repacked)."""
    conditions = _conditions(cpu)
    for condition, name in DISPATCH.get(tensor_type.name, ()):
        layout = layout_by_name(name)
        if conditions[condition] and ne1 % layout.rows == 0:
            return layout
    return None


def dimensions(shape: Sequence[int]) -> int:
    """Index of the last dimension above 1, plus one; at least 1. So [n, m, 1] counts as two-dimensional."""
    return max((i + 1 for i, size in enumerate(shape) if size > 1), default=1)


def refusal(
    op: str, tensor_type: TensorType | UnknownType, shape: Sequence[int], cpu: CpuFeatures, operand: str = "f32"
) -> str | None:
    """Why CPU_REPACK does not serve `op` with a weight of this type and shape; None if it does.

    `operand` is the type of the activations, which have no buffer yet when a model is loaded.
    """
    wanted = {"MUL_MAT": 2, "MUL_MAT_ID": 3}.get(op)
    ne1 = shape[1] if len(shape) > 1 else 1
    if 0 in shape:
        return "an empty tensor"
    if wanted is None:
        return f"{op} is not served by CPU_REPACK"
    if dimensions(shape) != wanted:
        return f"{op} needs a weight of {wanted} dimensions, this one has {dimensions(shape)}"
    if layout_for(tensor_type, ne1, cpu) is None:
        if any(layout_for(tensor_type, rows, cpu) for rows in (8, 16)):
            return f"ne1 = {ne1} is not a multiple of the rows of any {tensor_type.name} layout of this CPU"
        return f"{tensor_type.name} has no layout on this CPU"
    return None if operand == "f32" else f"activations of type {operand} are not f32"
