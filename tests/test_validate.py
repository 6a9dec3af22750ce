"""Data validation: the table, both versions of the search, where the first bad value lies, whole files.

The recorded verdicts of the real functions are run by test_conformance_runners.py, the real functions themselves by
test_witness_validate.py.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import SMALL, write_model

import refimpl
from refimpl.cli import main
from refimpl.errors import ModelError, RefimplError
from refimpl.gguf import validate
from refimpl.gguf import validate_scan as clear
from refimpl.gguf.source import open_header
from refimpl.gguf.validate import Verdict, validate_model, validate_row_data, validate_tensor
from refimpl.gguf.validate_rules import (
    FUNCTIONS,
    IK_TYPE_COUNT,
    ROW_DATA,
    RULES,
    TENSOR,
    WIDTHS,
    Look,
    corrected,
    rule_of,
)
from refimpl.gguf.validate_scan import Scan
from refimpl.gguf.values import ValueType
from refimpl.gguf.writer import write_gguf
from refimpl.kernels import validate as fast
from refimpl.types import LLAMA_TYPE_COUNT, REMOVED_IDS, TYPES, UnknownType, type_by_id, type_by_name

VERSIONS = pytest.mark.parametrize("version", ["clear", "fast"])
SEARCHES = pytest.mark.parametrize("search", [clear.first_bad, fast.first_bad], ids=["clear", "fast"])
BOTH = ("clear", "fast")
TAME = 0xBF
"""Bytes without bit 6 make good values of every sort: an exponent of ones has that bit in its highest byte."""
SPICE = np.array([0x00, 0x7B, 0x7C, 0x7F, 0x80, 0xC0, 0xFC, 0xFE, 0xFF], np.uint8)

CASES = [
    pytest.param(dialect, function, kind, mode, id=f"{dialect}-{function}-{kind.name}-{mode}")
    for dialect, functions in FUNCTIONS.items()
    for function in functions
    for kind in TYPES
    if dialect in kind.dialects
    for mode in ("oracle", "correct")
    if mode == "oracle" or rule_of(kind, dialect, function, "correct") != rule_of(kind, dialect, function)
]


def names(dialect):
    return {kind.name for kind in TYPES if dialect in kind.dialects}


def tame(rng, nbytes):
    return rng.integers(0, 256, nbytes, dtype=np.uint8) & TAME


# The table.


@pytest.mark.parametrize(("dialect", "function"), [(d, f) for d, fs in FUNCTIONS.items() for f in fs])
def test_the_table_knows_every_type_of_its_dialect(dialect, function):
    assert set(RULES[dialect, function]) == names(dialect)


def test_what_is_looked_at_lies_within_its_unit_and_can_be_named():
    for (dialect, _), rules in RULES.items():
        for name, rule in rules.items():
            if not isinstance(rule, Look):
                assert rule in ("never", "always")
                continue
            kind = type_by_name(name, dialect)
            span = rule.offset + len(rule.fields) * rule.width
            for look in (rule, corrected(rule)):
                assert span <= look.unit_bytes(kind.block_bytes, kind.row_bytes(kind.block_length)), name
            if rule.unit == "block":
                assert kind.row_meta_bytes == 0, name  # else blocks of two rows would not be side by side
            else:
                assert rule.offset == 0
                assert kind.row_meta_bytes * rule.rows == span, name
            if rule.rows > 1:
                assert len(rule.fields) == rule.rows, name


def test_how_many_types_each_group_of_the_specification_has():
    looks = RULES["ik_llama.cpp", TENSOR].values()
    groups = [
        Look("nan16", ("d",)),
        Look("bad16", ("d[0]", "d[1]", "d[2]", "d[3]"), rows=4),
        Look("bad16", tuple(f"d[{i}]" for i in range(8)), rows=8),
        Look("bad32", ("row scale",), unit="row"),
        Look("bad16", ("row scale",), unit="row"),
        Look("bad32", ("d[0]", "d[1]", "d[2]", "d[3]"), rows=4, unit="row"),
        Look("bad16", ("d[0]", "d[1]", "d[2]", "d[3]"), rows=4, unit="row"),
        "never",
    ]
    assert [sum(look == group for look in looks) for group in groups] == [11, 9, 1, 4, 4, 3, 2, 92 - 34]
    always = {key: {name for name, rule in rules.items() if rule == "always"} for key, rules in RULES.items()}
    assert always == {
        ("llama.cpp", ROW_DATA): {"q8_1"},
        ("ik_llama.cpp", ROW_DATA): set("q8_1 q8_0_x4 q8_1_x4 q8_2_x4 q8_K16 q8_K32 q8_K64 q8_K128 q8_KR8".split()),
        ("ik_llama.cpp", TENSOR): set(),
    }


# Bit patterns, against Python's own idea of Inf and NaN.


def all_bad(search, predicate, values):
    """The numbers of all bad values, found one after the other."""
    data, width = values.view(np.uint8), values.dtype.itemsize
    found, start = [], 0
    while start < data.size:
        scan = Scan(predicate, start, width, (data.size - start) // width, 1)
        offset = search(data, scan)
        if offset < 0:
            break
        found.append(offset // width)
        start = offset + width
    return found


def as_half(pattern):
    return struct.unpack("<e", pattern.to_bytes(2, "little"))[0]


def as_single(pattern):
    return struct.unpack("<f", pattern.to_bytes(4, "little"))[0]


@SEARCHES
@pytest.mark.parametrize(
    ("predicate", "is_bad"),
    [
        ("bad16", lambda u: not math.isfinite(as_half(u))),
        ("nan16", lambda u: math.isnan(as_half(u))),
        ("bf16", lambda u: not math.isfinite(as_single(u << 16))),
    ],
)
def test_every_16_bit_pattern(search, predicate, is_bad):
    values = np.arange(1 << 16, dtype="<u2")
    expected = [u for u in range(1 << 16) if is_bad(u)]
    assert len(expected) in (2048, 2046, 256)
    assert all_bad(search, predicate, values) == expected


@SEARCHES
def test_every_scale_of_iq1_m(search, rng):
    """The scale's nibbles are the top ones of four words; the other 48 bits are noise."""
    scales = np.arange(1 << 16, dtype=np.uint64)
    noise = rng.integers(0, 1 << 64, 1 << 16, dtype=np.uint64) & np.uint64(0x0FFF_0FFF_0FFF_0FFF)
    words = noise
    for i in range(4):
        words = words | ((scales >> np.uint64(4 * i)) & np.uint64(15)) << np.uint64(16 * i + 12)
    expected = [u for u in range(1 << 16) if not math.isfinite(as_half(u))]
    assert all_bad(search, "iq1_m", words.astype("<u8")) == expected


