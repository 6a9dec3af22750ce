"""Run the real validation functions on bytes. Started as a child process: a wrong byte there can kill it.

    python witness_validate.py LIBRARY < requests > answers

LIBRARY is libggml, xllamacpp or ik_llama_cpp, found in the installed packages without importing them. One JSON object
per line: {"function", "type_id", "type_bytes", "data_b64", "ne" and "row_bytes" for a tensor} -> {"valid"}, which is
null if this build does not know the type by that size.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

FILES = {
    "libggml": "lib64/libggml-base.so.0",
    "xllamacpp": "xllamacpp.abi3.so",
    "ik_llama_cpp": "lib/libggml.so",
}
TYPE, NE, NB, DATA, STRUCT_BYTES = 0, 16, 48, 256, 336  # of ik_llama.cpp's tensor struct


class InitParams(ctypes.Structure):
    """Arguments of ggml_init."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def installed(name: str) -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec(name) is not None


def open_library(name: str) -> ctypes.CDLL:
    """The library, with its conversion tables filled."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed")
    library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0]) / FILES[name]))
    library.ggml_init.restype, library.ggml_init.argtypes = ctypes.c_void_p, [InitParams]
    library.ggml_init(InitParams(1 << 20, None, True))
    library.ggml_type_size.restype, library.ggml_type_size.argtypes = ctypes.c_size_t, [ctypes.c_int]
    function = library.ggml_validate_row_data
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    if name == "ik_llama_cpp":
        library.iqk_validate_tensor.restype = ctypes.c_bool
        library.iqk_validate_tensor.argtypes = [ctypes.c_void_p]
    return library


def validate(library: ctypes.CDLL, request: dict) -> bool | None:
    """One answer."""
    if library.ggml_type_size(request["type_id"]) != request["type_bytes"]:
        return None
    raw = base64.b64decode(request["data_b64"])
    room = ctypes.create_string_buffer(len(raw) + 64)
    address = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    ctypes.memmove(address, raw, len(raw))
    if request["function"] == "ggml_validate_row_data":
        return library.ggml_validate_row_data(request["type_id"], address, len(raw))
    tensor = ctypes.create_string_buffer(STRUCT_BYTES)
    ne, nb = [*request["ne"], 1, 1, 1][:4], [request["type_bytes"], request["row_bytes"]]
    nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
    ctypes.c_int32.from_buffer(tensor, TYPE).value = request["type_id"]
    (ctypes.c_int64 * 4).from_buffer(tensor, NE)[:] = ne
    (ctypes.c_size_t * 4).from_buffer(tensor, NB)[:] = nb
    ctypes.c_void_p.from_buffer(tensor, DATA).value = address
    return library.iqk_validate_tensor(ctypes.addressof(tensor))


def main() -> None:
    """Answer requests until the input ends; what the library itself prints goes nowhere."""
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    library = open_library(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps({"valid": validate(library, json.loads(line))}), file=out, flush=True)


if __name__ == "__main__":
    main()
