"""Run ik_llama.cpp's own run-time repack on one tensor. Started as a child process: a wrong byte there can kill it.

    python witness_ik.py < requests > answers

One JSON object per line: {"type", "ne": [ne0, ne1, ne2], "seed", "name"} -> {"type", "sha256"}: the type that the
tensor has after the pass, and the hash of its whole buffer.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from witness import InitParams, source_bytes

PACKAGE = "ik_llama_cpp"
NAME_BYTES = 64


class Tensor(ctypes.Structure):
    """struct ggml_tensor of this library."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("backend", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("grad", ctypes.c_void_p),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * NAME_BYTES),
        ("extra", ctypes.c_void_p),
    )


def package_folder() -> Path | None:
    """Where the wheel lies; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


class IkGgml:
    """The repack functions of the wheel's library."""

    def __init__(self) -> None:
        folder = package_folder()
        if folder is None:
            raise SystemExit("ik-llama-cpp-python is not installed")
        if ctypes.sizeof(Tensor) != 336:
            raise SystemExit("unknown tensor struct")
        self._lib = lib = ctypes.CDLL(str(folder / "lib" / "libggml.so"))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ggml_init", pointer, [InitParams]),
            ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
            ("ggml_row_size", size, [ctypes.c_int, ctypes.c_int64]),
            ("ggml_type_size", size, [ctypes.c_int]),
            ("iqk_repacked_type", ctypes.c_int, [pointer]),
            ("iqk_repack_tensor", None, [pointer]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.ggml_init(InitParams(1 << 20, None, True))
        names = {i: lib.ggml_type_name(i) for i in range(400)}
        self.names = {i: name.decode() for i, name in names.items() if name}
        self.ids = {name: i for i, name in self.names.items()}

    def tensor(self, type_name: str, ne: list[int], memory: np.ndarray, name: str) -> Tensor:
        """A contiguous tensor over this memory."""
        tensor = Tensor(type=self.ids[type_name], data=memory.ctypes.data, name=name.encode())
        row = self._lib.ggml_row_size(tensor.type, ne[0])
        tensor.ne[:] = [*ne, 1]
        tensor.nb[:] = [self._lib.ggml_type_size(tensor.type), row, row * ne[1], row * ne[1] * ne[2]]
        if memory.nbytes != tensor.nb[3]:
            raise SystemExit(f"{type_name} {ne} takes {tensor.nb[3]} bytes there, {memory.nbytes} here")
        return tensor

    def repack(self, tensor: Tensor) -> str:
        """The in-place pass; the name of the type afterwards."""
        expected = self._lib.iqk_repacked_type(ctypes.byref(tensor))
        self._lib.iqk_repack_tensor(ctypes.byref(tensor))
        if tensor.type != expected:
            raise SystemExit(f"type {tensor.type} after the pass, {expected} announced")
        return self.names[tensor.type]

    def repack_call(self, tensor: Tensor) -> None:
        """Nothing but the pass, for timing."""
        self._lib.iqk_repack_tensor(ctypes.byref(tensor))


def aligned(source: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64."""
    room = np.zeros(source.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + source.size] = source
    return room[start : start + source.size]


def main() -> None:
    """Answer requests until the input ends."""
    from refimpl.types import type_by_name

    library = IkGgml()
    for line in sys.stdin:
        request = json.loads(line)
        kind = type_by_name(request["type"], "ik_llama.cpp")
        memory = aligned(source_bytes(request["seed"], kind.tensor_bytes(request["ne"])))
        after = library.repack(library.tensor(kind.name, request["ne"], memory, request["name"]))
        print(json.dumps({"type": after, "sha256": hashlib.sha256(memory).hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
