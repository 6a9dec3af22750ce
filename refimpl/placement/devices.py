"""What this machine's CPU is, in the terms of the dispatch table (specification: repack-llama.md 4).

The real functions answer what the program was compiled for; "native" assumes a build for this very machine, which is
the real programs' default. AMX is not modelled: a build with AMX takes some tensors before CPU_REPACK.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

from refimpl.repacking.llama import CpuFeatures, cpu_profile

_X86 = {"x86_64", "amd64", "i386", "i686"}
_ARM = {"aarch64", "arm64"}


def resolve_cpu(name: str) -> CpuFeatures:
    """`native`, or a named profile. UsageError E_CPU."""
    return native_cpu() if name == "native" else cpu_profile(name)


def native_cpu() -> CpuFeatures:
    """The features of the CPU that this process runs on."""
    machine = platform.machine().lower()
    if sys.platform.startswith("linux"):
        try:
            text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        except OSError:
            text = ""
        if text:
            return features_from_cpuinfo(text, machine, _sve_bytes())
    return features_from_llvm(_llvm_features(), machine)


def features_from_cpuinfo(text: str, machine: str, sve_bytes: int = 0) -> CpuFeatures:
    """Features by the text of Linux's /proc/cpuinfo; `sve_bytes` is the SVE vector length of the process."""
    machine = machine.lower()
    words = set()
    for match in re.finditer(r"^(?:flags|Features|features|isa)\s*:\s*(.*)$", text, re.MULTILINE):
        words |= set(match.group(1).lower().split())
    if machine in _X86:
        return CpuFeatures(avx2="avx2" in words, avx512f="avx512f" in words, avx512_bf16="avx512_bf16" in words)
    if machine in _ARM:
        return CpuFeatures(
            neon="asimd" in words,
            dotprod="asimddp" in words,
            i8mm="i8mm" in words,
            sve="sve" in words,
            sve_bytes=sve_bytes if "sve" in words else 0,
        )
    if machine.startswith("s390"):
        return CpuFeatures(vxe="vxe" in words)
    if machine.startswith("riscv"):
        base, *extensions = next((word for word in words if word.startswith("rv")), "").split("_")
        lengths = [int(word[3:-1]) for word in extensions if re.fullmatch(r"zvl\d+b", word)]
        return CpuFeatures(rvv="v" in base[4:], vlen=max(lengths, default=128), zvfh="zvfh" in extensions)
    return CpuFeatures()


def features_from_llvm(features: dict[str, bool], machine: str) -> CpuFeatures:
    """Features by LLVM's names, for systems without /proc (macOS, Windows). SVE lengths are not known there."""
    machine = machine.lower()
    if machine in _X86:
        avx2, avx512f, bf16 = (features.get(name, False) for name in ("avx2", "avx512f", "avx512bf16"))
        return CpuFeatures(avx2=avx2, avx512f=avx512f, avx512_bf16=bf16)
    if machine in _ARM:
        return CpuFeatures(
            neon=True, dotprod=features.get("dotprod", False), i8mm=features.get("i8mm", False)
        )  # every 64-bit Arm CPU has NEON
    return CpuFeatures()


def _llvm_features() -> dict[str, bool]:
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


def _sve_bytes() -> int:
    """The SVE vector length of this process in bytes; 0 without SVE."""
    import ctypes

    PR_SVE_GET_VL, LENGTH_MASK = 51, 0xFFFF
    try:
        answer = ctypes.CDLL(None).prctl(PR_SVE_GET_VL, 0, 0, 0, 0)
    except (OSError, AttributeError):
        return 0
    return answer & LENGTH_MASK if answer > 0 else 0
