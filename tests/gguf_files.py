"""GGUF files put together by hand, right and wrong ones, independent of the writer under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U32, BOOL, STR, ARR, U64 = 4, 7, 8, 9, 10


def string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<i", kind) + value


def u32(key: bytes, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def arr(key: bytes, element: int, count: int, elements: bytes) -> bytes:
    return pair(key, ARR, struct.pack("<iQ", element, count) + elements)


def info(name: bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}q", *shape)
    return string(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<iQ", kind, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; `counts` (tensors, pairs) may lie."""
    tensor_count, pair_count = counts or (len(infos), len(pairs))
    head = magic + struct.pack("<Iqq", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(infos)
    return head + (bytes(-len(head) % alignment) + data if infos else b"")


def small() -> bytes:
    """A valid file with a bit of everything: two arrays, a string, three tensors, one of them quantized."""
    pairs = [
        pair(b"general.architecture", STR, string(b"llama")),
        u32(b"general.alignment", 32),
        arr(b"tokens", STR, 5, b"".join(map(string, (b"", b"a", b"\xff\xfe", b"b\0c", "ü".encode())))),
        arr(b"scores", 6, 3, struct.pack("<3f", 0.5, -1.5, 3.0)),
        pair(b"flag", BOOL, b"\x80"),
    ]
    infos = [info(b"t0", (8, 2), 0, 0), info(b"t1", (32,), 2, 64), info(b"t2", (), 1, 96)]
    return gguf(pairs, infos, bytes(range(64)) + bytes(18 + 14 + 2 + 30))