@SEARCHES
def test_every_scale_byte_of_mxfp4(search):
    assert all_bad(search, "ff", np.arange(256, dtype=np.uint8)) == [255]


@SEARCHES
def test_32_bit_patterns(search):
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x8000, 0xFFFF):
        bad = [u for u in range(1 << 16) if not math.isfinite(as_single(u << 16 | low))]
        assert all_bad(search, "bad32", (high | np.uint32(low)).astype("<u4")) == bad


@SEARCHES
def test_64_bit_patterns(search, rng):
    """All exponents, and the border: half a step above the largest f32 is a tie, which goes to even, so to Inf."""
    largest, step = float(np.finfo(np.float32).max), 2.0**104
    border = np.array([largest, largest + step / 2, np.nextafter(largest + step / 2, 0), largest + step])
    exponents = np.arange(2048, dtype=np.uint64) << np.uint64(52)
    noise = rng.integers(0, 1 << 52, 2048, dtype=np.uint64)
    patterns = np.concatenate([border.view("<u8"), exponents, exponents | noise])
    patterns = np.concatenate([patterns, patterns | np.uint64(1 << 63)]).astype("<u8")
    with np.errstate(all="ignore"):
        expected = np.flatnonzero(~np.isfinite(patterns.view("<f8").astype(np.float32))).tolist()
    assert expected[:2] == [1, 3]
    assert all_bad(search, "f64", patterns) == expected


# The search.


@SEARCHES
def test_a_scan_sees_its_values_and_nothing_else(search, rng):
    """Everything around the values is as bad as can be; then each value in turn is the only bad one."""
    for predicate, stride, units, count in product(WIDTHS, (64, 70, 1056), (1, 2, 5), (1, 2, 3)):
        width = WIDTHS[predicate]
        for start in (0, 1, 64 - count * width):
            scan = Scan(predicate, start, stride, units, count)
            data = np.full(scan.end() + 7, 0xFF, np.uint8)
            places = [start + u * stride + i * width for u in range(units) for i in range(count)]
            for place in places:
                data[place : place + width] = 0
            assert search(data, scan) == -1
            for place in places:
                data[place : place + width] = 0xFF
                assert search(data, scan) == place
                data[place : place + width] = 0


