"""A position that moves forward through a file, read in windows (specification: gguf.md 1 and 2, "string rule").

Nothing here opens anything: the bytes come from a `read(offset, length)` callable, which may return fewer bytes than
asked for only at the end of the file. A length found in the file is compared with the bytes left before it is used,
so that neither memory nor time ever depends on what a file merely claims.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NoReturn

from refimpl.errors import GGUFError
from refimpl.units import KIB

Read = Callable[[int, int], bytes]
"""`read(offset, length)`: the bytes of the file at `offset` (both in bytes), fewer than `length` only at its end."""

I32, U32, I64, U64 = (struct.Struct("<" + letter) for letter in "iIqQ")
STRING_LIMIT = 1 << 30
"""The longest string that the real reader takes, in bytes."""

SHOWN = 256
"""Bytes of a name that errors repeat."""

_u64_at = U64.unpack_from


def cstr(name: bytes) -> bytes:
    """`name` as a C program sees it: up to the first NUL (specification: gguf.md 5)."""
    return name.partition(b"\0")[0]


def text(name: bytes) -> str:
    """`name` for people: UTF-8 with replacement, so that decoding never fails."""
    return name.decode("utf-8", "replace")


def shown(name: bytes) -> str:
    """`name` for error messages and fields: a hostile one may be as long as the file."""
    return text(name[:SHOWN])


class Cursor:
    """Reads a file field by field.

    Attributes: `pos` (the read position in bytes), `size` (of the file in bytes), `subject` (the key or the tensor
    that is being read, as error fields). `window` is how many bytes one read asks for even when fewer are needed.
    """

    __slots__ = ("_base", "_bytes", "_window", "pos", "read", "size", "subject")

    def __init__(self, read: Read, size: int, pos: int = 0, *, window: int = 256 * KIB) -> None:
        self.read, self.size, self.pos = read, size, pos
        self.subject: dict[str, str] = {}
        self._window = window
        self._base, self._bytes = pos, b""

    def fail(self, code: str, message: str, *, offset: int, **fields: object) -> NoReturn:
        """Raise a GGUFError about the field at byte `offset`, naming the current subject."""
        about = "".join(f"{kind} {name[:60]!r}: " for kind, name in self.subject.items())
        raise GGUFError(code, f"{about}{message} (byte {offset})", offset=offset, **self.subject, **fields)

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes. GGUFError E_TRUNCATED if the file ends before."""
        start = self.pos - self._base
        if start + length > len(self._bytes):
            self._need(length, what)
            self._fill(max(length, self._window))
            start = 0
            if len(self._bytes) < length:  # the file has shrunk since its size was taken
                self._truncated(length, len(self._bytes), what)
        self.pos += length
        return self._bytes[start : start + length]

    def number(self, codec: struct.Struct, what: str) -> int:
        """The next integer. GGUFError E_TRUNCATED."""
        value: int = codec.unpack(self.take(codec.size, what))[0]
        return value

    def skip(self, length: int, what: str) -> None:
        """Move past `length` bytes without reading them. GGUFError E_TRUNCATED if the file ends before."""
        self._need(length, what)
        self.pos += length

    def string(self, what: str) -> bytes:
        """The next string's bytes. GGUFError E_STRING_LIMIT above 2^30 bytes, E_TRUNCATED."""
        return self.take(self._string_length(what), what)

    def skip_strings(self, count: int, what: str) -> None:
        """Move past `count` strings; errors as in `string`.

        The quick way succeeds only if all of them lie inside the window, where no length can break a rule;
        whatever is left over is walked one by one with every check.
        """
        if self._leap(count):
            return
        self._fill(self._window)
        if not self._leap(count):
            for _ in range(count):
                self.skip(self._string_length(what), what)

    def _leap(self, count: int) -> bool:
        """Move past `count` strings if they all end inside the window."""
        data, p, u64_at = self._bytes, self.pos - self._base, _u64_at
        try:
            for _ in range(count):
                p += 8 + u64_at(data, p)[0]
        except (struct.error, OverflowError):  # a length field outside the window, or outside of any memory
            return False
        if p > len(data):
            return False
        self.pos = self._base + p
        return True

    def _string_length(self, what: str) -> int:
        length = self.number(U64, f"length of the {what}")
        if length > STRING_LIMIT:
            self.fail(
                "E_STRING_LIMIT",
                f"the {what} claims {length} bytes, more than {STRING_LIMIT}",
                offset=self.pos - 8, field=what, expected=STRING_LIMIT, found=length,
            )  # fmt: skip
        return length

    def _fill(self, length: int) -> None:
        """Let the window begin at the read position, with up to `length` bytes."""
        self._base, self._bytes = self.pos, b""  # the old window goes before the new one comes
        self._bytes = self.read(self.pos, min(length, self.size - self.pos))

    def _need(self, length: int, what: str) -> None:
        if length > self.size - self.pos:
            self._truncated(length, self.size - self.pos, what)

    def _truncated(self, length: int, left: int, what: str) -> NoReturn:
        self.fail(
            "E_TRUNCATED",
            f"the file ends inside the {what}: {length} bytes wanted, {left} left",
            offset=self.pos, field=what, expected=length, found=left,
        )  # fmt: skip
