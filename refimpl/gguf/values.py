"""Keys and values of a GGUF file (specification: gguf.md 1, 2.5 and 5).

Scalars and strings are read at once. Arrays are not: a scalar array is remembered by its place, a string array is
walked once and remembered by the place of every 256th string. Elements are read when somebody asks for them.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, overload

from refimpl.errors import RefimplError
from refimpl.gguf.cursor import I32, U64, Cursor, Read, cstr, text
from refimpl.gguf.records import Form, Records, find_named
from refimpl.units import KIB

ARRAY_LIMIT = 1 << 30
"""The longest array that the real reader takes, in elements."""
_STRIDE = 256
_WINDOW = 8 * KIB


class ValueType(IntEnum):
    """The value types of a key; `name` in small letters is what recipes and vectors call them."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STR = 8
    ARR = 9
    U64 = 10
    I64 = 11
    F64 = 12


# A bool is one byte, and any byte but zero is true: what "?" means in the standard layout of struct.
CODECS: dict[ValueType, struct.Struct] = {
    kind: struct.Struct("<" + letter) for kind, letter in zip(ValueType, "BbHhIif?  Qqd", strict=True) if letter != " "
}
"""How one scalar of each type is packed; strings and arrays have no fixed size and are not in the table."""

Element: TypeAlias = int | float | str
Value: TypeAlias = "int | float | bytes | LazyArray"


class KeyMissing(RefimplError, KeyError):
    """E_KEY_MISSING: no such key."""