@SEARCHES
@pytest.mark.parametrize(("predicate", "stride"), [("bad16", 18), ("bad16", 2), ("bad32", 4), ("f64", 8), ("ff", 17)])
def test_the_first_of_several_in_a_long_scan(search, predicate, stride, rng):
    width, units = WIDTHS[predicate], 300_000
    data = np.zeros(units * stride, np.uint8)
    assert search(data, Scan(predicate, 0, stride, units, 1)) == -1
    for unit in sorted([*rng.choice(units, 12, replace=False).tolist(), units - 1], reverse=True):
        data[unit * stride : unit * stride + width] = 0xFF
        assert search(data, Scan(predicate, 0, stride, units, 1)) == unit * stride


@SEARCHES
def test_a_scan_beyond_the_data_is_refused_before_it_is_read(search):
    data = np.zeros(100, np.uint8)
    good = Scan("bad16", 10, 20, 5, 3)
    assert good.end() == 96
    assert search(data, good) == -1
    for change in ({"start": 15}, {"units": 6}, {"stride": 22}, {"start": -1}, {"stride": 5}, {"stride": 0}):
        with pytest.raises(ValueError, match="a scan up to byte"):
            search(data, replace(good, **change))
    assert search(data[:0], replace(good, units=0)) == -1


# Verdicts.


