"""What the writer writes, judged by hand-made bytes, by our reader and by the gguf package's."""

from __future__ import annotations

import errno
import io
import os
import random
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import small

import refimpl
from refimpl.errors import GGUFError, MachineError, OpenError, UsageError
from refimpl.gguf.header import Header, check_data
from refimpl.gguf.values import ValueType
from refimpl.gguf.writer import Counted, Tensor, header_bytes, write_gguf
from refimpl.types import type_by_name

F32, F16, Q4_0, Q8_0 = map(type_by_name, ("f32", "f16", "q4_0", "q8_0"))
V = ValueType

SMALL_KV = [
    ("general.architecture", V.STR, "llama"),
    ("general.alignment", V.U32, 32),
    ("tokens", ("arr", V.STR), ["", "a", b"\xff\xfe", "b\0c", "ü"]),
    ("scores", ("arr", V.F32), [0.5, -1.5, 3.0]),
]
SMALL_TENSORS: list[Tensor] = [
    ("t0", F32, (8, 2), bytes(range(64))),
    (b"t1", Q4_0, (32,), bytes(18)),
    ("t2", F16, (), b"\0\0"),
]


def written(kv: Any = (), tensors: Any = (), **options: Any) -> bytes:
    out = io.BytesIO()
    write_gguf(out, kv, tensors, **options)
    return out.getvalue()


def everything() -> list[Any]:
    """A key of every type, alone and as an array."""
    samples: dict[ValueType, list[Any]] = {
        V.U8: [0, 255], V.I8: [-128, 127], V.U16: [0, 65535], V.I16: [-32768, 7], V.U32: [0, 2**32 - 1],
        V.I32: [-(2**31), 1], V.F32: [0.25, -1e30], V.BOOL: [True, False], V.STR: ["", "héllo"],
        V.U64: [0, 2**64 - 1], V.I64: [-(2**63), 1], V.F64: [0.1, -1e300],
    }  # fmt: skip
    alone = [(f"one.{kind.name.lower()}", kind, values[1]) for kind, values in samples.items()]
    return alone + [(f"arr.{kind.name.lower()}", ("arr", kind), values) for kind, values in samples.items()]


def test_the_bytes_of_the_small_file() -> None:
    """`small` is put together by hand; its bool is 0x80 there, which a writer has no reason to write."""
    kv = [*SMALL_KV, ("flag", V.BOOL, True)]
    assert written(kv, SMALL_TENSORS) == small().replace(b"\x07\0\0\0\x80", b"\x07\0\0\0\x01")


def test_header_bytes_are_the_beginning() -> None:
    whole = written(SMALL_KV, SMALL_TENSORS)
    header = header_bytes(SMALL_KV, SMALL_TENSORS)
    assert whole.startswith(header)
    assert len(header) == refimpl.open(whole).data_start
    assert header_bytes([], []) == b"GGUF" + struct.pack("<Iqq", 3, 0, 0)


def test_our_reader_reads_it_back() -> None:
    header = refimpl.open(written(everything(), SMALL_TENSORS, version=2))
    assert header.version == 2
    for key, kind, value in everything():
        read = header.kv[key]
        if isinstance(kind, tuple):
            assert read.element_type is kind[1]
            read = list(read)
        assert read == (pytest.approx(value) if "f32" in key else value), key
    check_data(header, header.size)


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    draw = random.Random(7)
    tensors: list[Tensor] = [
        ("token_embd.weight", Q8_0, (64, 5), draw.randbytes(5 * 68)),
        ("blk.0.norm", F32, (3,), struct.pack("<3f", 1.0, 2.0, 3.0)),
        ("four", Q4_0, (32, 2, 1, 3), draw.randbytes(6 * 18)),
    ]
    path = tmp_path / "model.gguf"
    write_gguf(path, everything(), tensors, alignment=64)
    theirs = gguf.GGUFReader(path)
    with refimpl.open(path) as ours:
        assert theirs.alignment == ours.alignment == 64
        fields = [name for name in theirs.fields if not name.startswith("GGUF.")]
        assert fields == list(ours.kv)
        for name in fields:
            value = ours.kv[name]
            assert theirs.fields[name].contents() == (value if not hasattr(value, "raws") else list(value)), name
        assert len(theirs.tensors) == len(ours.tensors)
        for there, here, (_, _, _, data) in zip(theirs.tensors, ours.tensors, tensors, strict=True):
            assert (there.name, int(there.tensor_type), tuple(there.shape.tolist())) == (
                here.name, here.type.id, here.shape,
            )  # fmt: skip
            assert (there.data_offset, int(there.n_bytes)) == (here.absolute_offset, here.nbytes)
            assert there.data.tobytes() == data


def test_streams() -> None:
    """Generators of strings and of chunks give the same file as lists and bytes."""
    strings = [f"token {i}" for i in range(10_000)]
    data = random.Random(1).randbytes(4 * 30_000)

    def chunks() -> Iterator[memoryview | bytes]:
        yield b""
        yield memoryview(data)[:50_000].cast("H")
        yield data[50_000:]

    plain = written([("t", ("arr", V.STR), strings)], [("d", F32, (30_000,), array("f", data))])
    streamed = written(
        [("t", ("arr", V.STR), Counted(10_000, (s for s in strings)))], [("d", F32, (30_000,), chunks())]
    )
    assert streamed == plain
    assert refimpl.open(plain).kv["t"][9_999] == "token 9999"


