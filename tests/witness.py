"""Run the compiled C++ of the real programs on one tensor. Started as a child process: a wrong byte there can kill it.

    python witness.py LIBRARY < requests > answers

LIBRARY is libggml or xllamacpp, found in the installed packages without importing them. One JSON object per line:
{"op": "layout" | "buffer", "layout", "type", "ne": [ne0, ne1, ne2], "seed"} -> {"status", "sha256"}.
`layout` calls one layout's own code, also those of other CPUs; `buffer` goes through the buffer type CPU_REPACK, which
chooses the layout for this CPU and build ("status": "none" when it has no layout).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

FILES = {
    "libggml": ("lib64/libggml-base.so.0", "lib64/libggml-cpu.so.0"),
    "xllamacpp": ("xllamacpp.abi3.so", "xllamacpp.abi3.so"),
}
TYPE, NE, NB, DATA, EXTRA = 0, 16, 48, 248, 320  # offsets in the tensor struct
STRUCT_BYTES, OVERHEAD = 336, 368
K_BLOCK_TYPE, OTHER_BLOCK_TYPE = 15, 8  # the activations' type in a layout's symbol


class InitParams(ctypes.Structure):
    """Arguments of ggml_init."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def installed(name: str) -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec(name) is not None


def symbol(layout: str) -> str:
    """The C++ name of a layout's repack method; the block type, then B, then N."""
    kind, sizes = layout.rsplit("_", 1)
    rows, interleave = sizes.split("x")
    block = f"block_{kind}"
    operand = K_BLOCK_TYPE if kind.endswith("_K") else OTHER_BLOCK_TYPE
    return (
        f"_ZN4ggml3cpu6repack13tensor_traitsI{len(block)}{block}Ll{interleave}ELl{rows}EL9ggml_type{operand}"
        "EE6repackEP11ggml_tensorPKvm"
    )


class Ggml:
    """The functions of one library that are needed here."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{name} is not installed")
        folder = Path(spec.submodule_search_locations[0])
        base, cpu = (folder / file for file in FILES[name])
        self.base = ctypes.CDLL(str(base))
        self.cpu = self.base if base == cpu else ctypes.CDLL(str(cpu))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._declare(self.base, "ggml_init", pointer, [InitParams])
        self._declare(self.base, "ggml_free", None, [pointer])
        self._declare(self.base, "ggml_nbytes", size, [pointer])
        self._declare(self.base, "ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int] + [ctypes.c_int64] * 3)
        self._declare(self.base, "ggml_backend_reg_dev_get", pointer, [pointer, size])
        self._declare(self.base, "ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p])
        self._declare(self.base, "ggml_backend_buft_name", ctypes.c_char_p, [pointer])
        self._declare(self.base, "ggml_backend_buft_get_alloc_size", size, [pointer, pointer])
        self._declare(self.base, "ggml_backend_buft_alloc_buffer", pointer, [pointer, size])
        self._declare(self.base, "ggml_backend_buffer_get_base", pointer, [pointer])
        self._declare(self.base, "ggml_backend_buffer_free", None, [pointer])
        self._declare(self.base, "ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer])
        self._declare(self.base, "ggml_backend_tensor_set", None, [pointer, pointer, size, size])
        self._declare(self.cpu, "ggml_backend_cpu_reg", pointer, [])
        self._silence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
        self.base.ggml_log_set(self._silence, None)
        self.cpu.ggml_cpu_init()

    @staticmethod
    def _declare(library: ctypes.CDLL, name: str, result: object, arguments: list[object]) -> None:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def tensor(self, type_id: int, ne: list[int]) -> tuple[int, int]:
        """A context and a tensor without memory; refuses to go on if the struct is not the one known here."""
        context = self.base.ggml_init(InitParams(65536, None, True))
        address = self.base.ggml_new_tensor_3d(context, type_id, *ne)
        found = list((ctypes.c_int64 * 4).from_address(address + NE))
        if found != [*ne, 1] or ctypes.c_int32.from_address(address + TYPE).value != type_id:
            raise SystemExit(f"unknown tensor struct: ne reads back as {found}")
        return context, address

    def repack_function(self, layout: str):
        """int f(tensor, source address, bytes) of one layout; None if this build has no such code."""
        function = getattr(self.cpu, symbol(layout), None)
        if function is None:
            return None
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
        return lambda tensor, source, nbytes: function(None, tensor, source, nbytes)

    def by_layout(self, layout: str, type_id: int, ne: list[int], source: np.ndarray) -> tuple[str, np.ndarray | None]:
        """Run one layout's code."""
        function = self.repack_function(layout)
        if function is None:
            return "absent", None
        context, tensor = self.tensor(type_id, ne)
        target = np.full(source.size, 0xAA, np.uint8)
        ctypes.c_void_p.from_address(tensor + DATA).value = target.ctypes.data
        status = function(tensor, source.ctypes.data, source.size)
        self.base.ggml_free(context)
        return ("done" if status == 0 else "refused"), target

    def by_buffer(self, type_id: int, ne: list[int], source: np.ndarray) -> tuple[str, np.ndarray | None]:
        """Go through the buffer type CPU_REPACK."""
        base = self.base
        device = base.ggml_backend_reg_dev_get(self.cpu.ggml_backend_cpu_reg(), 0)
        address = base.ggml_backend_reg_get_proc_address(
            self.cpu.ggml_backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
        )
        types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        names = []
        while types[len(names)]:
            names.append(base.ggml_backend_buft_name(types[len(names)]))
        buffer_type = types[names.index(b"CPU_REPACK")]
        context, tensor = self.tensor(type_id, ne)
        buffer = base.ggml_backend_buft_alloc_buffer(
            buffer_type, base.ggml_backend_buft_get_alloc_size(buffer_type, tensor)
        )
        base.ggml_backend_tensor_alloc(buffer, tensor, base.ggml_backend_buffer_get_base(buffer))
        status, result = "none", None
        if ctypes.c_void_p.from_address(tensor + EXTRA).value:
            base.ggml_backend_tensor_set(tensor, source.ctypes.data, 0, source.size)
            data = ctypes.c_void_p.from_address(tensor + DATA).value
            status, result = "done", np.frombuffer(ctypes.string_at(data, source.size), np.uint8)
        base.ggml_backend_buffer_free(buffer)
        base.ggml_free(context)
        return status, result


def source_bytes(seed: int, nbytes: int) -> np.ndarray:
    """The random tensor that both sides make."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def main() -> None:
    """Answer requests until the input ends."""
    from refimpl.types import type_by_name

    library = Ggml(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        kind = type_by_name(request["type"], "llama.cpp")
        source = source_bytes(request["seed"], kind.tensor_bytes(request["ne"]))
        if request["op"] == "layout":
            status, result = library.by_layout(request["layout"], kind.id, request["ne"], source)
        else:
            status, result = library.by_buffer(kind.id, request["ne"], source)
        digest = None if result is None else hashlib.sha256(result).hexdigest()
        print(json.dumps({"status": status, "sha256": digest}), flush=True)


if __name__ == "__main__":
    main()
