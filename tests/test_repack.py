"""Every layout, clear and fast: shared checks (the recorded vectors are run by test_conformance_runners.py)."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refimpl
from refimpl.errors import LayoutError, UsageError
from refimpl.kernels import ik_repack, llama_repack
from refimpl.layouts import IK_LAYOUTS, LAYOUTS, LLAMA_LAYOUTS, IkLayout, layout_by_name
from refimpl.layouts.ik import bit_sources
from refimpl.repacking.bitmap import bit_map
from refimpl.repacking.tensor import IN_PLACE_BYTES, repack, unpack


def name(layout):
    return f"{layout.source_type.name}-{layout.name}"


def moves_bits(layout):
    """Whether a super-block is a rearrangement of the bits of its blocks."""
    return not isinstance(layout, IkLayout) or (layout.whole == "bits" and not any(p.sign_codes for p in layout.parts))


def invertible(layout):
    return not isinstance(layout, IkLayout) or layout.invertible


ALL = pytest.mark.parametrize("layout", LAYOUTS, ids=name)
BITS = pytest.mark.parametrize("layout", [*filter(moves_bits, LAYOUTS)], ids=name)
VERSIONS = pytest.mark.parametrize("version", ["clear", "fast"])
Q4_0 = layout_by_name("q4_0_8x8")


def shape_of(layout, blocks=3, groups=5, matrices=1):
    if layout.source_type.block_length == 1:  # 16-bit floats go in pairs of columns; all ways through the kernel
        blocks = 6 * blocks + 8
    return (layout.source_type.block_length * blocks, layout.rows * groups, matrices)


def tensor(layout, shape, rng):
    return rng.integers(0, 256, layout.source_type.tensor_bytes(shape), dtype=np.uint8)


def test_llama_cpp_has_23_layouts_and_their_fields_cover_the_super_block():
    assert len(LLAMA_LAYOUTS) == 23
    for layout in LLAMA_LAYOUTS:
        position = 0
        for field in layout.fields:
            assert field.target_offset == position, layout.name
            position += layout.rows * field.source_bytes
        assert position == layout.super_block_bytes
        covered = sorted(i for f in layout.fields for i in range(f.source_offset, f.source_offset + f.source_bytes))
        assert covered == list(range(layout.source_type.block_bytes)), layout.name


def test_ik_llama_cpp_has_28_and_their_parts_cover_both_sides():
    assert len(IK_LAYOUTS) == 28
    for layout in IK_LAYOUTS:
        assert layout.source_type.interleaved_as == layout.name == layout.target_type.name
        if layout.whole == "bits":
            sources = bit_sources(layout)
            bits = [(row, bit) for row in range(layout.rows) for bit in range(8 * layout.source_type.block_bytes)]
            assert sorted(sources) == bits, layout.name


@ALL
def test_clear_and_fast_agree_and_unpack_is_the_inverse(layout, rng):
    for blocks, groups, matrices in ((1, 1, 1), (2, 3, 1), (7, 2, 3), (16, 1, 2)):
        shape = shape_of(layout, blocks, groups, matrices)
        source = tensor(layout, shape, rng)
        clear = repack(source, layout.source_type, layout, shape, version="clear")
        fast = repack(source, layout.source_type, layout, shape)
        assert np.array_equal(clear, fast)
        for version in ("clear", "fast") if invertible(layout) else ():
            assert np.array_equal(unpack(clear, layout.source_type, layout, shape, version=version), source)


@BITS
@VERSIONS
def test_every_bit_of_the_source_reaches_the_bit_that_the_map_says(layout, version):
    """One bit per super-block, compared with a super-block of zeros."""
    size, head = layout.super_block_bytes, layout.rows * layout.source_type.row_meta_bytes
    block, meta = layout.source_type.block_bytes, layout.source_type.row_meta_bytes
    places = {source: target for target, source in enumerate(bit_map(layout).sources)}
    bits = range(0, size * 8, 7)  # coprime to 8, so that all bits of a byte and all bytes get their turn
    rows = np.zeros((len(bits), layout.rows, meta + block), np.uint8)
    for i, bit in enumerate(bits):
        row, byte = divmod(bit // 8, block)
        rows[i, row, meta + byte] = 1 << bit % 8
    shape = (layout.source_type.block_length, layout.rows * len(bits))
    zero = repack(bytes(rows[0].size), layout.source_type, layout, (shape[0], layout.rows), version=version)
    result = repack(rows.reshape(-1), layout.source_type, layout, shape, version=version).reshape(len(bits), -1)
    changed = np.unpackbits((result ^ zero)[:, head:], axis=1, bitorder="little")
    assert (changed.sum(axis=1) == 1).all()
    for bit, target in zip(bits, changed.argmax(axis=1).tolist(), strict=True):
        row, byte = divmod(bit // 8, block)
        assert target == places[row, 8 * byte + bit % 8]


@pytest.mark.parametrize("version", ["clear", "fast"])
def test_every_f16_becomes_the_upper_half_of_its_f32(version):
    """All 65536; the rule is checked against NumPy's own widening, where signalling NaNs become quiet."""
    values = np.arange(65536, dtype="<u2")
    shape = (4096, 16)
    packed = repack(values, "f16", "bf16_r16", shape, version=version).view("<u2")
    expected = values.view("<f2").astype("<f4").view("<u4") >> 16
    nan = np.isnan(values.view("<f2"))
    expected[nan] |= 0x40
    pairs = expected.astype("<u2").reshape(16, -1, 2).swapaxes(0, 1).reshape(-1)
    assert np.array_equal(packed, pairs)


