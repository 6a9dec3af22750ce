"""Records of a file that begin with a name: key-value pairs and tensor infos (specification: gguf.md 2.5, 2.7, 5).

As long as there are few, each is an object. Beyond `FEW` only the place of every 16th and a 4-byte mark of each name
are kept, and a record is read again when somebody asks for it: a file of very many tiny records costs less memory
than its own size, and opening it is linear in that size.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from refimpl.errors import GGUFError
from refimpl.gguf.cursor import Cursor, Read, cstr, shown, text
from refimpl.units import KIB

FEW = 1 << 14
"""Up to this many records are kept as objects; real models have some hundred keys and some thousand tensors."""
_STRIDE = 16
_WINDOW = 16 * KIB
_MARK, _HASH = 2**32 - 1, 2**64 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """How one sort of record is read: its name, with the rules for names, and then the rest of it.

    `what` is "key" or "tensor", `repeated` the code for a name that was there before. `rest(cursor, name, start)`
    makes the record; `start` is the byte position where it begins. `name_of` finds the name in a record.
    """

    what: str
    repeated: str
    name: Callable[[Cursor], bytes]
    rest: Callable[[Cursor, bytes, int], T]
    name_of: Callable[[T], bytes]


class Records(Sequence[T]):
    """Records in file order. A record that has to be read again and is gone by then is GGUFError E_TRUNCATED."""

    __slots__ = ("_by_name", "_count", "_form", "_items", "_marks", "_places", "_read", "_size")

    def __init__(self, read: Read, size: int, form: Form[T]) -> None:
        self._read, self._size, self._form = read, size, form
        self._count = 0
        self._items: list[T] | None = []
        self._by_name: dict[bytes, T] | None = None
        self._places = array("Q")
        self._marks = array("I")

    @classmethod
    def read_from(cls, cursor: Cursor, count: int, form: Form[T]) -> Records[T]:
        """The next `count` records; the cursor stands behind them afterwards.

        A repeated name is an error before the rest of its record is read. Among many records repeats are found at
        the end, or when another rule is broken: the first broken rule in reading order is the one that is raised.
        """
        self = cls(cursor.read, cursor.size, form)
        seen: set[bytes] = set()
        hashes = array("Q")
        try:
            for _ in range(count):  # whatever the count says: every record takes bytes, and the file ends
                cursor.subject = {}
                start = cursor.pos
                name = form.name(cursor)
                cursor.subject = {form.what: shown(name)}
                if self._items is not None and name in seen:
                    self._fail_repeated(cursor, start)
                self._note(name, start)
                hashes.append(hash(name) & _HASH)
                item = form.rest(cursor, name, start)
                if self._items is not None:
                    seen.add(name)
                    self._items.append(item)
                    if len(self._items) > FEW:
                        self._items = None
                        seen.clear()
        except GGUFError:
            self._check_repeats(cursor, hashes)
            raise
        self._check_repeats(cursor, hashes)
        cursor.subject = {}
        return self

    @property
    def few(self) -> bool:
        """Whether the records are kept as objects."""
        return self._items is not None

    def find(self, name: bytes) -> T | None:
        """The first record of that name, both cut at the first NUL as the real programs do."""
        wanted = cstr(name)
        if self._items is not None:
            if self._by_name is None:
                self._by_name = {}
                for item in self._items:
                    self._by_name.setdefault(cstr(self._form.name_of(item)), item)
            return self._by_name.get(wanted)
        position, mark = -1, hash(wanted) & _MARK
        while True:
            try:
                position = self._marks.index(mark, position + 1)
            except ValueError:
                return None
            item = self[position]
            if cstr(self._form.name_of(item)) == wanted:
                return item

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return iter(self._items) if self._items is not None else self._walk(0)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if self._items is not None:
            return self._items[index]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        index = operator.index(index)
        if not -self._count <= index < self._count:
            raise IndexError(f"record {index} of {self._count}")
        return next(self._walk(index % self._count))

    def _note(self, name: bytes, start: int) -> None:
        if self._count % _STRIDE == 0:
            self._places.append(start)
        self._marks.append(hash(cstr(name)) & _MARK)
        self._count += 1

    def _names(self, first: int = 0) -> Iterator[tuple[Cursor, bytes, int]]:
        """A cursor behind each name in turn, the name, and where its record begins. Whoever goes on reads the rest."""
        cursor = Cursor(self._read, self._size, self._places[first // _STRIDE], window=_WINDOW)
        for number in range(first - first % _STRIDE, self._count):
            start = cursor.pos
            name = self._form.name(cursor)
            if number >= first:
                yield cursor, name, start
            else:
                self._form.rest(cursor, name, start)

    def _walk(self, first: int) -> Iterator[T]:
        for cursor, name, start in self._names(first):
            yield self._form.rest(cursor, name, start)

    def _check_repeats(self, cursor: Cursor, hashes: array[int]) -> None:
        """Raise for the first repeated name among many; of the last record only the name need be readable."""
        if self._items is not None:
            return
        import numpy as np  # only hostile files get here

        values = np.frombuffer(hashes, np.uint64)
        values.sort()
        twice = np.unique(values[1:][values[1:] == values[:-1]])
        if not twice.size:
            return
        before = np.zeros(twice.size, np.uint64)  # where a name of each of these hashes was first, 0 for not yet
        for number, (walker, name, start) in enumerate(self._names()):
            value = hash(name) & _HASH
            slot = int(np.searchsorted(twice, np.uint64(value)))
            if slot < twice.size and twice[slot] == value:
                if not before[slot]:
                    before[slot] = start
                elif self._form.name(Cursor(self._read, self._size, int(before[slot]), window=_WINDOW)) == name:
                    cursor.subject = {self._form.what: shown(name)}
                    self._fail_repeated(cursor, start)
            if number < self._count - 1:
                self._form.rest(walker, name, start)

    def _fail_repeated(self, cursor: Cursor, start: int) -> None:
        what = self._form.what
        cursor.fail(self._form.repeated, f"a {what} name that was there before", offset=start, field=f"{what} name")


def find_named(find: Callable[[bytes], T | None], items: Sequence[T], name_of: Callable[[T], bytes],
               name: str | bytes) -> T | None:  # fmt: skip
    """The first item of that name; a str that is no item's exact name also finds what it is displayed as."""
    found = find(name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape"))
    if found is None and isinstance(name, str) and "\ufffd" in name:
        found = next((item for item in items if text(cstr(name_of(item))) == name), None)
    return found