def brute_force(data, kind, rule, function, row_bytes):
    """(offset, row, block) of the first bad value, value by value in Python; None if there is none."""
    blocks = row_bytes // kind.block_bytes
    rows = len(data) // row_bytes
    places = []
    for row in range(rows):
        for block in range(blocks) if rule.unit == "block" else [None]:
            # Interleaved rows: value i belongs to row i of the group, wherever it stands.
            group, member = (row // rule.rows, row % rule.rows) if rule.rows > 1 else (row, 0)
            if rule.unit == "row" and rule.rows > 1:
                values = [(row * row_bytes + i * rule.width, row + i if row % 4 == 0 else row) for i in range(4)]
            else:
                base = group * rule.rows * row_bytes
                if block is not None:
                    base += block * kind.block_bytes * rule.rows
                count = 1 if rule.rows > 1 else len(rule.fields)
                values = [(base + rule.offset + (member + i) * rule.width, row) for i in range(count)]
            places += [(offset, owner, block) for offset, owner in values]
    bad = []
    for offset, row, block in places:
        raw = bytes(data[offset : offset + rule.width])
        u = int.from_bytes(raw, "little")
        if rule.predicate == "iq1_m":
            z = struct.unpack("<4H", raw)
            u = z[0] >> 12 | (z[1] >> 12) << 4 | (z[2] >> 12) << 8 | (z[3] >> 12) << 12
        wrong = {
            "bad16": lambda u=u: not math.isfinite(as_half(u)),
            "iq1_m": lambda u=u: not math.isfinite(as_half(u)),
            "nan16": lambda u=u: math.isnan(as_half(u)),
            "bf16": lambda u=u: not math.isfinite(as_single(u << 16)),
            "bad32": lambda u=u: not math.isfinite(as_single(u)),
            "ff": lambda u=u: u == 255,
            "f64": lambda raw=raw: not abs(struct.unpack("<d", raw)[0]) < 2.0**128 - 2.0**103,
        }[rule.predicate]()
        if wrong:
            bad.append((offset, row, block, u))
    return min(bad, default=None)


@pytest.mark.parametrize(("dialect", "function", "kind", "mode"), CASES)
def test_clear_and_fast_find_what_a_walk_over_all_values_finds(dialect, function, kind, mode, rng):
    rule = rule_of(kind, dialect, function, mode)
    outcomes = set()
    for blocks, rows in ((1, 8), (3, 8), (2, 16), (5, 24)):
        shape = (blocks * kind.block_length, rows)
        row_bytes = kind.row_bytes(shape[0])
        for trial in range(6):
            data = tame(rng, kind.tensor_bytes(shape))
            if trial:
                spoilt = rng.choice(data.size, max(1, data.size * trial // 12))
                data[spoilt] = rng.choice(SPICE, spoilt.size)
            options = {"dialect": dialect, "function": function, "mode": mode}
            one, two = (validate_tensor(data, kind, shape, version=v, **options) for v in BOTH)
            assert one == two
            assert (one.type, one.dialect, one.function, one.mode) == (kind.name, dialect, function, mode)
            outcomes.add(one.valid)
            if not isinstance(rule, Look):
                assert one.valid == (rule == "never")
                assert one.offset is None
                continue
            expected = brute_force(data, kind, rule, function, row_bytes)
            assert (None if one.valid else (one.offset, one.row, one.block, one.bits)) == expected
            if function == ROW_DATA:
                runs = [validate_row_data(data, kind, dialect=dialect, version=v) for v in BOTH]
                assert runs[0] == runs[1]
                assert (runs[0].valid, runs[0].offset, runs[0].row) == (one.valid, one.offset, None)
                assert validate_row_data(data, kind, dialect=dialect, row_bytes=row_bytes) == one
    assert len(outcomes) == (2 if isinstance(rule, Look) else 1)


@VERSIONS
@pytest.mark.parametrize("dialect", FUNCTIONS)
def test_sizes_that_are_no_whole_number_of_blocks(dialect, version, rng):
    for kind in TYPES:
        if dialect not in kind.dialects:
            continue
        rule = rule_of(kind, dialect, ROW_DATA)
        unit = kind.block_bytes * (rule.rows if isinstance(rule, Look) else 1)
        for size in {0, 1, unit - 1, unit, unit + 1, 2 * unit - 1, 2 * unit, 3 * unit + unit // 2}:
            # All that lies behind the last whole unit is bad, and must not be seen.
            data = np.full(size, 0xFF, np.uint8)
            data[: size // unit * unit] = 0
            verdict = validate_row_data(data, kind, dialect=dialect, version=version)
            whole = size % kind.block_bytes == 0 or dialect == "ik_llama.cpp"
            assert verdict.valid == (whole and rule != "always"), (kind.name, size)
            if not whole:
                assert "no whole number of blocks" in verdict.text


@VERSIONS
def test_nothing_outside_the_tensor_is_looked_at(version, rng):
    for param in CASES:
        dialect, function, kind, mode = param.values
        shape = (2 * kind.block_length, 8)
        nbytes = kind.tensor_bytes(shape)
        options = {"dialect": dialect, "function": function, "mode": mode, "version": version}
        for start in (1, 64):
            room = np.full(nbytes + 128, 0xFF, np.uint8)
            room[start : start + nbytes] = tame(rng, nbytes)
            verdict = validate_tensor(room[start : start + nbytes], kind, shape, **options)
            assert verdict.valid == (rule_of(kind, dialect, function, mode) != "always"), kind.name


@pytest.mark.parametrize("function", [ROW_DATA, TENSOR])
def test_empty_tensors(function):
    for kind, shape in product((k for k in TYPES if "ik_llama.cpp" in k.dialects), ((0,), (0, 4), (256, 0))):
        one, two = (
            validate_tensor(b"", kind, shape, dialect="ik_llama.cpp", function=function, version=v) for v in BOTH
        )
        assert one == two
        assert one.valid == (RULES["ik_llama.cpp", function][kind.name] != "always")


@given(
    which=st.sampled_from(
        [param.values for param in CASES if isinstance(rule_of(param.values[2], *param.values[:2]), Look)]
    ),
    blocks=st.integers(1, 9),
    groups=st.integers(1, 6),
    place=st.floats(0, 1, exclude_max=True),
    sign=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_one_bad_value_planted_anywhere(which, blocks, groups, place, sign, seed):
    dialect, function, kind, mode = which
    look = rule_of(kind, dialect, function, mode)
    shape = (blocks * kind.block_length, groups * 8)
    data = tame(np.random.default_rng(seed), kind.tensor_bytes(shape))
    unit = look.unit_bytes(kind.block_bytes, kind.row_bytes(shape[0]))
    units = data.size // unit
    number, value = divmod(int(place * units * len(look.fields)), len(look.fields))
    offset = number * unit + look.offset + value * look.width
    bad = np.full(look.width, 0xFF, np.uint8)
    if look.predicate != "ff" and not sign:
        bad[-1] = 0x7F
    data[offset : offset + look.width] = bad
    for version in BOTH:
        verdict = validate_tensor(data, kind, shape, dialect=dialect, function=function, mode=mode, version=version)
        # Where rows that start no group are looked at too, an earlier look may meet the same bytes.
        assert not verdict
        assert verdict.offset == offset or (look.unit == "row" and abs(verdict.offset - offset) < 16)


@VERSIONS
@pytest.mark.parametrize(
    ("kind", "shape", "offset", "text"),
    [
        ("q8_0", (96, 3), 34 * 7, "row 2, block 1, d at byte 238 is 0xffff: Inf or NaN as f16"),
        ("q4_K", (512, 2), 3 * 144 + 2, "row 1, block 1, dmin at byte 434 is 0xffff: Inf or NaN as f16"),
        ("f64", (5, 2), 8 * 7, "row 1, block 2, value at byte 56 is 0xffffffffffffffff: Inf or NaN when converted"),
        ("iq1_m", (256, 2), 56 + 48, "row 1, block 0, scale at byte 104 is 0xffff: the scale put together from"),
        ("mxfp4", (32, 4), 17, "row 1, block 0, e at byte 17 is 0xff: exponent 0xff"),
        ("f32", (), 0, "row 0, block 0, value at byte 0 is 0xffffffff: Inf or NaN as f32"),
    ],
)
def test_the_verdict_in_words(kind, shape, offset, text, version):
    tensor_type = type_by_name(kind, "llama.cpp")
    data = np.zeros(tensor_type.tensor_bytes(shape), np.uint8)
    options = {"dialect": "llama.cpp", "version": version}
    good = validate_tensor(data, kind, shape, **options)
    assert good
    assert good.text == "good"
    data[offset : offset + 8] = 0xFF
    verdict = validate_tensor(data, kind, shape, **options)
    assert verdict.text.startswith(text)
    assert Verdict(**json.loads(json.dumps(verdict.to_json()))) == verdict


@VERSIONS
@pytest.mark.parametrize("name", ["iq2_bn_r4", "iq4_ks_r4", "iq5_ks_r4", "iq1_s_r4", "iq1_m_r4"])
def test_the_defect_and_its_correction(name, version):
    """Quants that look like Inf where a row begins that starts no group: bad in the real eyes, good in fact."""
    kind = type_by_name(name, "ik_llama.cpp")
    shape = (2 * kind.block_length, 8)
    row_bytes, width = kind.row_bytes(shape[0]), kind.row_meta_bytes
    options = {"dialect": "ik_llama.cpp", "function": TENSOR, "version": version}
    for row in range(8):
        for value in range(4):
            data = np.zeros(kind.tensor_bytes(shape), np.uint8)
            place = row * row_bytes + value * width
            data[place : place + width] = 0xFF
            oracle, correct = (validate_tensor(data, kind, shape, mode=m, **options) for m in ("oracle", "correct"))
            assert (oracle.valid, correct.valid) == (False, row % 4 != 0)
            assert (oracle.mode, correct.mode) == ("oracle", "correct")
            if row % 4 == 0:
                assert (oracle.row, correct.row, correct.field) == (row + value, row + value, f"d[{value}]")
                assert correct.offset == place
            else:
                assert oracle.row in (row, row - 1)
                assert "where no row group starts" in oracle.field or oracle.row % 4 == 0


@VERSIONS
def test_rows_that_fill_no_group(version):
    options = {"dialect": "ik_llama.cpp", "function": TENSOR, "version": version}
    for name, rows, ok in (
        ("iq2_k_r4", 6, False),
        ("iq4_xs_r8", 12, False),
        ("iq4_xs_r8", 16, True),
        ("q4_k_r4", 3, True),
    ):
        kind = type_by_name(name, "ik_llama.cpp")
        data = bytes(kind.tensor_bytes((256, rows)))
        if ok:
            assert validate_tensor(data, kind, (256, rows), **options)
            continue
        with pytest.raises(RefimplError) as caught:
            validate_tensor(data, kind, (256, rows), **options)
        assert caught.value.code == "E_DATA_SHAPE"
    kind = type_by_name("iq4_ks_r4", "ik_llama.cpp")  # its scales are all there, whatever the number of rows
    data = np.zeros(kind.tensor_bytes((256, 5)), np.uint8)
    data[4 * kind.row_bytes(256) + 12 :][:4] = 0xFF
    for mode in ("oracle", "correct"):
        verdict = validate_tensor(data, kind, (256, 5), mode=mode, **options)
        assert (verdict.valid, verdict.row, verdict.offset) == (False, 7, 4 * kind.row_bytes(256) + 12)


# Requests that nobody could answer.


def test_ids_that_are_no_type():
    for number in (-1, LLAMA_TYPE_COUNT, 1000):
        verdict = validate_row_data(b"", UnknownType(number), dialect="llama.cpp")
        assert not verdict
        assert f"tensor type {number} is outside" in verdict.text
    assert not validate_row_data(b"", UnknownType(IK_TYPE_COUNT), dialect="ik_llama.cpp")
    assert not validate_row_data(b"", type_by_name("iq2_k", "ik_llama.cpp"), dialect="llama.cpp")  # 137
    gaps = {number for number in range(IK_TYPE_COUNT) if isinstance(type_by_id(number, "ik_llama.cpp"), UnknownType)}
    for dialect, numbers in (("llama.cpp", REMOVED_IDS), ("ik_llama.cpp", gaps)):
        for number in numbers:
            with pytest.raises(RefimplError) as caught:
                validate_row_data(b"", UnknownType(number), dialect=dialect)
            assert (caught.value.code, caught.value.fields["found"]) == ("E_TENSOR_TYPE", number)
    assert validate_tensor(b"abc", UnknownType(4), (3,), dialect="ik_llama.cpp", function=TENSOR)
    assert len(gaps) == IK_TYPE_COUNT - len(names("ik_llama.cpp"))


@VERSIONS
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data": bytes(35)}, "E_DATA_SIZE"),
        ({"data": bytes(33)}, "E_DATA_SIZE"),
        ({"data": 34}, "E_DATA_BUFFER"),
        ({"data": np.zeros((34, 2), np.uint8)[:, 0]}, "E_DATA_BUFFER"),
        ({"shape": (33,)}, "E_BLOCK"),
        ({"shape": (-32,)}, "E_DATA_SHAPE"),
        ({"shape": (32.0,)}, "E_DATA_SHAPE"),
        ({"type": "q9_9"}, "E_TYPE"),
        ({"type": "iq2_k"}, "E_TYPE"),
        ({"type": UnknownType(31)}, "E_TENSOR_TYPE"),
        ({"dialect": "llama"}, "E_DIALECT"),
        ({"function": TENSOR}, "E_FUNCTION"),
        ({"mode": "exact"}, "E_MODE"),
        ({"version": "slow"}, "E_VERSION"),
    ],
)
def test_refusals(changes, code, version):
    arguments = {"data": bytes(34), "type": "q8_0", "shape": (32,), "dialect": "llama.cpp", "version": version}
    assert validate_tensor(**arguments)
    with pytest.raises(RefimplError) as caught:
        validate_tensor(**(arguments | changes))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


@VERSIONS
def test_any_buffer_kind_and_threads(version, tmp_path):
    data = np.zeros(34 * 64, np.uint8)
    data[34 * 40 + 1] = 0x7C
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 3 + data.tobytes())
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    buffers = [data, data.tobytes(), bytearray(data), memoryview(mapping)[3:], data.view("<u2").reshape(64, 17)]

    def judge(buffer):
        return validate_tensor(buffer, "q8_0", (256, 8), dialect="llama.cpp", version=version)

    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(judge, buffers * 10))
    assert {(v.row, v.block, v.offset, v.bits) for v in verdicts} == {(5, 0, 34 * 40, 0x7C00)}


def test_kernels_release_the_gil():
    assert all(fast.compiled(width).targetoptions["nogil"] for width in (1, 2, 4, 8))


# Whole files.


def reading_by(header, read):
    """The header, its file read by another function."""
    return replace(header, shards=(replace(header.shards[0], read=read),))


@pytest.fixture
def model(tmp_path):
    """A model of good random weights in which two tensors are bad, the second one three times."""
    path = tmp_path / "small.gguf"
    write_model(path)
    raw = bytearray(path.read_bytes())
    with open_header(path) as header:
        for info in header.tensors:
            part = slice(info.absolute_offset, info.absolute_offset + info.nbytes)
            raw[part] = (np.frombuffer(raw[part], np.uint8) & TAME).tobytes()
        raw[header.tensor("output_norm.weight").absolute_offset + 4 * 200 + 3] = 0x7F
        raw[header.tensor("output_norm.weight").absolute_offset + 4 * 200 + 2] = 0x80
        attn = header.tensor("blk.0.attn_output.weight")  # q6_K, one block per row
        for row in (77, 79, 200):
            raw[attn.absolute_offset + 210 * row + 209] = 0x7C
    path.write_bytes(raw)
    return path


@VERSIONS
@pytest.mark.parametrize("threads", [1, 3, None])
@pytest.mark.parametrize("slice_bytes", [1, 1000, 1 << 20])
def test_every_bad_tensor_of_a_file_with_its_first_bad_value(model, monkeypatch, version, threads, slice_bytes):
    if slice_bytes == 1 and (version, threads) != ("fast", 3):
        slice_bytes = 300
    monkeypatch.setattr(validate, "SLICE_BYTES", slice_bytes)
    calls = []

    def progress(done, total):
        calls.append((done, total))

    result = validate_model(model, dialect="llama.cpp", version=version, threads=threads, progress=progress)
    assert not result
    assert [(bad.name, bad.verdict.row, bad.verdict.block, bad.verdict.field) for bad in result.bad] == [
        ("output_norm.weight", 0, 200, "value"),
        ("blk.0.attn_output.weight", 77, 0, "d"),
    ]
    assert [bad.verdict.offset for bad in result.bad] == [800, 77 * 210 + 208]
    total = sum(type_by_name(kind).tensor_bytes(shape) for kind, shape in SMALL.values())
    assert (result.tensors, result.nbytes) == (len(SMALL), total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    error = result.error()
    assert error.code == "E_TENSOR_DATA"
    assert error.fields["tensors"] == ["output_norm.weight", "blk.0.attn_output.weight"]
    assert "row 77, block 0, d at byte 16378" in error.text
    assert "\n" not in error.text


def test_a_header_stays_open_and_only_what_is_wanted_is_read(model):
    with open_header(model) as header:
        wanted = [t for t in header.tensors if t.name.endswith("ffn_up.weight")]
        assert validate_model(header, dialect="llama.cpp", tensors=wanted)
        result = validate_model(header, dialect="llama.cpp", threads=1)
        assert [bad.tensor.name for bad in result.bad] == ["output_norm.weight", "blk.0.attn_output.weight"]
        assert header.read(0, 4) == b"GGUF"


def test_what_is_read_at_a_time_is_bounded(model, monkeypatch):
    monkeypatch.setattr(validate, "SLICE_BYTES", 4096)
    with open_header(model) as header:
        sizes = []

        def read(offset, length):
            sizes.append(length)
            return header.read(offset, length)

        assert len(validate_model(reading_by(header, read), dialect="llama.cpp", threads=2).bad) == 2
    assert max(sizes) <= 4096
    assert len(sizes) > 100


def test_behind_a_known_bad_value_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(validate, "SLICE_BYTES", 4096)
    path = tmp_path / "m.gguf"
    write_model(path, {"blk.0.attn_norm.weight": ("f32", (256, 400))})
    raw = bytearray(path.read_bytes())
    with open_header(path) as header:
        raw[header.data_start : header.data_start + 4096] = b"\xff" * 4096
    path.write_bytes(raw)
    with open_header(path) as header:
        offsets = []

        def read(offset, length):
            offsets.append(offset)
            return header.read(offset, length)

        result = validate_model(reading_by(header, read), dialect="llama.cpp", threads=1)
    assert [bad.verdict.offset for bad in result.bad] == [0]
    assert len(offsets) <= 3


def test_split_sets(tmp_path):
    """The second file's tensors are read from the second file."""
    values = [np.zeros(40, "<f4"), np.zeros(40, "<f4")]
    values[1][33] = np.nan
    for number, data in enumerate(values):
        pairs = [("split.no", ValueType.U16, number), ("split.count", ValueType.U16, 2)]
        pairs.append(("split.tensors.count", ValueType.I32, 2))
        tensor = (f"t{number}", type_by_name("f32"), (40,), data)
        write_gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", pairs, [tensor])
    result = validate_model(tmp_path / "m-00001-of-00002.gguf", dialect="llama.cpp")
    assert result.tensors == 2
    assert [(bad.name, bad.tensor.shard, bad.verdict.offset) for bad in result.bad] == [("t1", 1, 132)]


def test_ik_models_by_both_functions(tmp_path):
    path = tmp_path / "m.gguf"
    kind = type_by_name("iq4_ks_r4", "ik_llama.cpp")
    write_model(path, {"a": ("f32", (32,)), "b": (kind.name, (512, 8)), "c": ("q8_K16", (64,))})
    raw = bytearray(path.read_bytes())
    with open_header(path, dialect="ik_llama.cpp") as header:
        a, b = header.tensors[:2]
        raw[a.absolute_offset :] = bytes(len(raw) - a.absolute_offset)
        place = b.absolute_offset + 5 * kind.row_bytes(512)
        raw[place : place + 4] = b"\xff" * 4
    path.write_bytes(raw)
    found = {}
    for function, mode in ((None, "oracle"), (TENSOR, "oracle"), (TENSOR, "correct")):
        result = validate_model(path, dialect="ik_llama.cpp", function=function, mode=mode)
        found[function, mode] = [(bad.name, bad.verdict.row) for bad in result.bad]
    assert found == {(None, "oracle"): [("c", None)], (TENSOR, "oracle"): [("b", 5)], (TENSOR, "correct"): []}


def test_cancelling_and_files_that_are_too_short(model):
    with pytest.raises(RefimplError) as caught:
        validate_model(model, dialect="llama.cpp", progress=lambda done, total: False)
    assert (caught.value.code, caught.value.exit_code) == ("E_CANCELLED", 1)
    with pytest.raises(RefimplError) as caught:
        validate_model(model, dialect="llama.cpp", threads=0)
    assert caught.value.code == "E_THREADS"
    with open_header(model) as header, pytest.raises(ModelError) as caught:
        validate_model(reading_by(header, lambda offset, length: b""), dialect="llama.cpp")
    assert caught.value.code == "E_CHANGED"
    raw = model.read_bytes()
    with pytest.raises(ModelError) as caught:
        validate_model(raw[: len(raw) // 2], dialect="llama.cpp")
    assert caught.value.code == "E_DATA_BOUNDS"


def test_load_refuses_a_bad_model_only_when_asked(model, capsys):
    refimpl.load(model, cpu="x86-avx512").close()
    for cpu in ("x86-avx512", "x86-sse42"):
        with pytest.raises(ModelError) as caught:
            refimpl.load(model, cpu=cpu, check_tensors=True)
        assert (caught.value.code, caught.value.exit_code) == ("E_TENSOR_DATA", 3)
        assert caught.value.fields["tensors"] == ["output_norm.weight", "blk.0.attn_output.weight"]
    assert main(["load", str(model), "--check-tensors"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refimpl: E_TENSOR_DATA: 2 tensors hold bad data: output_norm.weight (row 0, block 200, ")
    assert err.count("\n") == 1


def test_load_checks_source_bytes_of_repacked_tensors_and_takes_a_good_model(model):
    raw = bytearray(model.read_bytes())
    with open_header(model) as header:
        for name in ("output_norm.weight", "blk.0.attn_output.weight"):
            info = header.tensor(name)
            raw[info.absolute_offset : info.absolute_offset + info.nbytes] = bytes(info.nbytes)
        repacked = header.tensor("output.weight")
    model.write_bytes(raw)
    with refimpl.load(model, cpu="x86-avx512", check_tensors=True) as loaded:
        assert loaded["output.weight"].layout is not None
        assert "check" in loaded.report.phases
    raw[repacked.absolute_offset + 144 * 999 + 3] |= 0x7C
    model.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        refimpl.load(model, cpu="x86-avx512", check_tensors=True)
    assert caught.value.text.startswith("1 tensor holds bad data: output.weight (row 999, block 0, dmin at byte 143858")


def test_check_finds_the_same(model, capsys):
    assert main(["check", str(model)]) == 0
    assert capsys.readouterr().out == "container: good (llama.cpp), 12 tensors\n"
    assert main(["check", str(model), "--check-tensors"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    first, second, *bad = out.splitlines()
    assert first == "container: good (llama.cpp), 12 tensors"
    assert second.startswith("data: 2 bad of 12 tensors, ")
    assert second.endswith(" (llama.cpp, ggml_validate_row_data)")
    assert [line.rpartition(" is 0x")[0] for line in bad] == [
        "E_TENSOR_DATA: output_norm.weight: row 0, block 200, value at byte 800",
        "E_TENSOR_DATA: blk.0.attn_output.weight: row 77, block 0, d at byte 16378",
    ]
    assert main(["check", "-m", str(model), "--check-tensors", "-vq", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["dialect"], set(report["looked_at"])) == ("ik_llama.cpp", {ROW_DATA, TENSOR})
    assert [(f["code"], f["tensor"], f["row"], f["function"]) for f in report["findings"]] == [
        ("E_TENSOR_DATA", "output_norm.weight", 0, ROW_DATA),
        ("E_TENSOR_DATA", "blk.0.attn_output.weight", 77, ROW_DATA),
    ]
    assert main(["check", str(model), "--validate-quants", "--dialect", "llama.cpp"]) == 2
    assert capsys.readouterr().err.startswith("refimpl: E_FUNCTION: ")


@pytest.mark.model
def test_gemma_is_good(gemma):
    result = validate_model(gemma, dialect="llama.cpp")
    assert result
    assert result.tensors == 236
