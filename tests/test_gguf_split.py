"""Split sets: which files make one, in which order they are checked, and how they are loaded (gguf.md 7)."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from models import LLAMA, LLAMA_KV, write_llama, write_model, write_split

import refimpl
from refimpl.errors import ModelError, OpenError, RefimplError, UsageError
from refimpl.gguf.header import ValueType as V
from refimpl.gguf.source import open_header
from refimpl.gguf.split import shard_name, shard_prefix
from refimpl.gguf.writer import write_gguf
from refimpl.repacking.tensor import repack

NAMES = list(LLAMA)
SETS = [{name: LLAMA[name] for name in names} for names in (NAMES[:2], NAMES[2:7], NAMES[7:])]


@pytest.fixture
def shards(tmp_path):
    data = write_split(tmp_path, SETS)
    return [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)], data


def code_of(source, **options):
    with pytest.raises(RefimplError) as caught:
        open_header(source, **options).close()
    assert "\n" not in str(caught.value)
    return caught.value.code


def check_merged(header, shards):
    assert [tensor.name for tensor in header.tensors] == NAMES
    assert [tensor.shard for tensor in header.tensors] == [0] * 2 + [1] * 5 + [2] * 5
    assert header.architecture == "llama"
    assert [shard.path for shard in header.shards] == [str(path) for path in shards]
    assert [shard.size for shard in header.shards] == [path.stat().st_size for path in shards]
    assert header.size == sum(path.stat().st_size for path in shards)
    assert header.kv["llama.vocab_size"] == 1000


def test_any_shard_opens_the_whole_set_and_offsets_are_those_of_its_own_file(shards):
    paths, data = shards
    for path in paths:
        with refimpl.open(path) as header:
            check_merged(header, paths)
            for tensor in header.tensors:
                raw = paths[tensor.shard].read_bytes()
                assert raw[tensor.absolute_offset :][: tensor.nbytes] == data[tensor.name], tensor.name
                assert header.shards[tensor.shard].read(tensor.absolute_offset, 9) == data[tensor.name][:9]
                assert header.tensor(tensor.name) is tensor
            assert header.data_bytes == sum(shard.data_bytes for shard in header.shards)


@pytest.mark.parametrize("pattern", ["m", "m-*", "m-*.gguf", "*-00002-of-*.gguf", "m-0000[13]-of-00003.gguf"])
def test_a_pattern_or_the_beginning_of_the_names(shards, tmp_path, pattern, monkeypatch):
    paths, _ = shards
    with refimpl.open(tmp_path / pattern) as header:
        check_merged(header, paths)
    monkeypatch.chdir(tmp_path)
    with refimpl.open(pattern) as header:
        assert [shard.path for shard in header.shards] == [path.name for path in paths]


def test_a_pattern_that_fits_several_models_or_none(shards, tmp_path):
    assert code_of(str(tmp_path / "n-*")) == "E_OPEN"
    write_split(tmp_path, [SETS[0], {**SETS[1], **SETS[2]}])
    assert code_of(tmp_path / "m") == "E_SPLIT_NAME"
    assert code_of(tmp_path / "m-*") == "E_SPLIT_NAME"
    with refimpl.open(tmp_path / "m-*-of-00002.gguf") as header:
        assert len(header.shards) == 2


def test_a_pattern_of_one_ordinary_file_and_a_name_with_pattern_signs(tmp_path):
    write_model(tmp_path / "model.gguf")
    with refimpl.open(tmp_path / "mod*") as header:
        assert len(header.shards) == 1
    shutil.move(tmp_path / "model.gguf", tmp_path / "a[1]*.gguf")
    with refimpl.open(tmp_path / "a[1]*.gguf") as header:
        assert header.shards[0].path.endswith("a[1]*.gguf")
    (tmp_path / "folder[x]").mkdir()
    write_split(tmp_path / "folder[x]", SETS)
    with refimpl.open(tmp_path / "folder[x]" / "m") as header:
        assert len(header.shards) == 3


def test_a_list_of_files_may_have_any_names(shards, tmp_path):
    paths, _ = shards
    for i, path in enumerate(paths):
        path.rename(tmp_path / f"{i}.bin")
    named = [tmp_path / f"{i}.bin" for i in range(3)]
    with open_header(named) as header:
        check_merged(header, named)
    assert code_of(named[:2]) == "E_SPLIT_COUNT"
    assert code_of([named[0], named[2], named[1]]) == "E_SPLIT_ORDER"
    assert code_of(named[1:]) == "E_SPLIT_FIRST"
    assert code_of(str(named[0])) == "E_SPLIT_NAME"
    write_llama(tmp_path / "whole")
    assert code_of([tmp_path / "whole", tmp_path / "whole"]) == "E_SPLIT_COUNT"
    with pytest.raises(UsageError):
        open_header([])


def test_only_the_first_shard_opens_a_set_where_the_real_program_is_imitated(shards):
    paths, _ = shards
    open_header(paths[0], any_shard=False).close()
    assert code_of(paths[1], any_shard=False) == "E_SPLIT_FIRST"


def test_bytes_of_a_shard_are_that_one_file(shards):
    paths, _ = shards
    header = open_header(paths[1].read_bytes())
    assert [tensor.name for tensor in header.tensors] == NAMES[2:7]
    with open(paths[1], "rb") as file:
        assert len(open_header(file).shards) == 1


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_shard_that_is_not_there(shards, missing):
    paths, _ = shards
    paths[missing].unlink()
    for path in paths:
        if path.exists():
            with pytest.raises(ModelError) as caught:
                open_header(path)
            assert (caught.value.code, caught.value.fields["shard"]) == ("E_SPLIT_SHARD", missing)
            assert paths[missing].name in caught.value.text


def test_a_shard_that_is_no_gguf_or_a_folder(shards):
    paths, _ = shards
    paths[2].write_bytes(b"nonsense")
    with pytest.raises(ModelError) as caught:
        open_header(paths[0])
    assert (caught.value.code, caught.value.fields["cause"]) == ("E_SPLIT_SHARD", "E_MAGIC")
    paths[2].unlink()
    paths[2].mkdir()
    assert code_of(paths[0]) == "E_SPLIT_SHARD"


def rewrite(path, change):
    """The file again, with its keys changed."""
    with refimpl.open(path.read_bytes()) as header:
        kv = {pair.key.decode(): (pair.type, pair.value) for pair in header.kv.items_raw()}
        tensors = [(t.name, t.type, t.shape, None) for t in header.tensors]
        change(kv)
        write_gguf(path, [(key, *value) for key, value in kv.items()], tensors)


@pytest.mark.parametrize(
    ("shard", "change", "code"),
    [
        (0, lambda kv: kv.update({"split.count": (V.U32, 3)}), "E_KV_TYPE_MISMATCH"),
        (0, lambda kv: kv.update({"split.count": (V.U16, 4)}), "E_SPLIT_NAME"),
        (0, lambda kv: kv.pop("split.no"), "E_KEY_MISSING"),
        (0, lambda kv: kv.update({"split.no": (V.U32, 0)}), "E_KV_TYPE_MISMATCH"),
        (0, lambda kv: kv.update({"split.tensors.count": (V.I32, 11)}), "E_SPLIT_TOTAL"),
        (0, lambda kv: kv.update({"split.tensors.count": (V.U32, 12)}), "E_KV_TYPE_MISMATCH"),
        (0, lambda kv: kv.pop("split.tensors.count"), "E_KEY_MISSING"),
        (1, lambda kv: kv.pop("split.no"), "E_SPLIT_NO_MISSING"),
        (1, lambda kv: kv.update({"split.no": (V.U16, 2)}), "E_SPLIT_ORDER"),
        (1, lambda kv: kv.update({"split.no": (V.U32, 1)}), "E_KV_TYPE_MISMATCH"),
        (1, lambda kv: kv.pop("split.count"), None),
        (1, lambda kv: kv.update({"split.count": (V.STR, "x")}), None),
        (2, lambda kv: kv.update({"general.architecture": (V.U32, 7)}), None),
        (2, lambda kv: kv.update({"split.tensors.count": (V.STR, "x")}), None),
    ],
)
def test_keys_of_the_set(shards, shard, change, code):
    paths, _ = shards
    rewrite(paths[shard], change)
    if code is None:
        open_header(paths[0]).close()
    else:
        assert code_of(paths[0]) == code


def test_the_first_broken_rule_in_the_real_order_decides(shards):
    """Several are broken at once; each repair uncovers the next one."""
    paths, _ = shards
    rewrite(paths[0], lambda kv: kv.update({"split.tensors.count": (V.I32, 99)}))
    rewrite(paths[1], lambda kv: kv.update({"split.no": (V.U16, 7)}))
    rewrite(paths[2], lambda kv: kv.pop("split.no"))
    assert code_of(paths[0]) == "E_SPLIT_ORDER"
    rewrite(paths[1], lambda kv: kv.update({"split.no": (V.U16, 1)}))
    assert code_of(paths[0]) == "E_SPLIT_NO_MISSING"
    rewrite(paths[2], lambda kv: kv.update({"split.no": (V.U16, 2)}))
    assert code_of(paths[0]) == "E_SPLIT_TOTAL"


def test_a_tensor_in_two_shards(tmp_path):
    sets = [SETS[0], {**SETS[1], NAMES[0]: LLAMA[NAMES[0]]}, SETS[2]]
    write_split(tmp_path, sets, total=12)
    assert code_of(tmp_path / "m") == "E_NAME_DUPLICATE"


def test_a_first_shard_without_tensors(tmp_path):
    write_split(tmp_path, [{}, {**SETS[0], **SETS[1]}, SETS[2]])
    with refimpl.load(tmp_path / "m-00001-of-00003.gguf", cpu="x86-avx512") as model:
        assert list(model) == NAMES


def test_every_file_has_its_own_alignment(tmp_path):
    write_split(tmp_path, SETS)
    path = tmp_path / "m-00002-of-00003.gguf"
    with refimpl.open(path.read_bytes()) as header:
        kv = [(pair.key, pair.type, pair.value) for pair in header.kv.items_raw()]
        write_gguf(path, kv, [(t.name, t.type, t.shape, None) for t in header.tensors], alignment=4096)
    with refimpl.open(path) as header:
        assert [shard.alignment for shard in header.shards] == [32, 4096, 32]
        assert header.shards[1].data_start == 4096


def test_names_of_shards():
    assert shard_name("/", 4, 100_000) == "/-00005-of-100000.gguf"
    assert shard_prefix("folder/-00001-of-00002.gguf", 0, 2) == "folder/"
    for name in ("m-00001-of-00002.GGUF", "m-0001-of-0002.gguf", "m-00001-of-00003.gguf", "-00001-of-00002.gguf", ""):
        with pytest.raises(ModelError) as caught:
            shard_prefix(name, 0, 2)
        assert caught.value.code == "E_SPLIT_NAME"


def test_no_file_name_comes_from_a_file(shards, tmp_path):
    """Whatever stands in the strings of a model, only numbers and the caller's own path are looked at."""
    paths, _ = shards
    rewrite(paths[0], lambda kv: kv.update({"general.name": (V.STR, "../../etc/passwd")}))
    with refimpl.open(paths[0]) as header:
        assert {os.path.dirname(shard.path) for shard in header.shards} == {str(tmp_path)}


