"""The container's rules: one hand-made file per code, then floods of damaged ones (specification: gguf.md 2 to 5)."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_files import ARR, STR, U32, U64, arr, gguf, info, pair, small, string, u32

import refimpl
from refimpl.errors import GGUFError, RefimplError, UsageError
from refimpl.gguf.header import (
    Header,
    KeyMissing,
    TensorMissing,
    ValueType,
    check_data,
    parse_header,
)
from refimpl.types import Dialect, UnknownType, type_by_name

I64_MAX = 2**63 - 1


def parse(data: bytes, dialect: Dialect | None = "llama.cpp", *, whole: bool = True) -> Header:
    header = parse_header(lambda offset, length: data[offset : offset + length], len(data), dialect=dialect)
    if whole:
        check_data(header, len(data))
    return header


def one(shape: tuple[int, ...], kind: int, data: bytes = b"") -> bytes:
    return gguf([], [info(b"t", shape, kind, 0)], data)


def f32(*infos: bytes, data: bytes = bytes(256), alignment: int = 32) -> bytes:
    pairs = [] if alignment == 32 else [u32(b"general.alignment", alignment)]
    return gguf(pairs, infos, data, alignment=alignment)


BROKEN = {
    "empty": (b"", "E_TRUNCATED", 0),
    "magic cut": (b"GGU", "E_TRUNCATED", 0),
    "magic": (b"GGML" + bytes(60), "E_MAGIC", 0),
    "version cut": (b"GGUF\3\0", "E_TRUNCATED", 4),
    "version 0": (gguf(version=0), "E_VERSION", 4),
    "version 1": (gguf(version=1), "E_VERSION", 4),
    "version 4": (gguf(version=4), "E_VERSION", 4),
    "version 0x30003": (gguf(version=0x30003), "E_VERSION", 4),
    "other byte order": (gguf(version=0x3000000), "E_ENDIAN", 4),
    "low half zero": (gguf(version=0x10000), "E_ENDIAN", 4),
    "count cut": (gguf()[:12], "E_TRUNCATED", 8),
    "negative tensor count": (gguf(counts=(-1, 0)), "E_COUNT", 8),
    "tensor count": (gguf(counts=(53_624_256_028_225_441, 0)), "E_COUNT", 8),
    "negative key count": (gguf(counts=(0, -1)), "E_COUNT", 16),
    "key count": (gguf(counts=(0, 209_622_091_746_699_451)), "E_COUNT", 16),
    "more keys than bytes": (gguf(counts=(0, 209_622_091_746_699_450)), "E_TRUNCATED", 24),
    "more tensors than bytes": (gguf(counts=(53_624_256_028_225_440, 0)), "E_TRUNCATED", 24),
    "key length": (gguf([struct.pack("<Q", 2**30 + 1)]), "E_STRING_LIMIT", 24),
    "key cut": (gguf([struct.pack("<Q", 2**30)]), "E_TRUNCATED", 32),
    "empty key": (gguf([u32(b"", 1)]), "E_KEY_EMPTY", 24),
    "duplicate key, before its type": (gguf([u32(b"a", 1), pair(b"a", 99, b"")]), "E_KEY_DUPLICATE", 41),
    "value type 13": (gguf([pair(b"k", 13, bytes(8))]), "E_KV_TYPE", 33),
    "value type -1": (gguf([pair(b"k", -1, bytes(8))]), "E_KV_TYPE", 33),
    "nested array": (gguf([arr(b"k", ARR, 0, b"")]), "E_KV_TYPE", 37),
    "element type 13": (gguf([arr(b"k", 13, 0, b"")]), "E_KV_TYPE", 37),
    "bad element type, count cut": (gguf([arr(b"k", 13, 0, b"")])[:-1], "E_TRUNCATED", 41),
    "array limit": (gguf([arr(b"k", 0, 2**30 + 1, b"")]), "E_TRUNCATED", 41),
    "array count": (gguf([arr(b"k", 1, 2**63, bytes(9))]), "E_TRUNCATED", 41),
    "array product": (gguf([arr(b"k", 12, 2**61, bytes(9))]), "E_TRUNCATED", 41),
    "string array count": (gguf([arr(b"k", STR, 3, bytes(23))]), "E_TRUNCATED", 41),
    "element length": (gguf([arr(b"k", STR, 2, string(b"x") + b"\xff" * 8)]), "E_STRING_LIMIT", 58),
    "element cut": (gguf([arr(b"k", STR, 2, string(b"x") + struct.pack("<Q", 9))]), "E_TRUNCATED", 66),
    "string value cut": (gguf([pair(b"k", STR, struct.pack("<Q", 5) + b"1234")]), "E_TRUNCATED", 45),
    "scalar cut": (gguf([u32(b"k", 1)])[:-1], "E_TRUNCATED", 37),
    "alignment u64": (gguf([pair(b"general.alignment", U64, struct.pack("<Q", 32))]), "E_ALIGN_TYPE", 24),
    "alignment array": (gguf([arr(b"general.alignment", U32, 1, struct.pack("<I", 32))]), "E_ALIGN_TYPE", 24),
    "alignment 0": (gguf([u32(b"general.alignment", 0)]), "E_ALIGN_VALUE", 24),
    "alignment 48": (gguf([u32(b"general.alignment", 48)]), "E_ALIGN_VALUE", 24),
    "long name": (f32(info(b"n" * 64, (4,), 0, 0)), "E_NAME_LONG", 24),
    "name length": (gguf(counts=(1, 0)) + b"\xff" * 40, "E_STRING_LIMIT", 24),
    "duplicate name": (f32(info(b"a", (4,), 0, 0), info(b"a", (4,), 0, 32)), "E_NAME_DUPLICATE", 57),
    "5 dimensions": (one((1, 1, 1, 1, 1), 0), "E_NDIMS", 33),
    "negative size": (one((4, -1), 0), "E_DIM_NEGATIVE", 45),
    "product 2^64": (one((2**32, 2**32), 24), "E_DIMS_OVERFLOW", 37),
    "product before a zero": (one((2**62, 2**62, 0), 24), "E_DIMS_OVERFLOW", 37),
    "product 2^63-1 in two": (one((I64_MAX // 7, 7), 24), "E_DIMS_OVERFLOW", 37),
    "tensor type 43": (one((4,), 43), "E_TENSOR_TYPE", 45),
    "tensor type -1": (one((4,), -1), "E_TENSOR_TYPE", 45),
    "tensor type of the fork": (one((256,), 137), "E_TENSOR_TYPE", 45),
    "tensor type cut": (one((4,), 99)[:47], "E_TRUNCATED", 45),
    "removed type": (one((32,), 4), "E_BLOCK", 45),
    "broken block": (one((33,), 8), "E_BLOCK", 45),
    "no size, block type": (one((), 8), "E_BLOCK", 37),
    "bytes": (one((2**62,), 0), "E_BYTES_OVERFLOW", 45),
    "wrapped bytes": (one((6510615555426900576,), 8), "E_BYTES_OVERFLOW", 45),
    "wrapped row of no rows": (one((2**62, 0), 8), "E_BYTES_OVERFLOW", 53),
    "offset cut": (one((4,), 0)[:56], "E_TRUNCATED", 49),
    "no padding": (gguf([], [info(b"t", (0,), 0, 0)])[:57], "E_DATA_START", 57),
    "first offset": (f32(info(b"a", (4,), 0, 32)), "E_OFFSET", 49),
    "gap": (f32(info(b"a", (4,), 0, 0), info(b"b", (4,), 0, 64)), "E_OFFSET", 82),
    "overlap": (f32(info(b"a", (4,), 0, 0), info(b"b", (4,), 0, 0)), "E_OFFSET", 82),
    "unaligned": (f32(info(b"a", (4,), 0, 0), info(b"b", (4,), 0, 16)), "E_OFFSET", 82),
    "padding overflow": (one((2**61 - 1,), 27), "E_PAD_OVERFLOW", 49),
    "total overflow": (
        f32(info(b"a", (2**60,), 27, 0), info(b"b", (2**60,), 27, 2**63)), "E_TOTAL_OVERFLOW", 82,
    ),
    "no data": (one((4,), 0), "E_DATA_SHORT", 64),
    "no tail padding": (one((4,), 0, bytes(16)), "E_DATA_SHORT", 64),
    "endless data": (one((I64_MAX,), 24), "E_DATA_SHORT", 64),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_code_and_position(name: str) -> None:
    data, code, offset = BROKEN[name]
    with pytest.raises(GGUFError) as caught:
        parse(data)
    assert (caught.value.code, caught.value.fields["offset"]) == (code, offset), str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_container_code_is_covered() -> None:
    codes = """E_MAGIC E_VERSION E_ENDIAN E_TRUNCATED E_COUNT E_STRING_LIMIT E_KEY_EMPTY E_KEY_DUPLICATE E_KV_TYPE
        E_ALIGN_TYPE E_ALIGN_VALUE E_NAME_LONG E_NAME_DUPLICATE E_NDIMS E_DIM_NEGATIVE E_DIMS_OVERFLOW E_TENSOR_TYPE
        E_BLOCK E_BYTES_OVERFLOW E_DATA_START E_OFFSET E_PAD_OVERFLOW E_TOTAL_OVERFLOW E_DATA_SHORT"""
    assert {code for _, code, _ in BROKEN.values()} == set(codes.split())


def test_errors_name_their_subject() -> None:
    with pytest.raises(GGUFError) as caught:
        parse(BROKEN["alignment 48"][0])
    assert caught.value.fields["key"] == "general.alignment"
    assert caught.value.fields["found"] == 48
    with pytest.raises(GGUFError) as caught:
        parse(BROKEN["gap"][0])
    assert caught.value.fields | {"offset": 0} == {
        "offset": 0, "tensor": "b", "field": "tensor offset", "expected": 32, "found": 64,
    }  # fmt: skip


ODD = {
    "nothing": gguf(),
    "version 2": gguf(version=2),
    "long key": gguf([u32(b"k" * 70_000, 1)]),
    "alignment 2^31 without tensors": gguf([u32(b"general.alignment", 2**31)]),
    "alignment 1": f32(info(b"a", (1,), 24, 0), info(b"b", (1,), 24, 1), data=b"ab", alignment=1),
    "name of 63": f32(info(b"n" * 63, (4,), 0, 0)),
    "empty name": f32(info(b"", (4,), 0, 0)),
    "names equal to a NUL": f32(info(b"a\0x", (4,), 0, 0), info(b"a\0y", (4,), 0, 32)),
    "zero before huge sizes": one((0, 2**62, 2**62), 0),
    "zero size between": f32(info(b"a", (4,), 0, 0), info(b"b", (4, 0), 0, 32), info(b"c", (4,), 0, 32)),
    "trailing bytes": f32(info(b"a", (4,), 0, 0)) + b"rest",
    "no dimension": f32(info(b"a", (), 0, 0)),
    "data start at the end": one((0,), 0),
    "product 2^63-1 hidden by a zero": one((I64_MAX // 7, 7, 0), 24),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_accepted(name: str) -> None:
    assert isinstance(parse(ODD[name]), Header)


def test_meta_accepts_what_only_data_refuses() -> None:
    header = parse(one((I64_MAX,), 24), whole=False)
    assert header.tensors[0].nbytes == I64_MAX
    assert header.data_bytes == 2**63


def test_view_of_the_small_file() -> None:
    header = parse(small())
    assert (header.version, header.alignment, header.architecture, header.size) == (3, 32, "llama", len(small()))
    assert header.data_start % 32 == 0
    assert len(small()) - header.data_start == header.data_bytes == 128
    assert list(header.kv) == ["general.architecture", "general.alignment", "tokens", "scores", "flag"]
    assert header.kv["flag"] is True
    assert header.kv["general.architecture"] == "llama"
    assert header.kv.raw("general.architecture").value == b"llama"
    assert [(t.name, t.type.name, t.shape, t.ne, t.rows, t.offset, t.nbytes) for t in header.tensors] == [
        ("t0", "f32", (8, 2), (8, 2, 1, 1), 2, 0, 64),
        ("t1", "q4_0", (32,), (32, 1, 1, 1), 1, 64, 18),
        ("t2", "f16", (), (1, 1, 1, 1), 1, 96, 2),
    ]
    assert [t.absolute_offset - header.data_start for t in header.tensors] == [0, 64, 96]
    assert header.tensor("t1") is header.tensors[1]
    with pytest.raises(TensorMissing) as caught:
        header.tensor("nowhere")
    assert caught.value.code == "E_TENSOR_MISSING"
    assert isinstance(caught.value, LookupError)
    assert len(repr(header)) < 300


def test_lazy_arrays() -> None:
    header = parse(small())
    tokens, scores = header.kv["tokens"], header.kv["scores"]
    assert list(tokens) == ["", "a", "��", "b\0c", "ü"]
    assert [tokens[i] for i in range(-5, 5)] == 2 * list(tokens)
    assert tokens[1:3] == ["a", "��"]
    assert tokens[::-2] == ["ü", "��", ""]
    assert tokens[3:1] == []
    assert tokens.raw(2) == b"\xff\xfe"
    assert list(tokens.raws()) == [b"", b"a", b"\xff\xfe", b"b\0c", "ü".encode()]
    assert (len(tokens), tokens.element_type, tokens.index("ü"), "a" in tokens) == (5, ValueType.STR, 4, True)
    assert list(scores) == [0.5, -1.5, 3.0]
    assert scores[-1] == 3.0
    assert scores.raw(0) == struct.pack("<f", 0.5)
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            tokens[wrong]
    with pytest.raises(ValueError, match="not in the array"):
        tokens.index("nowhere")


@pytest.mark.parametrize("longest", [3, 2_000, 400_000], ids=["short", "medium", "longer than a window"])
def test_string_arrays_across_windows(longest: int) -> None:
    """Short strings take the quick way, long ones the careful one; both must find every string."""
    draw = random.Random(longest)
    strings = [draw.randbytes(draw.randrange(longest)) for _ in range(min(2_000, 6_000_000 // longest))]
    after = u32(b"after", 7)
    data = gguf([arr(b"k", STR, len(strings), b"".join(map(string, strings))), after])
    header = parse(data)
    assert header.kv["after"] == 7
    assert list(header.kv["k"].raws()) == strings
    for i in (0, 1, len(strings) // 2, len(strings) - 1):
        assert header.kv["k"].raw(i) == strings[i]
    with pytest.raises(GGUFError, match="E_TRUNCATED"):
        parse(data[: -len(after) - 1])


def test_an_array_whose_file_has_shrunk() -> None:
    data = bytearray(small())
    header = parse_header(lambda offset, length: bytes(data[offset : offset + length]), len(data))
    del data[header.kv["tokens"].offset + 20 :]
    assert header.kv["tokens"][0] == ""
    with pytest.raises(GGUFError, match="E_TRUNCATED"):
        header.kv["tokens"][4]


def test_look_ups_compare_c_strings_and_take_the_first_hit() -> None:
    pairs = [u32(b"general.alignment\0x", 64), u32(b"a\0x", 1), u32(b"a", 2), u32(b"\xff", 3), u32(b"\xfe", 4)]
    header = parse(f32(info(b"t\0x", (4,), 0, 0), info(b"t", (8,), 0, 64), alignment=64))
    assert header.tensor("t").shape == (4,)
    assert header.tensor(b"t\0whatever") is header.tensor("t")
    assert (header.tensor("t").name, header.tensor("t").raw_name) == ("t", b"t\0x")

    kv = parse(gguf(pairs)).kv
    assert parse(gguf(pairs)).alignment == 64
    assert kv["a"] == 1
    assert (kv.raw(b"\xfe").value, kv.raw(b"\xff").value, kv["\ufffd"]) == (4, 3, 3)
    assert list(kv) == ["general.alignment", "a", "\ufffd"]
    assert len(kv) == 3
    assert [item.key for item in kv.items_raw()] == [b"general.alignment\0x", b"a\0x", b"a", b"\xff", b"\xfe"]
    assert "b" not in kv
    with pytest.raises(KeyMissing) as caught:
        kv["b"]
    assert str(caught.value).startswith("E_KEY_MISSING")


def test_errors_survive_pickling() -> None:
    for error in (
        KeyMissing("E_KEY_MISSING", "no key", key="k"),
        TensorMissing("E_TENSOR_MISSING", "none", tensor="t"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.code, copy.fields, str(copy)) == (type(error), error.code, error.fields, str(error))


def test_architecture_of_another_type_or_with_a_nul() -> None:
    assert parse(gguf([u32(b"general.architecture", 1)])).architecture is None
    assert parse(gguf()).architecture is None
    header = parse(gguf([pair(b"general.architecture", STR, string(b"llama\0rest"))]))
    assert header.architecture == "llama"
    assert header.kv["general.architecture"] == "llama\0rest"


class TestDialects:
    def test_the_default_knows_both(self) -> None:
        assert parse(one((256,), 137, bytes(96)), None).tensors[0].type == type_by_name("iq2_k")
        assert parse(one((256,), 15, bytes(320)), None).tensors[0].nbytes == 292
        assert parse(one((256,), 15, bytes(320)), "ik_llama.cpp").tensors[0].nbytes == 296
        assert parse(one((64,), 42, bytes(32)), "ik_llama.cpp").tensors[0].type.name == "q2_0"

    @pytest.mark.parametrize("dialect", [None, "ik_llama.cpp"])
    @pytest.mark.parametrize("type_id", [4, 43, -1, 2**31 - 1])
    def test_an_unknown_type_stays_as_data(self, type_id: int, dialect: Dialect | None) -> None:
        infos = [info(b"a", (4,), 0, 0), info(b"b", (7, 3), type_id, 32), info(b"c", (4,), 0, 96)]
        header = parse(gguf([], infos, bytes(128)), dialect)
        assert header.tensor("b").type == UnknownType(type_id)
        assert header.tensor("b").nbytes is None
        assert header.tensor("c").offset == 96

    @pytest.mark.parametrize("offset", [0, 33, 40])
    def test_what_follows_an_unknown_type_is_aligned_and_behind_it(self, offset: int) -> None:
        infos = [info(b"a", (4,), 0, 0), info(b"b", (7,), 43, 32), info(b"c", (4,), 0, offset)]
        with pytest.raises(GGUFError, match="E_OFFSET"):
            parse(gguf([], infos, bytes(128)), None)

    def test_an_unknown_type_still_has_its_own_place(self) -> None:
        with pytest.raises(GGUFError, match="E_OFFSET"):
            parse(one((4,), 0, b"").replace(info(b"t", (4,), 0, 0), info(b"t", (4,), 43, 32)), None)

    def test_no_such_dialect(self) -> None:
        with pytest.raises(UsageError, match="E_DIALECT"):
            parse(gguf(), "koboldcpp")  # type: ignore[arg-type]


def test_every_prefix_gives_a_coded_error() -> None:
    data = small()
    for length in range(len(data)):
        with pytest.raises(GGUFError) as caught:
            parse(data[:length])
        assert caught.value.code in {"E_TRUNCATED", "E_DATA_START", "E_DATA_SHORT"}, length


@pytest.mark.parametrize("dialect", [None, "llama.cpp", "ik_llama.cpp"])
def test_damaged_files_are_accepted_or_refused_with_a_code(dialect: Dialect | None) -> None:
    draw = random.Random(20261001)
    good = small()
    end = parse(good).data_start
    until = time.monotonic() + 5
    outcomes: dict[str, int] = {}
    for _ in range(3_000):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            data[draw.randrange(end)] ^= 1 << draw.randrange(8)
        try:
            header = parse(bytes(data), dialect)
            for value in header.kv.values():
                list(value) if hasattr(value, "raws") else value
            outcome = "accepted"
        except RefimplError as error:
            outcome = error.code
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if time.monotonic() > until:
            break
    assert len(outcomes) > 10, outcomes


HOSTILE = {
    name: data
    for name, (data, _, _) in BROKEN.items()
    if any(word in name for word in ("count", "array", "length", "more", "bytes", "data", "limit", "product"))
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_counts_cost_next_to_nothing(name: str) -> None:
    data = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError):
            parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_million_empty_strings_cost_an_index_only() -> None:
    data = gguf([arr(b"k", STR, 1_000_000, bytes(8_000_000))])
    tracemalloc.start()
    try:
        header = parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert header.kv["k"][999_999] == ""


@pytest.mark.model
def test_the_packaged_model(gemma: Path) -> None:
    tracemalloc.start()
    try:
        header = refimpl.open(gemma)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    with header:
        assert (header.version, header.alignment, header.size) == (3, 32, 253_113_024)
        assert (header.architecture, len(header.tensors), header.data_start) == ("gemma3", 236, 6_525_120)
        tokens = header.kv["tokenizer.ggml.tokens"]
        assert len(tokens) == len(header.kv["tokenizer.ggml.scores"]) == 262_144
        assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert tokens[262_143] == list(tokens)[-1]
        assert tokens[tokens.index("▁the")] == "▁the"
        embedding = header.tensor("token_embd.weight")
        assert (embedding.type.name, embedding.shape, embedding.nbytes) == ("q8_0", (640, 262_144), 178_257_920)
        check_data(header, header.size)
