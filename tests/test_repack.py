"""Every layout, clear and fast: shared checks (the recorded vectors are run by test_conformance_runners.py)."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refimpl.kernels import llama_repack

import refimpl
from refimpl.errors import LayoutError, UsageError
from refimpl.layouts import LAYOUTS, layout_by_name
from refimpl.repacking.tensor import IN_PLACE_BYTES, repack, unpack

ALL = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
VERSIONS = pytest.mark.parametrize("version", ["clear", "fast"])
Q4_0 = layout_by_name("q4_0_8x8")


def shape_of(layout, blocks=3, groups=5, matrices=1):
    return (layout.source_type.block_length * blocks, layout.rows * groups, matrices)


def tensor(layout, shape, rng):
    return rng.integers(0, 256, layout.source_type.tensor_bytes(shape), dtype=np.uint8)


def test_there_are_23_layouts_and_their_fields_cover_the_super_block():
    assert len(LAYOUTS) == 23
    for layout in LAYOUTS:
        position = 0
        for field in layout.fields:
            assert field.target_offset == position, layout.name
            position += layout.rows * field.source_bytes
        assert position == layout.super_block_bytes
        covered = sorted(i for f in layout.fields for i in range(f.source_offset, f.source_offset + f.source_bytes))
        assert covered == list(range(layout.source_type.block_bytes)), layout.name


@ALL
def test_clear_and_fast_agree_and_unpack_is_the_inverse(layout, rng):
    for blocks, groups, matrices in ((1, 1, 1), (2, 3, 1), (7, 2, 3), (16, 1, 2)):
        shape = shape_of(layout, blocks, groups, matrices)
        source = tensor(layout, shape, rng)
        clear = repack(source, layout.source_type, layout, shape, version="clear")
        fast = repack(source, layout.source_type, layout, shape)
        assert np.array_equal(clear, fast)
        for version in ("clear", "fast"):
            assert np.array_equal(unpack(clear, layout.source_type, layout, shape, version=version), source)


@ALL
@VERSIONS
def test_every_bit_of_the_source_reaches_exactly_one_bit_of_the_target(layout, version):
    """All layouts are permutations of bits (after the xor): checked by setting one bit per super-block."""
    size = layout.super_block_bytes
    n, s = layout.rows, layout.source_type.block_bytes
    zero = repack(bytes(size), layout.source_type, layout, shape_of(layout, 1, 1), version=version)
    step = 7  # coprime to 8, so that all bits of a byte and all bytes get their turn
    bits = range(0, size * 8, step)
    blocks = np.zeros((len(bits), n, s), np.uint8)
    flat = blocks.reshape(len(bits), -1)
    for i, bit in enumerate(bits):
        flat[i, bit // 8] = 1 << bit % 8
    shape = shape_of(layout, 1, len(bits))
    result = repack(flat.reshape(-1), layout.source_type, layout, shape, version=version).reshape(len(bits), size)
    changed = np.unpackbits(result ^ zero, axis=1)
    assert (changed.sum(axis=1) == 1).all()
    assert len(set(changed.argmax(axis=1).tolist())) == len(bits)


@ALL
@VERSIONS
def test_nothing_outside_the_target_is_written(layout, version, rng):
    shape = shape_of(layout, 5, 3)
    source = tensor(layout, shape, rng)
    for call in (repack, unpack):
        guarded = np.full(source.size + 128, 0xAA, np.uint8)
        call(source, layout.source_type, layout, shape, out=guarded[64:-64], version=version)
        assert (guarded[:64] == 0xAA).all()
        assert (guarded[-64:] == 0xAA).all()


@ALL
@VERSIONS
def test_in_place(layout, version, rng):
    shape = shape_of(layout, 3, 4, 2)
    source = tensor(layout, shape, rng)
    memory = source.copy()
    packed = repack(memory, layout.source_type, layout, shape, out=memory, version=version)
    assert packed.ctypes.data == memory.ctypes.data
    assert np.array_equal(memory, repack(source, layout.source_type, layout, shape, version="clear"))
    unpack(memory, layout.source_type, layout, shape, out=memory, version=version)
    assert np.array_equal(memory, source)


def test_in_place_of_more_than_the_scratch_memory(rng):
    shape = (4096, 8 * 150, 1)
    source = tensor(Q4_0, shape, rng)
    assert source.size > 2 * IN_PLACE_BYTES
    memory = source.copy()
    repack(memory, "q4_0", Q4_0, shape, out=memory)
    assert np.array_equal(memory, repack(source, "q4_0", Q4_0, shape))


@ALL
def test_the_variant_for_large_targets_gives_the_same_bytes(layout, rng, monkeypatch):
    monkeypatch.setattr(llama_repack, "STREAMED_BYTES", 0)
    for blocks in (4, 8, 3):  # an odd number takes the ordinary variant where super-blocks go in pairs
        shape = shape_of(layout, blocks, 4)
        source = tensor(layout, shape, rng)
        room = np.full(source.size + 48, 0xAA, np.uint8)
        start = 16 - room.ctypes.data % 16
        target = room[start : start + source.size]
        repack(source, layout.source_type, layout, shape, out=target)
        assert np.array_equal(target, repack(source, layout.source_type, layout, shape, version="clear"))
        assert (room[:start] == 0xAA).all()
        assert (room[start + source.size :] == 0xAA).all()


@VERSIONS
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"type": "q4_K"}, "E_LAYOUT_TYPE"),
        ({"shape": (64, 12)}, "E_LAYOUT_SHAPE"),
        ({"shape": (64, 4, 2)}, "E_LAYOUT_SHAPE"),
        ({"shape": (65, 8)}, "E_LAYOUT_SHAPE"),
        ({"shape": (0, 8)}, "E_LAYOUT_SHAPE"),
        ({"shape": (64, -8)}, "E_LAYOUT_SHAPE"),
        ({"shape": ()}, "E_LAYOUT_SHAPE"),
        ({"shape": (64, 8, 1, 1, 1)}, "E_LAYOUT_SHAPE"),
        ({"shape": (64.0, 8)}, "E_LAYOUT_SHAPE"),
        ({"shape": (64, 16)}, "E_LAYOUT_SIZE"),
        ({"shape": (2**62, 8)}, "E_LAYOUT_SIZE"),
        ({"data": bytes(289)}, "E_LAYOUT_SIZE"),
        ({"data": 288}, "E_LAYOUT_BUFFER"),
        ({"data": np.zeros((288, 2), np.uint8)[:, 0]}, "E_LAYOUT_BUFFER"),
        ({"out": bytes(288)}, "E_LAYOUT_BUFFER"),
        ({"out": np.zeros(576, np.uint8)[::2]}, "E_LAYOUT_BUFFER"),
        ({"out": bytearray(287)}, "E_LAYOUT_SIZE"),
        ({"layout": "q4_0_9x9"}, "E_LAYOUT"),
        ({"type": "nonsense"}, "E_TYPE"),
        ({"version": "slow"}, "E_VERSION"),
    ],
)
def test_refusals_write_nothing(changes, code, version):
    out = np.full(288, 0xAA, np.uint8)
    arguments = {"data": bytes(288), "type": "q4_0", "layout": "q4_0_8x8", "shape": (64, 8), "out": out}
    with pytest.raises((LayoutError, UsageError)) as caught:
        repack(**({**arguments, "version": version} | changes))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    assert (out == 0xAA).all()


def test_partial_overlap_is_refused(rng):
    memory = rng.integers(0, 256, 4608 + 144, dtype=np.uint8)
    before = memory.copy()
    with pytest.raises(LayoutError) as caught:
        repack(memory[:4608], "q4_0", Q4_0, (256, 32), out=memory[144:])
    assert caught.value.code == "E_LAYOUT_OVERLAP"
    assert np.array_equal(memory, before)


def test_sources_of_any_buffer_kind_and_alignment(rng, tmp_path):
    shape = (256, 16)
    source = tensor(Q4_0, shape, rng)
    expected = repack(source, "q4_0", Q4_0, shape, version="clear")
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 3 + source.tobytes())
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert np.array_equal(repack(memoryview(mapping)[3:], "q4_0", Q4_0, shape), expected)
    assert np.array_equal(repack(source.tobytes(), "Q4_0", "Q4_0_8X8", shape), expected)
    assert np.array_equal(repack(source.view("<u2").reshape(16, -1), "q4_0", Q4_0, shape), expected)


def test_threads_share_the_kernels(rng):
    shape = (512, 64)
    sources = [tensor(Q4_0, shape, rng) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda source: repack(source, "q4_0", Q4_0, shape), sources))
    for source, result in zip(sources, results, strict=True):
        assert np.array_equal(result, repack(source, "q4_0", Q4_0, shape, version="clear"))


@given(
    index=st.integers(0, len(LAYOUTS) - 1),
    blocks=st.integers(1, 6),
    groups=st.integers(1, 6),
    matrices=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_any_shape(index, blocks, groups, matrices, seed):
    layout = LAYOUTS[index]
    shape = shape_of(layout, blocks, groups, matrices)
    source = tensor(layout, shape, np.random.default_rng(seed))
    fast = repack(source, layout.source_type, layout, shape)
    assert np.array_equal(fast, repack(source, layout.source_type, layout, shape, version="clear"))
    assert np.array_equal(unpack(fast, layout.source_type, layout, shape), source)


def test_public_names_are_functions():
    assert refimpl.repack is repack
    assert refimpl.unpack is unpack
