"""The tensor-type table against the gguf package, and its arithmetic."""

from __future__ import annotations

import gguf
import pytest

from refimpl.errors import GGUFError, UsageError
from refimpl.types import DIALECTS, LLAMA_TYPE_COUNT, REMOVED_IDS, TYPES, UnknownType, type_by_id, type_by_name

PACKAGE_DIFFERS = {9: 40}
"""q8_1, an internal type that no file holds: the package still counts two 4-byte scalars, llama.cpp has two halves."""


def test_mainline_rows_are_those_of_the_gguf_package():
    ours = {t.id: t for t in TYPES if "llama.cpp" in t.dialects}
    for kind, (length, nbytes) in gguf.GGML_QUANT_SIZES.items():
        row = ours.pop(int(kind))
        assert row.name.upper() == kind.name
        assert (row.block_length, PACKAGE_DIFFERS.get(row.id, row.block_bytes)) == (length, nbytes), row
    assert set(ours) <= {42}, "types that are newer than the gguf package"


def test_every_mainline_id_is_a_type_or_removed():
    known = {t.id for t in TYPES if "llama.cpp" in t.dialects}
    assert known | REMOVED_IDS == set(range(LLAMA_TYPE_COUNT))
    assert not known & REMOVED_IDS


@pytest.mark.parametrize("dialect", DIALECTS)
def test_ids_and_names_are_unique_within_a_dialect(dialect):
    rows = [t for t in TYPES if dialect in t.dialects]
    assert len({t.id for t in rows}) == len(rows) == len({t.name.lower() for t in rows})
    for row in rows:
        assert type_by_id(row.id, dialect) is row
        assert type_by_name(row.name.upper(), dialect) is row


def test_interleaved_partners_exist_and_keep_the_size():
    sources = [t for t in TYPES if t.interleaved_as]
    assert len(sources) == 28
    for source in sources:
        partner = type_by_name(source.interleaved_as, "ik_llama.cpp")
        assert partner.block_length == source.block_length
        if source.name not in ("q8_K", "q8_KV"):  # their interleaved rows are shorter than the source's
            assert (partner.block_bytes, partner.row_meta_bytes) == (source.block_bytes, source.row_meta_bytes)
        assert str(source.interleaved_rows) == source.interleaved_as.rpartition("_r")[2]


def test_unknown_ids_are_data_without_a_size():
    assert type_by_id(9999) == UnknownType(9999)
    assert type_by_id(135, "llama.cpp") == UnknownType(135)
    assert type_by_id(135).name == "iq2_bn"
    with pytest.raises(GGUFError) as caught:
        UnknownType(9999).tensor_bytes((32,))
    assert caught.value.code == "E_TENSOR_TYPE"


def test_one_id_with_two_meanings_follows_the_dialect():
    assert type_by_id(15).block_bytes == 292
    assert type_by_id(15, "ik_llama.cpp").block_bytes == 296
    assert (type_by_id(41).name, type_by_id(41, "ik_llama.cpp").name) == ("q1_0", "q1_0_g128")


def test_sizes_are_exact_integers_of_any_size():
    q4_0 = type_by_name("q4_0")
    assert q4_0.row_bytes(4096) == 2304
    assert q4_0.tensor_bytes((2**40, 2**40)) == 2**75 * 18
    assert q4_0.tensor_bytes((0, 7)) == 0
    assert type_by_name("f32").tensor_bytes(()) == 4
    assert type_by_name("iq2_bn").tensor_bytes((128, 4, 2)) == (4 + 32) * 8
    with pytest.raises(GGUFError) as caught:
        q4_0.row_bytes(33)
    assert (caught.value.code, caught.value.fields["expected"]) == ("E_BLOCK", 32)


def test_unknown_names():
    with pytest.raises(UsageError) as caught:
        type_by_name("q9_Z")
    assert caught.value.code == "E_TYPE"
