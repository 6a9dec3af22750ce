"""Loading: the right bytes in the right place, dead pages given back, and every way it can fail."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import mmap
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from models import SMALL, TIED, write_model

import refimpl
from refimpl.errors import ClosedError, MachineError, ModelError, RefimplError
from refimpl.gguf.values import ValueType
from refimpl.gguf.writer import write_gguf
from refimpl.loading import copying, loader
from refimpl.loading.arena import Arena
from refimpl.loading.mapping import FileMapping
from refimpl.loading.memory import current_rss, peak_rss
from refimpl.loading.reclaim import FOLIO_BYTES, Reclaimer
from refimpl.repacking.tensor import repack
from refimpl.types import type_by_name

CPU = "x86-avx512"
REPACKED = {
    "output.weight": "q4_K_8x8",
    "blk.0.attn_q.weight": "q4_0_8x8",
    "blk.0.attn_v.weight": "iq4_nl_8x8",
    "blk.0.ffn_gate.weight": "mxfp4_8x8",
    "blk.0.ffn_down.weight": "q2_K_8x8",
}
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page drops and smaps are Linux's")


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.gguf"
    return path, write_model(path)


@pytest.mark.parametrize("reclaim", ["progressive", "end", "never"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_tensor_is_what_the_file_says(small, reclaim, threads, prefetch):
    path, data = small
    with refimpl.load(path, cpu=CPU, reclaim=reclaim, threads=threads, prefetch=prefetch) as model:
        assert list(model) == list(SMALL)
        assert {name: t.layout.name for name, t in model.items() if t.layout} == REPACKED
        for name, tensor in model.items():
            expected = data[name]
            if tensor.layout:
                expected = repack(expected, tensor.type, tensor.layout, tensor.shape, version="clear").tobytes()
            assert bytes(tensor.data) == expected, name
            assert tensor.sha256() == hashlib.sha256(expected).hexdigest()
            assert tensor.nbytes == len(expected)
            assert not tensor.data.flags.writeable
        assert model.report.repacked_bytes == sum(len(data[name]) for name in REPACKED)
        assert model.report.in_place_bytes == sum(len(data[name]) for name in SMALL if name not in REPACKED)


def test_nothing_is_repacked_on_request_or_on_an_old_cpu(small):
    path, data = small
    for options in ({"repack": False}, {"cpu": "x86-sse42"}):
        with refimpl.load(path, **{"cpu": CPU} | options) as model:
            assert model.report.repacked_tensors == 0
            assert all(bytes(model[name].data) == data[name] for name in SMALL)


def test_a_tied_embedding_keeps_its_pages(tmp_path):
    path = tmp_path / "tied.gguf"
    tensors = {**TIED, "token_embd.weight": ("q4_K", (256, 8000))}
    data = write_model(path, tensors)
    with refimpl.load(path, cpu=CPU) as model:
        embedding, output = model["token_embd.weight"], model["token_embd.weight#output"]
        assert (embedding.buffer_type, output.buffer_type) == ("CPU", "CPU_REPACK")
        assert bytes(embedding.data) == data["token_embd.weight"]
        assert bytes(output.data) == repack(embedding.data, "q4_K", "q4_K_8x8", (256, 8000)).tobytes()
        assert model.report.reclaimed_bytes < embedding.nbytes // 2


def test_slices_meet_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "SLICE_BYTES", 3000)
    path = tmp_path / "m.gguf"
    data = write_model(path)
    with refimpl.load(path, cpu=CPU, threads=2) as model:
        for name, layout in REPACKED.items():
            expected = repack(data[name], SMALL[name][0], layout, SMALL[name][1], version="clear")
            assert np.array_equal(model[name].data, expected)


def test_close_is_idempotent_and_views_survive(small):
    path, data = small
    model = refimpl.load(path, cpu=CPU)
    in_place, repacked = model["token_embd.weight"].data, model["output.weight"].data
    before = bytes(repacked)
    for _ in range(2):
        model.close()
    for use in (lambda: model["output.weight"], lambda: len(model), lambda: list(model), model.digests):
        with pytest.raises(ClosedError) as caught:
            use()
        assert caught.value.code == "E_CLOSED"
    assert bytes(in_place) == data["token_embd.weight"]
    assert bytes(repacked) == before
    assert "closed" in repr(model)


def test_digests_are_stable(small):
    path, _ = small
    with refimpl.load(path, cpu=CPU, threads=1) as one, refimpl.load(path, cpu=CPU, threads=4, reclaim="end") as other:
        assert one.digests() == other.digests(threads=3)
        assert list(one.digests()) == sorted(SMALL)


def test_progress_counts_tensors_and_ends_at_the_total(small):
    path, data = small
    calls = []
    refimpl.load(path, cpu=CPU, progress=lambda done, total: calls.append((done, total))).close()
    total = sum(map(len, data.values()))
    assert len(calls) == len(SMALL) + 1
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("call", range(len(SMALL) + 1))
def test_cancelling_at_any_call_frees_everything(small, call):
    path, _ = small
    calls = iter(range(100))
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(RefimplError) as caught:
        refimpl.load(path, cpu=CPU, progress=lambda done, total: next(calls) != call)
    assert caught.value.code == "E_CANCELLED"
    if files:
        assert len(os.listdir("/proc/self/fd")) == files
    assert not [t for t in threading.enumerate() if t.name.startswith("refimpl-load")]


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    path, _ = small
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    with refimpl.open(path) as header:
        start = header.data_start
    for size in [*range(0, start, 97), start, start + 1, len(whole) // 2, len(whole) - 5000]:
        cut.write_bytes(whole[:size])
        with pytest.raises(RefimplError) as caught:
            refimpl.load(cut, cpu=CPU)
        expected = "E_DATA_BOUNDS" if size >= start else None
        assert expected in (None, caught.value.code)
        assert caught.value.exit_code == 3


def test_a_missing_tail_padding_is_no_error(tmp_path):
    path = tmp_path / "m.gguf"
    tensors = {"blk.0.attn_norm.weight": ("f32", (250,))}
    write_model(path, tensors)
    with refimpl.open(path) as header:
        end = header.tensors[0].absolute_offset + header.tensors[0].nbytes
    os.truncate(path, end)
    refimpl.load(path, cpu=CPU).close()


def test_a_data_start_that_cannot_be_mapped(tmp_path):
    path = tmp_path / "m.gguf"
    for extra in range(32):
        write_model(path, alignment=8, kv=[("x" * (extra + 1), refimpl.gguf.values.ValueType.U8, 1)])
        with refimpl.open(path) as header:
            aligned = header.data_start % 32 == 0
        if not aligned:
            break
    with pytest.raises(ModelError) as caught:
        refimpl.load(path, cpu=CPU)
    assert caught.value.code == "E_DATA_ALIGN"


def test_a_file_that_changes_size_while_it_is_opened(small):
    path, _ = small
    with pytest.raises(ModelError) as caught:
        FileMapping(path, path.stat().st_size + 1)
    assert caught.value.code == "E_CHANGED"


def test_a_file_that_is_replaced_between_header_and_mapping(tmp_path, monkeypatch):
    path, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    tensors = {"blk.0.attn_q.weight": ("q4_0", (256, 256)), "blk.0.attn_k.weight": ("q8_0", (256, 128))}
    write_model(path, tensors)
    write_model(other, dict(reversed(tensors.items())))
    assert path.stat().st_size == other.stat().st_size
    compiled = loader._compile
    monkeypatch.setattr(loader, "_compile", lambda layouts: (os.replace(other, path), compiled(layouts))[1])
    with pytest.raises(ModelError) as caught:
        refimpl.load(path, cpu=CPU)
    assert caught.value.code == "E_CHANGED"


def test_empty_tensors_stay_in_place(tmp_path):
    path = tmp_path / "m.gguf"
    for name, shape in (("attn_q", (0, 256)), ("attn_k", (256, 0)), ("ffn_up_exps", (256, 0, 4)), ("attn_v", (0, 8))):
        for more in ({}, {"blk.0.attn_output.weight": ("q4_0", (256, 256))}):
            write_model(path, {f"blk.0.{name}.weight": ("q4_0", shape), **more})
            with refimpl.load(path, cpu=CPU) as model:
                assert model[f"blk.0.{name}.weight"].nbytes == 0
                assert model.report.repacked_tensors == len(more)


def test_names_that_are_no_text_stay_apart(tmp_path):
    path = tmp_path / "m.gguf"
    kind, data = type_by_name("f32"), bytes(4)
    pairs = [("general.architecture", ValueType.STR, "qwen3"), ("qwen3.block_count", ValueType.U32, 1)]
    write_gguf(path, pairs, [(b"a\xff", kind, (1,), data), (b"a\xfe", kind, (1,), data)])
    with refimpl.load(path, cpu=CPU) as model:
        assert len(model) == 2


def test_a_failing_kernel_fails_the_load(small, monkeypatch):
    def broken(layout, source, target, groups, blocks):
        raise ZeroDivisionError("in a worker")

    monkeypatch.setattr(loader, "_compile", lambda layouts: broken)
    with pytest.raises(ZeroDivisionError):
        refimpl.load(small[0], cpu=CPU)


def test_weights_cannot_be_made_writable(small):
    with refimpl.load(small[0], cpu=CPU) as model:
        for tensor in model.values():
            with pytest.raises(ValueError, match="WRITEABLE"):
                tensor.data.setflags(write=True)
        assert model != refimpl.load(small[0], cpu=CPU)
        assert len({model, *model.values()}) == len(model) + 1


def test_threads_that_do_not_start(small, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MachineError) as caught:
        refimpl.load(small[0], cpu=CPU)
    assert (caught.value.code, caught.value.exit_code) == ("E_THREADS", 4)


def test_memory_that_the_system_refuses():
    with pytest.raises(MachineError) as caught:
        Arena([2**62])
    assert (caught.value.code, caught.value.exit_code) == ("E_MEMORY", 4)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"load_mode": "dio"}, "E_LOAD_MODE"),
        ({"reclaim": "sometimes"}, "E_RECLAIM"),
        ({"threads": 0}, "E_THREADS"),
        ({"threads": float("nan")}, "E_THREADS"),
        ({"threads": True}, "E_THREADS"),
        ({"cpu": "pentium"}, "E_CPU"),
    ],
)
def test_options_that_make_no_sense(small, options, code):
    with pytest.raises(RefimplError) as caught:
        refimpl.load(small[0], **options)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_names_without_a_rule_are_said(tmp_path, caplog):
    path = tmp_path / "m.gguf"
    write_model(path, {**SMALL, "blk.0.nobody_knows.weight": ("q4_0", (256, 256))})
    with caplog.at_level(logging.WARNING, "refimpl"), refimpl.load(path, cpu=CPU) as model:
        assert any("UNKNOWN" in warning and "nobody_knows" in warning for warning in model.report.warnings)
        assert model["blk.0.nobody_knows.weight"].layout is None
    assert "UNKNOWN" in caplog.text


# Reclaim by itself: the kernel's side is a list of calls.

PAGE = 4096


class Kernel:
    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def __call__(self, advice, start, length):
        assert advice == mmap.MADV_DONTNEED
        assert start % PAGE == length % PAGE == 0
        assert length > 0
        if len(self.calls) == self.fail_at:
            raise OSError(12, "Cannot allocate memory")
        self.calls.append((start, start + length))


def reclaimer(policy, dead, **options):
    kernel = Kernel(options.pop("fail_at", None))
    return Reclaimer(kernel, policy, dead, page=PAGE, supported=True, **options), kernel


@LINUX
@pytest.mark.parametrize("policy", ["progressive", "end"])
def test_ranges_are_rounded_inward_and_counted_once(policy):
    dead = [(100, 3 * PAGE + 50), (5 * PAGE, 7 * PAGE), (8 * PAGE + 1, 9 * PAGE + 4095)]
    reclaim, kernel = reclaimer(policy, dead)
    for tensor in dead:
        reclaim.behind(tensor, *tensor)
        reclaim.finished(tensor)
    reclaim.at_end()
    assert reclaim.reclaimed == 2 * PAGE + 2 * PAGE
    assert set(kernel.calls) == {(PAGE, 3 * PAGE), (5 * PAGE, 7 * PAGE)}


@LINUX
def test_only_dead_tensors_are_dropped():
    reclaim, kernel = reclaimer("progressive", [(0, 4 * PAGE)])
    reclaim.behind((4 * PAGE, 8 * PAGE), 4 * PAGE, 8 * PAGE)
    reclaim.finished((4 * PAGE, 8 * PAGE))
    assert not kernel.calls
    assert reclaim.reclaimed == 0


@LINUX
def test_a_slice_drops_what_lies_before_it_within_its_own_tensor():
    tensor = (10 * PAGE + 7, 10 * PAGE + 3 * FOLIO_BYTES)
    reclaim, kernel = reclaimer("progressive", [tensor])
    reclaim.behind(tensor, tensor[0], tensor[0] + FOLIO_BYTES)
    reclaim.behind(tensor, tensor[0] + 2 * FOLIO_BYTES, tensor[1])
    assert kernel.calls == [
        (11 * PAGE, 10 * PAGE + FOLIO_BYTES),
        (10 * PAGE + FOLIO_BYTES, 10 * PAGE + 3 * FOLIO_BYTES),
    ]


@LINUX
def test_reading_in_place_drops_dead_neighbours():
    far, left, right = (
        (0, PAGE),
        (4 * FOLIO_BYTES, 5 * FOLIO_BYTES),
        (5 * FOLIO_BYTES + PAGE, 5 * FOLIO_BYTES + 3 * PAGE),
    )
    reclaim, kernel = reclaimer("progressive", [far, left, right])
    reclaim.beside((5 * FOLIO_BYTES, 5 * FOLIO_BYTES + PAGE))
    assert kernel.calls == [(4 * FOLIO_BYTES, 5 * FOLIO_BYTES), right]


@LINUX
def test_one_failure_one_warning_and_the_load_goes_on():
    dead = [(i * PAGE, (i + 1) * PAGE) for i in range(5)]
    reclaim, kernel = reclaimer("end", dead, fail_at=2)
    reclaim.at_end()
    assert reclaim.reclaimed == 2 * PAGE == len(kernel.calls) * PAGE
    assert len(reclaim.warnings) == 1
    assert "madvise failed" in reclaim.warnings[0]


def test_never_means_never_and_other_systems_say_so():
    reclaim = Reclaimer(Kernel(), "never", [(0, PAGE)], supported=True)
    reclaim.at_end()
    assert not reclaim.warnings
    reclaim = Reclaimer(Kernel(), "progressive", [(0, PAGE)], supported=False)
    reclaim.behind((0, PAGE), 0, PAGE)
    reclaim.finished((0, PAGE))
    reclaim.at_end()
    assert reclaim.reclaimed == 0
    assert "no way to drop pages" in reclaim.warnings[0]


# Memory, measured in a process of its own.

CHILD = """
import sys, json, refimpl
path, reclaim, prefetch = sys.argv[1:]
options = {"reclaim": reclaim, "prefetch": prefetch == "yes", "threads": 2, "restart_peak": True}
model = refimpl.load(path, cpu="x86-avx2", **options)
print(json.dumps(model.report.to_json()))
"""


@LINUX
@pytest.mark.parametrize("prefetch", ["no", "yes"])
@pytest.mark.parametrize("reclaim", ["progressive", "end", "never"])
def test_memory_after_and_at_the_peak(tmp_path, outside, reclaim, prefetch):
    path = tmp_path / "m.gguf"
    tensors = {
        "token_embd.weight": ("q8_0", (1024, 16384)),
        "output_norm.weight": ("f32", (1024,)),
        "output.weight": ("q4_0", (1024, 65536)),
        **{f"blk.{i}.attn_norm.weight": ("f32", (1024,)) for i in range(4)},
        **{f"blk.{i}.ffn_up.weight": ("q4_0", (1024, 16384)) for i in range(4)},
    }
    write_model(path, dict(sorted(tensors.items())))
    mib = 2**20
    command = [sys.executable, "-c", CHILD, str(path), reclaim, prefetch]
    result = subprocess.run(command, env=outside, capture_output=True, text=True, check=True, cwd=tmp_path)
    report = json.loads(result.stdout)
    before, after, peak = report["rss"]["before"], report["rss"]["after"], report["peak"]["total"]
    repacked = report["repacked"]["bytes"]
    assert repacked > 70 * mib
    resident = report["in_place_bytes"] if prefetch == "yes" else 0
    kept = repacked if reclaim == "never" else 0
    extra = after["total"] - before["total"] - repacked - resident - kept
    assert -mib < extra < 16 * mib
    assert after["anon"] - before["anon"] >= repacked
    if reclaim == "progressive":
        assert peak - after["total"] < 16 * mib
    elif reclaim == "end":
        assert peak - after["total"] > repacked - 16 * mib


@LINUX
def test_own_counters():
    rss = current_rss()
    assert rss.total == rss.anon + rss.file
    assert 10 * 2**20 < rss.total <= peak_rss()


def test_counters_without_proc(tmp_path):
    assert current_rss(tmp_path / "nothing").total > 2**20
    assert peak_rss(tmp_path / "nothing") > 2**20


@pytest.mark.model
@LINUX
def test_gemma(gemma):
    with refimpl.load(gemma, cpu="x86-avx512", reclaim="end") as model:
        report = model.report
        assert (report.repacked_tensors, report.repacked_bytes) == (27, 13271040)
        assert abs(report.reclaimed_bytes - 12852 * 1024) <= 27 * 2 * mmap.PAGESIZE
        assert report.buffers == {"CPU_Mapped": 246587904, "CPU_REPACK": 13271040}
        assert report.warnings == []
        digest = hashlib.sha256("".join(f"{k} {v}\n" for k, v in model.digests().items()).encode()).hexdigest()
        first = model["blk.0.attn_output.weight"]
        with open(gemma, "rb") as file, refimpl.open(gemma) as header:
            info = header.tensor(first.name)
            file.seek(info.absolute_offset)
            source = file.read(info.nbytes)
    assert np.array_equal(first.data, repack(source, "q4_K", "q4_K_8x8", info.shape, version="clear"))
    with refimpl.load(gemma, cpu="x86-avx2") as model:
        again = hashlib.sha256("".join(f"{k} {v}\n" for k, v in model.digests().items()).encode()).hexdigest()
    assert digest == again
