"""Very many tiny records: memory below the file's own size, the same answers and errors as for few."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np  # loaded here, so that no test counts its memory
import pytest
from gguf_files import gguf, info, string, u32

from refimpl.errors import GGUFError
from refimpl.gguf import records
from refimpl.gguf.header import Header, parse_header
from refimpl.gguf.source import open_header

MIB = 1 << 20
assert np


def parse(data: bytes) -> Header:
    return parse_header(lambda offset, length: data[offset : offset + length], len(data), dialect="llama.cpp")


def peak_over(data: bytes, expected: str | None) -> int:
    tracemalloc.start()
    try:
        if expected is None:
            parse(data)
        else:
            with pytest.raises(GGUFError) as caught:
                parse(data)
            assert caught.value.code == expected
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tiny_pairs(count: int) -> list[bytes]:
    return [string(struct.pack("<I", i + 1)) + struct.pack("<iB", 0, i & 255) for i in range(count)]


def tiny_infos(count: int) -> list[bytes]:
    return [info(struct.pack("<I", i + 1), (), 0, 32 * i) for i in range(count)]


MANY = 6_000


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (gguf(tiny_pairs(MANY)), None),
        (gguf(tiny_pairs(MANY))[:-1], "E_TRUNCATED"),
        (gguf([*tiny_pairs(MANY), tiny_pairs(1)[0]]), "E_KEY_DUPLICATE"),
        (gguf([], tiny_infos(MANY)), None),
        (gguf([], [*tiny_infos(MANY - 1), info(b"last", (), 0, 7)]), "E_OFFSET"),
        (gguf([], [*tiny_infos(MANY), info(struct.pack("<I", 9), (), 0, 32 * MANY)]), "E_NAME_DUPLICATE"),
        (gguf([], [info(b"", (), 0, 0), *tiny_infos(MANY)]), "E_OFFSET"),
    ],
    ids=["keys", "keys cut", "a key twice", "tensors", "an offset", "a name twice", "all offsets"],
)
def test_a_record_costs_less_than_its_bytes(data: bytes, code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FEW", 500)
    monkeypatch.setattr("refimpl.gguf.tensors.FEW", 500)
    with pytest.raises(GGUFError):
        parse(gguf([*tiny_pairs(600), tiny_pairs(1)[0]]))  # what is imported late
    assert peak_over(data, code) < len(data) + MIB // 2


CHILD = """
import resource, sys
import numpy
from refimpl.gguf.source import open_header
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
header = open_header(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, header.kv[header.kv.items_raw()[-1].key.decode()])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counted in KiB on Linux")
def test_resident_memory_of_a_hostile_file(tmp_path: Path, outside: dict[str, str]) -> None:
    pairs = [string(b"%06x" % i) + struct.pack("<iB", 0, 7) for i in range(100_000)]
    (tmp_path / "m").write_bytes(gguf(pairs))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "m")]
    result = subprocess.run(command, env=outside, cwd=tmp_path, capture_output=True, text=True, check=True)
    kib, value = map(int, result.stdout.split())
    assert value == 7
    assert kib < 10 << 10  # as objects: more than 20 MiB


def test_time_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FEW", 500)
    seconds = []
    for count in (5_000, 20_000):
        data = gguf([*tiny_pairs(count), tiny_pairs(1)[0]])
        start = time.process_time()
        with pytest.raises(GGUFError):
            parse(data)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 10 * seconds[0] + 0.2


