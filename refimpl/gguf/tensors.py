"""Tensor infos: the part of a header that says what the weights are (specification: gguf.md 2.7, 2.9 and 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn, overload

from refimpl.errors import RefimplError
from refimpl.gguf.cursor import I32, I64, U32, U64, Cursor, cstr, shown, text
from refimpl.gguf.records import FEW, Form, Records, find_named
from refimpl.types import REMOVED_IDS, Dialect, TensorType, UnknownType, type_by_id
from refimpl.units import pad

MAX_DIMS = 4
MAX_NAME = 64
"""Names must be shorter than this, in bytes: the real programs keep them in 64 bytes with a NUL."""
_I64_MAX, _U64_MAX = 2**63 - 1, 2**64 - 1


class TensorMissing(RefimplError, LookupError):
    """E_TENSOR_MISSING: no tensor of that name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    `shape` is as in the file: fastest dimension first, at most four, none for a single element. `offset` is relative
    to the data section, `absolute_offset` to the file, both in bytes. `nbytes` is None if nobody knows the type.
    `name` is what the real programs see (up to the first NUL, decoded with replacement), `raw_name` what is there.
    `shard` is the number of the file of a split set that it stands in, from 0.
    """

    name: str
    raw_name: bytes
    type: TensorType | UnknownType
    shape: tuple[int, ...]
    offset: int
    absolute_offset: int
    nbytes: int | None
    shard: int = 0

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """The shape with all four sizes; missing ones are 1."""
        a, b, c, d = self.shape + (1,) * (MAX_DIMS - len(self.shape))
        return a, b, c, d

    @property
    def rows(self) -> int:
        """How many rows of `ne[0]` elements the tensor has."""
        _, b, c, d = self.ne
        return b * c * d


class Info(NamedTuple):
    """A tensor before the data start is known; `position` is where its offset field stands in the file."""

    name: bytes
    type: TensorType | UnknownType
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int
    position: int


class Part(NamedTuple):
    """The tensors of one file, and where its data section begins."""

    infos: Records[Info]
    data_start: int


class Tensors(Sequence[TensorInfo]):
    """The tensors of a model in file order, shard after shard; objects made once if they are few."""

    __slots__ = ("_by_name", "_few", "parts")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._few: tuple[TensorInfo, ...] | None = None
        self._by_name: dict[bytes, TensorInfo] = {}
        if len(self) <= FEW and all(part.infos.few for part in self.parts):
            self._few = tuple(self._walk())
            for tensor in self._few:
                self._by_name.setdefault(cstr(tensor.raw_name), tensor)

    def find(self, name: str | bytes) -> TensorInfo | None:
        """The first tensor of that name, compared as C strings."""
        return find_named(self._find_exact, self, _raw_name_of, name)

    def _find_exact(self, name: bytes) -> TensorInfo | None:
        if self._few is not None:
            return self._by_name.get(cstr(name))
        hits = ((shard, part, part.infos.find(name)) for shard, part in enumerate(self.parts))
        return next((_made(shard, part, info) for shard, part, info in hits if info is not None), None)

    def __len__(self) -> int:
        return sum(len(part.infos) for part in self.parts)

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self._few) if self._few is not None else self._walk()

    @overload
    def __getitem__(self, index: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorInfo]: ...
    def __getitem__(self, index: int | slice) -> TensorInfo | list[TensorInfo]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._few is not None:
            return self._few[index]
        number = index + len(self) if index < 0 else index
        for shard, part in enumerate(self.parts):
            if 0 <= number < len(part.infos):
                return _made(shard, part, part.infos[number])
            number -= len(part.infos)
        raise IndexError(f"tensor {index} of {len(self)}")

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"

    def _walk(self) -> Iterator[TensorInfo]:
        for shard, part in enumerate(self.parts):
            for info in part.infos:
                yield _made(shard, part, info)


def _made(shard: int, part: Part, it: Info) -> TensorInfo:
    absolute = part.data_start + it.offset
    return TensorInfo(text(cstr(it.name)), it.name, it.type, it.shape, it.offset, absolute, it.nbytes, shard)


def _raw_name_of(tensor: TensorInfo) -> bytes:
    return tensor.raw_name


def read_infos(cursor: Cursor, count: int, dialect: Dialect | None) -> Records[Info]:
    """Step 7: `count` tensor infos, as far as each can be judged alone.

    Raises
    ------
    GGUFError
        E_NAME_LONG, E_NAME_DUPLICATE, E_NDIMS, E_DIM_NEGATIVE, E_DIMS_OVERFLOW, E_TENSOR_TYPE, E_BLOCK,
        E_BYTES_OVERFLOW, E_STRING_LIMIT, E_TRUNCATED.
    """
    form = Form("tensor", "E_NAME_DUPLICATE", _read_name, partial(_read_rest, dialect), _name_of)
    return Records.read_from(cursor, count, form)


def _name_of(info: Info) -> bytes:
    return info.name


def _read_name(cursor: Cursor) -> bytes:
    start = cursor.pos
    name = cursor.string("tensor name")
    if len(name) >= MAX_NAME:
        cursor.subject = {"tensor": shown(name)}
        cursor.fail("E_NAME_LONG", f"a name of {len(name)} bytes", offset=start,
                    field="tensor name", expected=MAX_NAME - 1, found=len(name))  # fmt: skip
    return name


def _read_rest(dialect: Dialect | None, cursor: Cursor, name: bytes, start: int) -> Info:
    shape = _read_shape(cursor)
    kind = _read_type(cursor, dialect)
    nbytes = _tensor_bytes(cursor, kind, shape, cursor.pos - 4)
    offset = cursor.number(U64, "tensor offset")
    return Info(name, kind, shape, nbytes, offset, cursor.pos - 8)


def _read_shape(cursor: Cursor) -> tuple[int, ...]:
    """Steps 7.2 to 7.4: the sizes, and the number of elements within an i64."""
    ndims = cursor.number(U32, "dimension count")
    if ndims > MAX_DIMS:
        cursor.fail("E_NDIMS", f"{ndims} dimensions", offset=cursor.pos - 4,
                    field="dimension count", expected=MAX_DIMS, found=ndims)  # fmt: skip
    start = cursor.pos
    shape = tuple(_sizes(cursor, ndims))
    elements = 1
    for size in shape:
        elements *= size
        if size > 1 and elements > _I64_MAX:  # a zero hides what comes after it, not what came before
            _too_many(cursor, shape, start)
    # The tensor constructor of the real program aborts at the limit itself, except in one dimension.
    if elements == _I64_MAX and sum(size > 1 for size in shape) > 1:
        _too_many(cursor, shape, start)
    return shape


def _too_many(cursor: Cursor, shape: tuple[int, ...], offset: int) -> NoReturn:
    cursor.fail("E_DIMS_OVERFLOW", f"{' x '.join(map(str, shape))} elements", offset=offset,
                field="sizes", expected=_I64_MAX, found=math.prod(shape))  # fmt: skip


def _sizes(cursor: Cursor, ndims: int) -> Iterator[int]:
    for axis in range(ndims):
        size = cursor.number(I64, "size")
        if size < 0:
            cursor.fail("E_DIM_NEGATIVE", f"size {axis} is {size}", offset=cursor.pos - 8,
                        field=f"size {axis}", expected=0, found=size)  # fmt: skip
        yield size


def _read_type(cursor: Cursor, dialect: Dialect | None) -> TensorType | UnknownType:
    """Step 7.5, the id alone: an error in llama.cpp's dialect only, elsewhere what nobody knows is data."""
    type_id = cursor.number(I32, "tensor type")
    kind = type_by_id(type_id, dialect)
    if isinstance(kind, TensorType):
        return kind
    if dialect == "llama.cpp":
        code = "E_BLOCK" if type_id in REMOVED_IDS else "E_TENSOR_TYPE"
        cursor.fail(code, f"tensor type {type_id}", offset=cursor.pos - 4, field="tensor type", found=type_id)
    return type_by_id(type_id)