@pytest.mark.parametrize("version", ["clear", "fast"])
def test_f32_scales_are_rounded_to_even(version):
    """Halfway cases, overflow, subnormals and NaNs of the q8_K scales, beside random patterns."""
    rng = np.random.default_rng(5)
    special = [
        0x00000000,
        0x80000000,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0x7FC12345,
        0xFFFFFFFF,
        0x477FE000,
        0x477FEFFF,
    ]
    special += [
        0x477FF000,
        0x47800000,
        0x38800000,
        0x387FE000,
        0x387FFFFF,
        0x33000000,
        0x33000001,
        0x32FFFFFF,
        0x00000001,
    ]
    special += [0x3F801000, 0x3F803000, 0x3F801001, 0x33C00000, 0x34200000]
    patterns = np.array(special + rng.integers(0, 2**32, 8192 - len(special)).tolist(), "<u4")
    blocks = np.zeros((patterns.size, 296), np.uint8)
    blocks[:, :4] = patterns.view(np.uint8).reshape(-1, 4)
    packed = repack(blocks.reshape(-1), "q8_K", "q8_k_r8", (256, patterns.size), version=version)
    halves = packed.reshape(-1, 8 * 296)[:, :16].copy().view("<u2").reshape(-1)
    with np.errstate(all="ignore"):
        expected = patterns.view("<f4").astype("<f2").view("<u2")
    nan = np.isnan(patterns.view("<f4"))
    assert np.array_equal(halves[~nan], expected[~nan])
    quiet = (patterns >> 16 & 0x8000) | 0x7E00 | (patterns >> 13 & 0x3FF)
    assert np.array_equal(halves[nan], quiet[nan].astype(np.uint16))


@VERSIONS
@pytest.mark.parametrize("kind", ["q8_K", "q8_KV"])
def test_shorter_rows_leave_the_rest_of_their_place(kind, version, rng):
    layout = layout_by_name(f"{kind}_r8", kind)
    shape = shape_of(layout, 2, 3)
    source = tensor(layout, shape, rng)
    packed = repack(source, kind, layout, shape, version=version).reshape(3, -1)
    written = layout.written_bytes(2)
    assert written < packed.shape[1]
    assert np.array_equal(packed[:, written:], source.reshape(3, -1)[:, written:])


@VERSIONS
def test_three_layouts_have_no_inverse(version, rng):
    for layout in (layout for layout in LAYOUTS if not invertible(layout)):
        shape = shape_of(layout)
        with pytest.raises(LayoutError) as caught:
            unpack(tensor(layout, shape, rng), layout.source_type, layout, shape, version=version)
        assert caught.value.code == "E_LAYOUT_INVERSE"


def test_an_odd_row_of_halves_is_refused():
    with pytest.raises(LayoutError) as caught:
        repack(bytes(2 * 3 * 16), "bf16", "bf16_r16", (3, 16))
    assert caught.value.code == "E_LAYOUT_SHAPE"


@ALL
@VERSIONS
def test_nothing_outside_the_target_is_written(layout, version, rng):
    shape = shape_of(layout, 5, 3)
    source = tensor(layout, shape, rng)
    for call in (repack, unpack) if invertible(layout) else (repack,):
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
    if invertible(layout):
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
    for module in (llama_repack, ik_repack):
        monkeypatch.setattr(module, "STREAMED_BYTES", 0)
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
        ({"data": np.zeros(36, "M8[s]")}, "E_LAYOUT_BUFFER"),
        ({"shape": (32 * 10**5000, 8)}, "E_LAYOUT_SHAPE"),
        ({"data": np.zeros((288, 2), np.uint8)[:, 0]}, "E_LAYOUT_BUFFER"),
        ({"out": bytes(288)}, "E_LAYOUT_BUFFER"),
        ({"out": np.zeros(576, np.uint8)[::2]}, "E_LAYOUT_BUFFER"),
        ({"out": bytearray(287)}, "E_LAYOUT_SIZE"),
        ({"layout": "q4_0_9x9"}, "E_LAYOUT"),
        ({"layout": "q8_0_r8"}, "E_LAYOUT_TYPE"),
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


def test_sizes_may_be_numpy_integers(rng):
    source = tensor(Q4_0, (256, 256), rng)
    packed = repack(source, "q4_0", Q4_0, (np.uint16(256), np.int16(256)))
    assert np.array_equal(packed, repack(source, "q4_0", Q4_0, (256, 256)))


def test_the_variant_is_chosen_by_size_and_alignment(monkeypatch):
    chosen = []
    for module, layout in ((llama_repack, Q4_0), (ik_repack, layout_by_name("q4_0_r8"))):
        monkeypatch.setattr(module, "compiled", lambda index, mode: lambda *a: chosen.append(mode))
        room = np.zeros(module.STREAMED_BYTES + 32, np.uint8)
        start = -room.ctypes.data % 16
        groups = module.STREAMED_BYTES // layout.group_bytes(64)
        for first, count in ((start, groups + 1), (start + 8, groups + 1), (start, groups - 1)):
            target = np.lib.stride_tricks.as_strided(room[first:], (count * layout.group_bytes(64),), (1,))
            module.repack_groups(layout, target, target, count, 64)
    streamed, plain = llama_repack.REPACK_STREAMED, llama_repack.REPACK
    assert chosen == [streamed, plain, plain] * 2


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
    if invertible(layout):
        assert np.array_equal(unpack(fast, layout.source_type, layout, shape), source)


def test_public_names_are_functions():
    assert refimpl.repack is repack
    assert refimpl.unpack is unpack