@pytest.fixture(params=["few", "many"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything twice: as objects, and as places in the file."""
    if request.param == "many":
        monkeypatch.setattr(records, "FEW", 3)
        monkeypatch.setattr("refimpl.gguf.tensors.FEW", 3)


@pytest.mark.usefixtures("few")
class TestTheSameEitherWay:
    def test_keys(self) -> None:
        draw = random.Random(1)
        names = [bytes(draw.choices(b"abc\0\xff", k=draw.randrange(1, 6))) for _ in range(400)]
        names = list(dict.fromkeys(names))
        kv = parse(gguf([u32(name, i) for i, name in enumerate(names)])).kv
        pairs = kv.items_raw()
        assert [pair.key for pair in pairs] == names
        assert [pair.value for pair in pairs] == list(range(len(names)))
        assert [pairs[i].key for i in range(-len(names), len(names), 7)] == (names + names)[::7]
        assert pairs[5:40:9] == [pairs[i] for i in range(5, 40, 9)]
        for wrong in (len(names), -len(names) - 1):
            with pytest.raises(IndexError):
                pairs[wrong]
        first = {}
        for i, name in enumerate(names):
            first.setdefault(name.partition(b"\0")[0], i)
        for name, i in first.items():
            assert kv.raw(name).value == i
            assert kv.raw(name + b"\0whatever").value == i
        assert kv.find(b"nothing") is None
        assert len(kv) == len(list(kv)) == len({name.decode("utf-8", "replace") for name in first})

    def test_tensors(self) -> None:
        names = [b"t%d" % i for i in range(50)] + [b"t3\0x", b"\xff"]
        header = parse(gguf([], [info(name, (4,), 0, 32 * i) for i, name in enumerate(names)], bytes(32 * 52)))
        assert [tensor.raw_name for tensor in header.tensors] == names
        assert [tensor.absolute_offset for tensor in header.tensors] == [header.data_start + 32 * i for i in range(52)]
        assert header.tensors[-1] == header.tensors[51]
        assert header.tensors[3:6] == [header.tensors[i] for i in (3, 4, 5)]
        assert header.tensor("t3").offset == 96
        assert header.tensor("\ufffd").raw_name == b"\xff"
        assert header.tensors.find("nothing") is None
        assert len(header.tensors) == 52
        assert repr(header.tensors) == "<52 tensors>"
        for wrong in (52, -53):
            with pytest.raises(IndexError):
                header.tensors[wrong]

    @pytest.mark.parametrize(
        ("pairs", "code", "number"),
        [
            ([u32(b"%d" % i, i) for i in range(40)] + [u32(b"7", 1)], "E_KEY_DUPLICATE", 40),
            ([u32(b"%d" % i, i) for i in range(40)] + [u32(b"7", 1), u32(b"8", 1)], "E_KEY_DUPLICATE", 40),
            ([u32(b"%d" % (i % 20), i) for i in range(40)], "E_KEY_DUPLICATE", 20),
            # A later record is broken, an earlier name repeated: the name comes first.
            ([u32(b"%d" % i, i) for i in range(40)] + [u32(b"7", 1), u32(b"", 1)], "E_KEY_DUPLICATE", 40),
            # The same record repeats a name and has an unknown type: the name is tested first.
            ([u32(b"%d" % i, i) for i in range(40)] + [string(b"7") + struct.pack("<i", 99)], "E_KEY_DUPLICATE", 40),
            # An earlier record is broken.
            ([u32(b"%d" % i, i) for i in range(40)] + [string(b"x") + struct.pack("<i", 99), u32(b"7", 1)],
             "E_KV_TYPE", 40),
            ([u32(b"%d" % i, i) for i in range(40)] + [u32(b"", 1), u32(b"7", 1)], "E_KEY_EMPTY", 40),
        ],
    )  # fmt: skip
    def test_the_first_broken_rule_in_reading_order(self, pairs: list[bytes], code: str, number: int) -> None:
        start = 24 + sum(map(len, pairs[:number]))
        with pytest.raises(GGUFError) as caught:
            parse(gguf(pairs))
        assert caught.value.code == code
        assert start <= caught.value.fields["offset"] < start + len(pairs[number])

    def test_hashes_that_collide_are_no_repeats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records, "_HASH", 7)
        monkeypatch.setattr(records, "_MARK", 1)
        pairs = [u32(b"%d" % i, i) for i in range(40)]
        kv = parse(gguf(pairs)).kv
        assert [kv[str(i)] for i in range(40)] == list(range(40))
        with pytest.raises(GGUFError, match="E_KEY_DUPLICATE"):
            parse(gguf([*pairs, u32(b"0", 1)]))


def test_a_file_that_has_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FEW", 3)
    path = tmp_path / "m"
    path.write_bytes(gguf(tiny_pairs(100)))
    with open_header(path) as header:
        path.write_bytes(path.read_bytes()[:1000])
        assert header.kv.items_raw()[1].value == 1
        with pytest.raises(GGUFError, match="E_TRUNCATED"):
            header.kv.items_raw()[99]


def test_a_key_as_long_as_the_file_is_cut_in_errors() -> None:
    name = b"\xff" * (8 * MIB)
    data = gguf([string(name) + struct.pack("<i", 99)])
    assert peak_over(data, "E_KV_TYPE") < len(data) + 4 * MIB


class TestGaps:
    INFOS = (info(b"a", (4,), 0, 0), info(b"b", (4,), 0, 64), info(b"c", (4,), 0, 96))

    def test_only_on_demand_and_in_one_dialect(self) -> None:
        data = gguf([], self.INFOS, bytes(128))
        for options in ({}, {"dialect": "llama.cpp"}, {"dialect": "ik_llama.cpp"}):
            with pytest.raises(GGUFError, match="E_OFFSET"):
                open_header(data, **options)
        for dialect in (None, "llama.cpp"):
            with pytest.raises(ValueError, match="E_DIALECT"):
                open_header(data, dialect=dialect, allow_gaps=True)
        header = open_header(data, dialect="ik_llama.cpp", allow_gaps=True)
        assert [tensor.offset for tensor in header.tensors] == [0, 64, 96]
        assert header.data_bytes == 128

    @pytest.mark.parametrize(
        ("offsets", "size", "code"),
        [
            ((0, 64, 32), 256, "E_OFFSET"),
            ((0, 0, 32), 256, "E_OFFSET"),
            ((0, 48, 96), 256, "E_OFFSET"),
            ((0, 16, 96), 256, "E_OFFSET"),
            ((0, 64, 128), 143, "E_DATA_SHORT"),
            ((0, 64, 128), 144, None),
            ((32, 64, 96), 256, None),
            ((0, 2**63, 2**63 + 32), 256, "E_DATA_SHORT"),
            ((0, 2**64 - 32, 2**64 - 32), 256, "E_TOTAL_OVERFLOW"),
        ],
    )
    def test_ascending_aligned_apart_and_inside(self, offsets: tuple[int, ...], size: int, code: str | None) -> None:
        data = gguf([], [info(bytes([97 + i]), (4,), 0, offset) for i, offset in enumerate(offsets)], bytes(size))
        if code is None:
            open_header(data, dialect="ik_llama.cpp", allow_gaps=True)
        else:
            with pytest.raises(GGUFError) as caught:
                open_header(data, dialect="ik_llama.cpp", allow_gaps=True)
            assert caught.value.code == code
        if code == "E_DATA_SHORT":
            open_header(data, dialect="ik_llama.cpp", allow_gaps=True, partial=True)