def _tensor_bytes(cursor: Cursor, kind: TensorType | UnknownType, shape: tuple[int, ...], offset: int) -> int | None:
    """Steps 7.5 and 7.6: whole blocks, and a size within a u64; None for an unknown type.

    The real program multiplies ne0 by the block bytes before it divides, and wraps (specification section 3).
    """
    if isinstance(kind, UnknownType):
        return None
    ne0 = shape[0] if shape else 1
    if ne0 % kind.block_length:
        cursor.fail("E_BLOCK", f"a row of {ne0} elements is no whole number of {kind.name} blocks", offset=offset,
                    field="ne0", expected=kind.block_length, found=ne0)  # fmt: skip
    nbytes = kind.tensor_bytes(shape)
    if max(nbytes, ne0 * kind.block_bytes) > _U64_MAX:
        cursor.fail("E_BYTES_OVERFLOW", f"{' x '.join(map(str, shape))} elements of {kind.name}", offset=offset,
                    field="sizes", expected=_U64_MAX, found=nbytes)  # fmt: skip
    return nbytes


def check_offsets(cursor: Cursor, infos: Records[Info], alignment: int, *, gaps: bool) -> int:
    """Step 9: every tensor begins where the one before ends, padding included. Returns where the last one ends.

    With `gaps`, and after a tensor of unknown size, any aligned place from there on will do.

    Raises
    ------
    GGUFError
        E_OFFSET, E_PAD_OVERFLOW, E_TOTAL_OVERFLOW.
    """
    pos, known = 0, True
    for info in infos:
        loose = gaps or not known
        if info.offset != pos and (not loose or info.offset < pos or info.offset % alignment):
            cursor.subject = {"tensor": shown(info.name)}
            cursor.fail("E_OFFSET", f"offset {info.offset}, where {pos} is expected", offset=info.position,
                        field="tensor offset", expected=pos, found=info.offset)  # fmt: skip
        pos, known = info.offset, info.nbytes is not None
        nbytes = info.nbytes or 0
        if nbytes > _U64_MAX - (alignment - 1):
            cursor.subject = {"tensor": shown(info.name)}
            cursor.fail("E_PAD_OVERFLOW", f"{nbytes} bytes cannot be padded", offset=info.position,
                        field="size", expected=_U64_MAX - (alignment - 1), found=nbytes)  # fmt: skip
        pos += pad(nbytes, alignment)
        if pos > _U64_MAX:
            cursor.subject = {"tensor": shown(info.name)}
            cursor.fail("E_TOTAL_OVERFLOW", f"the data would end at byte {pos}", offset=info.position,
                        field="size", expected=_U64_MAX, found=pos)  # fmt: skip
    return pos