@pytest.mark.parametrize("reclaim", ["progressive", "end", "never"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_loading_a_set_gives_the_same_bytes_as_one_file(shards, reclaim, prefetch):
    paths, data = shards
    with refimpl.load(paths[1], cpu="x86-avx512", reclaim=reclaim, prefetch=prefetch, threads=2) as model:
        assert list(model) == NAMES
        for name, tensor in model.items():
            expected = data[name]
            if tensor.layout:
                expected = repack(expected, tensor.type, tensor.layout, tensor.shape, version="clear").tobytes()
            assert bytes(tensor.data) == expected, name
        assert len({tensor.buffer_type for tensor in model.values()}) == 2
        if reclaim != "never":
            assert model.report.reclaimed_bytes > 0


def test_each_file_has_a_span_of_its_own(shards, tmp_path):
    paths, data = shards
    with refimpl.load(paths[0], cpu="x86-avx512", repack=False) as model, refimpl.open(paths[0]) as header:
        spans = [shard.data_bytes for shard in header.shards]
        assert model.report.buffers == {"CPU_Mapped": sum(spans)}
        assert np.array_equal(model[NAMES[0]].data, np.frombuffer(data[NAMES[0]], np.uint8))


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_shard_that_is_cut_can_be_planned_with_but_not_loaded(shards, shard):
    paths, _ = shards
    os.truncate(paths[shard], paths[shard].stat().st_size - 1000)
    open_header(paths[0]).close()
    with pytest.raises(ModelError) as caught:
        refimpl.load(paths[0], cpu="x86-avx512")
    assert caught.value.code == "E_DATA_BOUNDS"


def test_a_closed_set_holds_no_files(shards):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc to count open files in")
    paths, _ = shards
    before = len(os.listdir("/proc/self/fd"))
    open_header(paths[0]).close()
    paths[2].write_bytes(b"nonsense")
    code_of(paths[0])
    paths[2].unlink()
    code_of(paths[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(OpenError):
        open_header(tmp_path / "m")
    assert LLAMA_KV
