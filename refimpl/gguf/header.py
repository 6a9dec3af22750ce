"""The header of a GGUF file: everything but the weights (specification: gguf.md 2 to 5).

`parse_header` is the reader that the specification calls "meta", the one that the model loader uses; `check_data` is
what the "data" reader adds. Both see a file only as `read(offset, length)` and a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from refimpl.errors import GGUFError, RefimplError, UsageError
from refimpl.gguf.cursor import I32, I64, U32, U64, Cursor, Read, cstr, text
from refimpl.gguf.values import KeyMissing, KeyValue, KeyValues, LazyArray, NameIndex, ValueType, read_key_values
from refimpl.types import DIALECTS, REMOVED_IDS, Dialect, TensorType, UnknownType, type_by_id
from refimpl.units import pad

__all__ = [
    "Header", "KeyMissing", "KeyValue", "KeyValues", "LazyArray", "Read", "TensorInfo", "TensorMissing", "ValueType",
    "check_data", "parse_header",
]  # fmt: skip

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 64
"""Names must be shorter than this, in bytes: the real programs keep them in 64 bytes with a NUL."""
MAX_TENSORS = (2**64 - 1) // 344
MAX_PAIRS = (2**64 - 1) // 88
"""The real reader's limits: what 64 bits can address of its own records."""
_I64_MAX, _U64_MAX = 2**63 - 1, 2**64 - 1


class TensorMissing(RefimplError, LookupError):
    """E_TENSOR_MISSING: no tensor of that name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    `shape` is as in the file: fastest dimension first, at most four, none for a single element. `offset` is relative
    to the data section, `absolute_offset` to the file, both in bytes. `nbytes` is None if nobody knows the type.
    `name` is what the real programs see (up to the first NUL, decoded with replacement), `raw_name` what is there.
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


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a GGUF file says before its weights.

    `data_start` and `size` (of the whole file) are byte positions, `alignment` is in bytes. `dialect` is the one that
    the file was read with. Arrays among the values are read through `read` when asked for, so the source must stay
    readable; `close` (or leaving a `with` block) gives it back.
    """

    version: int
    alignment: int
    kv: KeyValues
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    data_start: int
    size: int
    dialect: Dialect | None
    read: Read = field(repr=False)
    _by_name: NameIndex[TensorInfo] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", NameIndex((tensor.raw_name, tensor) for tensor in self.tensors))

    def tensor(self, name: str | bytes) -> TensorInfo:
        """The first tensor of that name, compared as C strings. TensorMissing (a LookupError) if there is none."""
        found = self._by_name.find(name)
        if found is None:
            raise TensorMissing("E_TENSOR_MISSING", f"no tensor {name!r}", tensor=name)
        return found

    @property
    def architecture(self) -> str | None:
        """`general.architecture` as the real programs see it; None if it is missing or no string."""
        pair = self.kv.raw("general.architecture") if "general.architecture" in self.kv else None
        return text(pair.cstr) if pair is not None and pair.type is ValueType.STR else None

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section, padding after the last tensor included; a tensor of unknown size counts as 0."""
        if not self.tensors:
            return 0
        last = self.tensors[-1]
        return last.offset + pad(last.nbytes or 0, self.alignment)

    def close(self) -> None:
        """Close the file behind the header, if it was opened for it. Array elements can no longer be read."""
        close = getattr(self.read, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Header:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def parse_header(read: Read, size: int, *, dialect: Dialect | None = None) -> Header:
    """Read the header of a GGUF file of `size` bytes.

    Parameters
    ----------
    read
        `read(offset, length)` gives bytes of the file, fewer than asked for only at its end.
    dialect
        "llama.cpp" refuses every tensor type that llama.cpp refuses. "ik_llama.cpp" and None know the types of both
        programs (the named one's meaning first, llama.cpp's for None) and keep others as `UnknownType`.

    Raises
    ------
    GGUFError
        The first rule that the file breaks, in the reading order of specification section 2.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise UsageError("E_DIALECT", f"no dialect is called {dialect!r}", expected=DIALECTS, found=dialect)
    cursor = Cursor(read, size)
    version = _read_version(cursor)
    tensor_count = _read_count(cursor, "tensor count", MAX_TENSORS)
    pair_count = _read_count(cursor, "key count", MAX_PAIRS)
    kv = read_key_values(cursor, pair_count)
    alignment = _alignment(cursor, kv)
    infos = _read_infos(cursor, tensor_count, dialect)
    data_start = pad(cursor.pos, alignment) if infos else cursor.pos
    if data_start > size:
        cursor.fail(
            "E_DATA_START", f"the data would start at byte {data_start}, past the end of the file at {size}",
            offset=cursor.pos, field="padding", expected=data_start, found=size,
        )  # fmt: skip
    _check_offsets(cursor, infos, alignment)
    tensors = tuple(
        TensorInfo(text(cstr(it.name)), it.name, it.type, it.shape, it.offset, data_start + it.offset, it.nbytes)
        for it in infos
    )
    return Header(version, alignment, kv, tensors, data_start, size, dialect, read)