class LazyArray(Sequence[Element]):
    """An array value that stays in the file; elements are read when asked for.

    Strings come as text, decoded with replacement; `raw` gives the bytes as they are. A slice is a list.
    If the file has shrunk meanwhile, asking for an element that is gone is GGUFError E_TRUNCATED.

    Attributes: `element_type`, `offset` (byte position of the first element in the file).
    """

    __slots__ = ("_count", "_read", "_size", "_starts", "element_type", "offset")

    def __init__(
        self, read: Read, size: int, *, element_type: ValueType, count: int, offset: int, starts: Sequence[int]
    ) -> None:
        self.element_type, self.offset = element_type, offset
        self._read, self._size, self._count, self._starts = read, size, count, starts

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Element]:
        return self._elements(0, self._count)

    @overload
    def __getitem__(self, index: int) -> Element: ...
    @overload
    def __getitem__(self, index: slice) -> list[Element]: ...
    def __getitem__(self, index: int | slice) -> Element | list[Element]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return list(self._elements(start, stop)) if step == 1 else [self[i] for i in range(start, stop, step)]
        return self._decode(self.raw(index))

    def raw(self, index: int) -> bytes:
        """The bytes of one element: of a string without its length, of a scalar as they are in the file."""
        index = operator.index(index)
        if not -self._count <= index < self._count:
            raise IndexError(f"element {index} of an array of {self._count}")
        return next(self._raws(index % self._count, index % self._count + 1))

    def raws(self) -> Iterator[bytes]:
        """The bytes of every element in turn, as `raw` gives them."""
        return self._raws(0, self._count)

    def packed(self) -> Iterator[bytes]:
        """The elements as they lie in the file, strings with their lengths, in pieces of up to a window."""
        if self.element_type is not ValueType.STR:
            end = self.offset + self._count * CODECS[self.element_type].size
        elif self._count:
            last = (self._count - 1) // _STRIDE
            cursor = Cursor(self._read, self._size, self._starts[last], window=_WINDOW)
            cursor.skip_strings(self._count - last * _STRIDE, "array element")
            end = cursor.pos
        else:
            end = self.offset
        cursor = Cursor(self._read, self._size, self.offset, window=_WINDOW)
        for start in range(self.offset, end, _WINDOW):
            yield cursor.take(min(_WINDOW, end - start), "array element")

    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        """First position of `value`, found in one pass. ValueError if it is not there."""
        start, stop, _ = slice(start, stop).indices(self._count)
        for position, element in enumerate(self._elements(start, stop), start):
            if element == value:
                return position
        raise ValueError(f"{value!r} is not in the array")

    def __repr__(self) -> str:
        return f"<array of {self._count} {self.element_type.name.lower()} at byte {self.offset}>"

    def _decode(self, raw: bytes) -> Element:
        if self.element_type is ValueType.STR:
            return text(raw)
        value: Element = CODECS[self.element_type].unpack(raw)[0]
        return value

    def _elements(self, start: int, stop: int) -> Iterator[Element]:
        return map(self._decode, self._raws(start, stop))

    def _raws(self, start: int, stop: int) -> Iterator[bytes]:
        """Elements start..stop-1 as bytes, in one pass over the file."""
        if start >= stop:
            return
        if self.element_type is ValueType.STR:
            cursor = Cursor(self._read, self._size, self._starts[start // _STRIDE], window=_WINDOW)
            cursor.skip_strings(start % _STRIDE, "array element")
            for _ in range(start, stop):
                yield cursor.string("array element")
        else:
            width = CODECS[self.element_type].size
            cursor = Cursor(self._read, self._size, self.offset + start * width, window=_WINDOW)
            for _ in range(start, stop):
                yield cursor.take(width, "array element")


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One pair as it stands in the file: `offset` is its byte position, a string value is kept as bytes."""

    key: bytes
    type: ValueType
    value: Value
    offset: int

    @property
    def cstr(self) -> bytes:
        """A string value as a C program sees it, up to the first NUL; nothing for other types."""
        return cstr(self.value) if isinstance(self.value, bytes) else b""


class KeyValues(Mapping[str, "int | float | str | LazyArray"]):
    """The pairs of a file by key, looked up as the real programs do: names end at the first NUL, the first hit wins.

    Strings come as text; the bytes are behind `raw` and `items_raw`.
    """

    __slots__ = ("_records",)

    def __init__(self, records: Records[KeyValue]) -> None:
        self._records = records

    def find(self, key: str | bytes) -> KeyValue | None:
        """The pair as it stands in the file, or None."""
        return find_named(self._records.find, self._records, _key_of, key)

    def raw(self, key: str | bytes) -> KeyValue:
        """The pair as it stands in the file. KeyMissing (a KeyError) if there is none."""
        pair = self.find(key)
        if pair is None:
            raise KeyMissing("E_KEY_MISSING", f"no key {key!r}", key=key)
        return pair

    def items_raw(self) -> Sequence[KeyValue]:
        """Every pair in file order, those included that a look-up never finds."""
        return self._records

    def __getitem__(self, key: str) -> int | float | str | LazyArray:
        value = self.raw(key).value
        return text(value) if isinstance(value, bytes) else value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | bytes) and self.find(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(text(cstr(pair.key)) for pair in self._records))

    def __len__(self) -> int:
        return len({text(cstr(pair.key)) for pair in self._records})

    def __repr__(self) -> str:
        return f"<{len(self._records)} keys>"


def _key_of(pair: KeyValue) -> bytes:
    return pair.key


def _read_key(cursor: Cursor) -> bytes:
    start = cursor.pos
    key = cursor.string("key")
    if not key:
        cursor.fail("E_KEY_EMPTY", "an empty key", offset=start, field="key")
    return key


def _read_pair(cursor: Cursor, key: bytes, start: int) -> KeyValue:
    return KeyValue(key, *_read_value(cursor), start)


_PAIRS = Form("key", "E_KEY_DUPLICATE", _read_key, _read_pair, _key_of)


def read_key_values(cursor: Cursor, count: int) -> KeyValues:
    """Step 5 of the reading order: `count` pairs.

    Raises
    ------
    GGUFError
        E_KEY_EMPTY, E_KEY_DUPLICATE, E_KV_TYPE, E_STRING_LIMIT, E_TRUNCATED.
    """
    return KeyValues(Records.read_from(cursor, count, _PAIRS))


def _read_value(cursor: Cursor) -> tuple[ValueType, Value]:
    kind = cursor.number(I32, "value type")
    if kind != ValueType.ARR:
        scalar = _known(cursor, kind, cursor.pos - 4)
        if scalar is ValueType.STR:
            return scalar, cursor.string("value")
        codec = CODECS[scalar]
        return scalar, codec.unpack(cursor.take(codec.size, "value"))[0]

    element = cursor.number(I32, "element type")
    count = cursor.number(U64, "array count")
    element_type = _known(cursor, element, cursor.pos - 12)  # after the count: a count cut off wins
    if element_type is ValueType.ARR:
        cursor.fail("E_KV_TYPE", "an array of arrays", offset=cursor.pos - 12, field="element type", found=element)
    smallest = CODECS[element_type].size if element_type in CODECS else U64.size
    left = cursor.size - cursor.pos
    if count > ARRAY_LIMIT or count * smallest > left:
        cursor.fail(
            "E_TRUNCATED",
            f"an array of {count} elements of at least {smallest} bytes, where {left} bytes are left",
            offset=cursor.pos - 8, field="array count", expected=min(ARRAY_LIMIT, left // smallest), found=count,
        )  # fmt: skip
    start, starts = cursor.pos, array("Q")
    if element_type is ValueType.STR:
        for first in range(0, count, _STRIDE):
            starts.append(cursor.pos)
            cursor.skip_strings(min(_STRIDE, count - first), "array element")
    else:
        cursor.skip(count * smallest, "array elements")
    value = LazyArray(cursor.read, cursor.size, element_type=element_type, count=count, offset=start, starts=starts)
    return ValueType.ARR, value


def _known(cursor: Cursor, kind: int, offset: int) -> ValueType:
    try:
        return ValueType(kind)
    except ValueError:
        cursor.fail("E_KV_TYPE", f"value type {kind}", offset=offset, field="value type", found=kind)
