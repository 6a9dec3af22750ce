"""Where headers come from: a path, an open file, bytes, or the name of a packaged model.

This is where gguf/ meets the machine; the parser itself sees only a `read` function and a size.
"""

from __future__ import annotations

import io
import os
import stat
import weakref
from threading import Lock
from typing import Any, BinaryIO, TypeAlias

from refimpl.errors import ClosedError, OpenError
from refimpl.gguf.files import coded
from refimpl.gguf.header import Header, parse_header
from refimpl.gguf.packaged import PACKAGED, packaged_model
from refimpl.types import Dialect

Source: TypeAlias = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview


def open_header(source: Source, *, dialect: Dialect | None = None) -> Header:
    """Read the header of a model: everything but its weights.

    Parameters
    ----------
    source
        A path, an open binary file (its position is left as it is), bytes, or the name of a packaged model such as
        "gemma3-270m" (a file of that name: "./gemma3-270m").
    dialect
        Whose tensor types to know; see `refimpl.gguf.header.parse_header`.

    Returns
    -------
    Header
        Keeps the source readable for array elements until it is closed or dropped. Files that the caller opened are
        never closed here.

    Raises
    ------
    GGUFError
        The file breaks a rule of the container (specification: gguf.md 2).
    OpenError
        E_OPEN: nothing there, or no regular file.
    MachineError
        E_PERMISSION, E_IO.
    """
    reader = _reader(source)
    try:
        return parse_header(reader, reader.size, dialect=dialect)
    except BaseException:
        reader.close()
        raise


class FileReader:
    """`read(offset, length)` of an open file. One opened by us is closed with its last user, or by `close`."""

    def __init__(self, file: Any, size: int, *, owned: bool) -> None:
        self.size = size
        """Bytes of the file when it was opened."""
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


def _reader(source: Source) -> FileReader | BytesReader:
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
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OpenError("E_OPEN", f"{shown} is not a regular file")
        file = io.FileIO(path, "rb")
        return FileReader(file, os.fstat(file.fileno()).st_size, owned=True)
    except ValueError as error:  # a NUL, or what the file system's encoding cannot hold
        raise OpenError("E_OPEN", f"{shown} cannot be a path: {error}") from error
    except OpenError:
        raise
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