def test_a_header_is_copied_bit_for_bit() -> None:
    """Arrays of an open header are written as they are, signalling NaNs and invalid UTF-8 included."""
    nan = struct.unpack("<f", struct.pack("<I", 0x7F800001))[0]
    original = written([*everything(), ("nan", ("arr", V.F32), [nan]), ("s", ("arr", V.STR), [b"\xff"])], SMALL_TENSORS)
    position = original.index(struct.pack("<iQ", V.F32, 1)) + 12
    original = original[:position] + struct.pack("<I", 0x7F800001) + original[position + 4 :]
    header = refimpl.open(original)
    pairs = [(pair.key, pair.type, pair.value) for pair in header.kv.items_raw()]
    assert written(pairs, SMALL_TENSORS) == original


class TestHoles:
    TENSORS: tuple[Tensor, ...] = (
        ("a", F32, (1_000_000,), None),
        ("b", F32, (3,), b"123456789012"),
        ("c", Q4_0, (3_200_000,), None),
    )

    def check(self, header: Header, data: bytes) -> None:
        check_data(header, len(data))
        assert len(data) == header.data_start + header.data_bytes
        assert data[header.tensor("b").absolute_offset :].rstrip(b"\0") == b"123456789012"
        assert not any(data[header.data_start : header.tensor("b").absolute_offset])

    def test_a_sparse_file(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "sparse.gguf", [], self.TENSORS)
        with refimpl.open(tmp_path / "sparse.gguf") as header:
            self.check(header, (tmp_path / "sparse.gguf").read_bytes())

    def test_in_memory(self) -> None:
        data = written([], self.TENSORS)
        self.check(refimpl.open(data), data)

    def test_where_nothing_can_be_left_out(self) -> None:
        class Pipe(io.RawIOBase):
            def __init__(self) -> None:
                self.data = bytearray()

            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                self.data += memoryview(data)[:1000]  # and takes little at a time
                return min(1000, len(data))

        pipe = Pipe()
        write_gguf(pipe, [], self.TENSORS)  # type: ignore[arg-type]
        assert bytes(pipe.data) == written([], self.TENSORS)

    def test_not_at_the_beginning_of_a_file(self) -> None:
        out = io.BytesIO(b"before")
        out.seek(6)
        write_gguf(out, [], self.TENSORS)
        assert out.getvalue() == b"before" + written([], self.TENSORS)


class TestAlignment:
    def test_the_key_is_added(self) -> None:
        header = refimpl.open(written(SMALL_KV[:1], SMALL_TENSORS, alignment=8))
        assert (header.alignment, list(header.kv)) == (8, ["general.architecture", "general.alignment"])
        assert [tensor.offset for tensor in header.tensors] == [0, 64, 88]

    @pytest.mark.parametrize("alignment", [0, -32, 48, 64])
    def test_no_power_of_two_or_not_what_the_keys_say(self, alignment: int) -> None:
        with pytest.raises(GGUFError, match="E_ALIGN_VALUE"):
            written(SMALL_KV, SMALL_TENSORS, alignment=alignment)


@pytest.mark.parametrize(
    ("kv", "tensors", "code"),
    [
        ([("", V.U8, 1)], [], "E_KEY_EMPTY"),
        ([("a", V.U8, 1), (b"a", V.U16, 1)], [], "E_KEY_DUPLICATE"),
        ([("a", V.U8, 256)], [], "E_VALUE"),
        ([("a", V.F32, 1e300)], [], "E_VALUE"),
        ([("a", V.STR, "\ud800")], [], "E_VALUE"),
        ([("a", ("arr", V.U8), ["x"])], [], "E_VALUE"),
        ([("a", ("arr", V.U8), Counted(3, iter([1, 2])))], [], "E_VALUE"),
        ([("a", ("arr", V.STR), Counted(1, iter(["x", "y"])))], [], "E_VALUE"),
        ([], [("n" * 64, F32, (1,), None)], "E_NAME_LONG"),
        ([], [("n", F32, (1,), None), ("n", F32, (1,), None)], "E_NAME_DUPLICATE"),
        ([], [("n", F32, (1,) * 5, None)], "E_NDIMS"),
        ([], [("n", F32, (1, -1), None)], "E_DIM_NEGATIVE"),
        ([], [("n", Q8_0, (33,), None)], "E_BLOCK"),
        ([], [("n", F32, (2**63,), None)], "E_DIMS_OVERFLOW"),
        ([], [("n", F32, (2**62,), None), ("m", F32, (1,), None)], "E_DIMS_OVERFLOW"),
        ([], [("n", F32, (2,), bytes(7))], "E_DATA_SIZE"),
        ([], [("n", F32, (2,), [bytes(8), b"", b"1"])], "E_DATA_SIZE"),
    ],
)
def test_what_is_refused(kv: Any, tensors: Any, code: str, tmp_path: Path) -> None:
    for target in (io.BytesIO(), tmp_path / "model.gguf"):
        with pytest.raises((GGUFError, UsageError)) as caught:
            write_gguf(target, kv, tensors)
        assert caught.value.code == code
    assert os.listdir(tmp_path) == []


def test_refused_versions() -> None:
    with pytest.raises(GGUFError, match="E_VERSION"):
        written(version=1)


class TestPaths:
    def test_an_old_file_stays_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"old")

        def chunks() -> Iterator[bytes]:
            yield bytes(4)
            assert path.read_bytes() == b"old"
            raise RuntimeError("the source failed")

        with pytest.raises(RuntimeError):
            write_gguf(path, [], [("n", F32, (2,), chunks())])
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["model.gguf"]
        write_gguf(str(path), SMALL_KV, SMALL_TENSORS)
        assert path.read_bytes() == written(SMALL_KV, SMALL_TENSORS)
        assert os.listdir(tmp_path) == ["model.gguf"]

    def test_what_the_machine_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(OpenError, match="E_OPEN"):
            write_gguf(tmp_path / "nowhere" / "model.gguf", [], [])

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(MachineError, match="E_IO"):
            write_gguf(tmp_path / "model.gguf", [], [])
        assert os.listdir(tmp_path) == []
