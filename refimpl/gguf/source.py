"""Where headers come from: a path or address, a split set, an open file, bytes, or the name of a packaged model.

This is where gguf/ meets the machine; the parser itself sees only a `read` function and a size.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from threading import Lock
from typing import Any, BinaryIO, TypeAlias

from refimpl.errors import ClosedError, OpenError, RefimplError, UsageError
from refimpl.gguf.files import coded, file_identity
from refimpl.gguf.header import Header, check_dialect, parse_header
from refimpl.gguf.packaged import PACKAGED, packaged_model
from refimpl.gguf.remote import RemoteReader, is_address
from refimpl.gguf.split import EachShard, find_split, first_shard, whole_set
from refimpl.types import Dialect

OneSource: TypeAlias = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview
Source: TypeAlias = OneSource | list[str] | tuple[str, ...]


def open_header(
    source: Source,
    *,
    dialect: Dialect | None = None,
    allow_gaps: bool = False,
    partial: bool = False,
    any_shard: bool = True,
    each_shard: EachShard | None = None,
) -> Header:
    """Read the header of a model: everything but its weights.

    Parameters
    ----------
    source
        A path, an http(s) address, an open binary file (its position is left as it is), bytes, or the name of a
        packaged model such as "gemma3-270m" (a file of that name: "./gemma3-270m"). A model that is split into
        several files comes as one header; for it `source` is the path or address of any of them, a pattern that fits
        them, what their names begin with, or a list of all paths in order, whose names are free then. An open file
        or bytes of a shard are read as that one file.
    dialect, allow_gaps, partial
        See `refimpl.gguf.header.parse_header`. With `partial`, a file that ends right behind its header will do.
    any_shard
        False: only the first shard opens a split set, as in the real programs (E_SPLIT_FIRST).
    each_shard
        Called with the header of each file before the next one is opened; what it raises ends the reading.

    Returns
    -------
    Header
        Keeps the source readable for array elements until it is closed or dropped. Files that the caller opened are
        never closed here.

    Raises
    ------
    GGUFError
        A file breaks a rule of the container (specification: gguf.md 2).
    ModelError
        The files do not make a split set (specification: gguf.md 7).
    OpenError
        E_OPEN: nothing there, or no regular file.
    MachineError
        E_PERMISSION, E_IO, E_REMOTE.
    """
    check_dialect(dialect, allow_gaps)

    def one(item: OneSource) -> Header:
        reader = _reader(item)
        path = os.fsdecode(reader.path) if reader.path is not None else None
        try:
            return parse_header(reader, reader.size, dialect=dialect, allow_gaps=allow_gaps, partial=partial, path=path)
        except BaseException:
            reader.close()
            raise

    names = [os.fspath(name) for name in source] if isinstance(source, list | tuple) else None
    if names == []:
        raise UsageError("E_USAGE", "an empty list of files")
    header = one(names[0] if names else source)  # type: ignore[arg-type]
    # What follows the path in an address holds for its neighbours too.
    query = "?" + source.partition("?")[2] if isinstance(source, str) and is_address(source) and "?" in source else ""

    def sibling(name: str) -> Header:
        return one(name + query)

    try:
        path = header.shards[0].path
        if path is None and names is None:
            if each_shard is not None:
                each_shard(header)
            return header
        if names is None and path is not None and any_shard:
            header = first_shard(header, path, sibling)
        return whole_set(header, names or header.shards[0].path or "", sibling, each_shard)
    except BaseException:
        header.close()
        raise


class FileReader:
    """`read(offset, length)` of an open file. One opened by us is closed with its last user, or by `close`."""

    def __init__(self, file: Any, size: int, *, owned: bool, path: str | bytes | None = None) -> None:
        self.size = size
        """Bytes of the file when it was opened."""
        self.identity = file_identity(file.fileno()) if owned else None
        """What tells this file from another one of the same name."""
        self.path = path
        """The path that it was opened by, if it was opened here."""
        self._file = file
        self._lock = Lock()
        self._closing = weakref.finalize(self, file.close) if owned else None
        # A positioned read leaves the file's own position alone and needs no lock. It reads the file below, so it
        # serves only where nothing lies in between (a decompressor, say, or bytes not yet written out).
        raw = getattr(file, "raw", file) if isinstance(file, io.BufferedReader) else file
        self._positioned = hasattr(os, "pread") and isinstance(raw, io.FileIO)

    def __call__(self, offset: int, length: int) -> bytes:
        if getattr(self._file, "closed", False):
            raise ClosedError("E_CLOSED", "the file behind this header was closed")
        try:
            return self._read(offset, length)
        except OSError as error:
            raise coded(error, "cannot read the model") from error

    def _read(self, offset: int, length: int) -> bytes:
        if self._positioned:
            fd = self._file.fileno()
            data = os.pread(fd, length, offset)
            while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
                data += more
            return data
        with self._lock:
            before = self._file.tell()
            try:
                self._file.seek(offset)
                data = b""
                while len(data) < length and (more := self._file.read(length - len(data))):
                    data += more
                return data
            finally:
                self._file.seek(before)

    def close(self) -> None:
        """Close the file if it was opened by us; array elements can no longer be read."""
        if self._closing is not None:
            self._closing()


class BytesReader:
    """`read(offset, length)` of bytes in memory, which cannot change their size until `close`."""

    path = None

    def __init__(self, view: memoryview) -> None:
        self.size = view.nbytes
        self._view = view.cast("B") if view.nbytes else memoryview(b"")  # no shape with a zero in it can be cast

    def __call__(self, offset: int, length: int) -> bytes:
        try:
            return bytes(self._view[offset : offset + length])
        except ValueError:
            raise ClosedError("E_CLOSED", "the header of these bytes was closed") from None

    def close(self) -> None:
        """Let the bytes go; array elements can no longer be read."""
        self._view.release()


def _reader(source: OneSource) -> FileReader | BytesReader | RemoteReader:
    if isinstance(source, str) and is_address(source):
        return RemoteReader(source)
    if isinstance(source, str | os.PathLike):
        return _open_path(packaged_model(source) if isinstance(source, str) and source in PACKAGED else source)
    try:
        return BytesReader(memoryview(source))  # type: ignore[arg-type]
    except TypeError:  # not bytes-like
        if not (hasattr(source, "read") and hasattr(source, "seek")) or isinstance(source, io.TextIOBase):
            raise TypeError(f"a path, a binary file or bytes, not {type(source).__name__}") from None
        return _adopt(source)


def _open_path(path: str | os.PathLike[str]) -> FileReader:
    shown = repr(os.fspath(path))
    try:
        # Asked before it is opened: opening a pipe would wait for its other end.
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            path = find_split(os.fsdecode(path))
            mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise OpenError("E_OPEN", f"{shown} is not a regular file")
        file = io.FileIO(path, "rb")
        return FileReader(file, os.fstat(file.fileno()).st_size, owned=True, path=os.fspath(path))
    except RefimplError:
        raise
    except ValueError as error:  # a NUL, or what the file system's encoding cannot hold
        raise OpenError("E_OPEN", f"{shown} cannot be a path: {error}") from error
    except OSError as error:
        raise coded(error, f"cannot open {shown}") from error


def _adopt(file: Any) -> FileReader:
    """A file that the caller opened, and closes."""
    try:
        before = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(before)
    except OSError as error:  # io.UnsupportedOperation is one
        raise OpenError("E_OPEN", f"the open file cannot be positioned: {error}") from error
    return FileReader(file, size, owned=False)