def check_data(header: Header, size: int) -> None:
    """Step 10, reader "data": the whole data section must be in a file of `size` bytes, tail padding included.

    Raises
    ------
    GGUFError
        E_DATA_SHORT.
    """
    left = size - header.data_start
    if header.data_bytes > left:
        raise GGUFError(
            "E_DATA_SHORT",
            f"the data section takes {header.data_bytes} bytes from byte {header.data_start}, {left} are there",
            offset=header.data_start, field="data", expected=header.data_bytes, found=left,
        )  # fmt: skip


def _read_version(cursor: Cursor) -> int:
    """Steps 1 and 2: magic and version."""
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        cursor.fail("E_MAGIC", f"the file begins with {magic!r}", offset=0, field="magic", expected=MAGIC, found=magic)
    version = cursor.number(U32, "version")
    if version and version & 0xFFFF == 0:
        cursor.fail("E_ENDIAN", f"version {version:#x}: other byte order", offset=4, field="version", found=version)
    if version not in (2, 3):
        cursor.fail("E_VERSION", f"version {version}", offset=4, field="version", expected=(2, 3), found=version)
    return version


def _read_count(cursor: Cursor, what: str, limit: int) -> int:
    """Steps 3 and 4. The count is not trusted: whoever loops over it stops where the file ends."""
    count = cursor.number(I64, what)
    if not 0 <= count <= limit:
        cursor.fail("E_COUNT", f"{what} {count}", offset=cursor.pos - 8, field=what, expected=limit, found=count)
    return count


def _alignment(cursor: Cursor, kv: KeyValues) -> int:
    """Step 6: a plain u32 and a power of two."""
    if "general.alignment" not in kv:
        return DEFAULT_ALIGNMENT
    pair = kv.raw("general.alignment")
    cursor.subject = {"key": "general.alignment"}
    if pair.type is not ValueType.U32 or not isinstance(pair.value, int):
        cursor.fail("E_ALIGN_TYPE", f"alignment of type {pair.type.name.lower()}, not u32", offset=pair.offset,
                    field="value type", expected=ValueType.U32, found=pair.type)  # fmt: skip
    if pair.value.bit_count() != 1:
        cursor.fail("E_ALIGN_VALUE", f"alignment {pair.value} is no power of two", offset=pair.offset,
                    field="value", found=pair.value)  # fmt: skip
    return pair.value


class _Info(NamedTuple):
    """A tensor before the data start is known; `position` is where its offset field stands in the file."""

    name: bytes
    type: TensorType | UnknownType
    shape: tuple[int, ...]
    nbytes: int | None
    offset: int
    position: int


def _read_infos(cursor: Cursor, count: int, dialect: Dialect | None) -> list[_Info]:
    """Step 7: `count` tensor infos, as far as each can be judged alone."""
    infos: list[_Info] = []
    seen: set[bytes] = set()
    for _ in range(count):  # every info takes bytes, and the file ends
        cursor.subject = {}
        start = cursor.pos
        name = cursor.string("tensor name")
        cursor.subject = {"tensor": text(name)}
        if len(name) >= MAX_NAME:
            cursor.fail("E_NAME_LONG", f"a name of {len(name)} bytes", offset=start,
                        field="tensor name", expected=MAX_NAME - 1, found=len(name))  # fmt: skip
        if name in seen:
            cursor.fail("E_NAME_DUPLICATE", "a name that was there before", offset=start, field="tensor name")
        seen.add(name)
        shape = _read_shape(cursor)
        kind = _read_type(cursor, dialect)
        nbytes = _tensor_bytes(cursor, kind, shape, cursor.pos - 4)
        offset = cursor.number(U64, "tensor offset")
        infos.append(_Info(name, kind, shape, nbytes, offset, cursor.pos - 8))
    cursor.subject = {}
    return infos


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


def _check_offsets(cursor: Cursor, infos: list[_Info], alignment: int) -> None:
    """Step 9: every tensor begins where the one before ends, padding included.

    After a tensor of unknown size any aligned place from its own start on will do. The looser reading that files of
    ik_llama.cpp may need (section 8: gaps, on explicit demand) has its place here.
    """
    pos, known = 0, True
    for info in infos:
        cursor.subject = {"tensor": text(info.name)}
        if info.offset != pos and (known or info.offset < pos or info.offset % alignment):
            cursor.fail("E_OFFSET", f"offset {info.offset}, where {pos} is expected", offset=info.position,
                        field="tensor offset", expected=pos, found=info.offset)  # fmt: skip
        pos, known = info.offset, info.nbytes is not None
        nbytes = info.nbytes or 0
        if nbytes > _U64_MAX - (alignment - 1):
            cursor.fail("E_PAD_OVERFLOW", f"{nbytes} bytes cannot be padded", offset=info.position,
                        field="size", expected=_U64_MAX - (alignment - 1), found=nbytes)  # fmt: skip
        pos += pad(nbytes, alignment)
        if pos > _U64_MAX:
            cursor.fail("E_TOTAL_OVERFLOW", f"the data would end at byte {pos}", offset=info.position,
                        field="size", expected=_U64_MAX, found=pos)  # fmt: skip
