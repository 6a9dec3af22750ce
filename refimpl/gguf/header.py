"""The header of a GGUF file: everything but the weights (specification: gguf.md 2 to 5).

`parse_header` is the reader that the specification calls "meta", the one that the model loader uses; `check_data` is
what the "data" reader adds. Both see a file only as `read(offset, length)` and a size.

Dialects. The container's rules are llama.cpp's in both of them; a dialect decides which tensor types there are.
ik_llama.cpp's own reader is much looser: it takes version 0 and any but 1, empty and repeated keys, any alignment but
0, any offset, names of any length, sizes that wrap, a data start past the end. Of all that only gaps between tensors
are known to be meant, and only with `allow_gaps` are they taken here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from refimpl.errors import GGUFError, UsageError
from refimpl.gguf.cursor import I64, U32, Cursor, Read, text
from refimpl.gguf.tensors import MAX_DIMS, MAX_NAME, Part, TensorInfo, TensorMissing, Tensors, check_offsets, read_infos
from refimpl.gguf.values import KeyMissing, KeyValue, KeyValues, LazyArray, ValueType, read_key_values
from refimpl.types import DIALECTS, Dialect
from refimpl.units import pad

__all__ = [
    "MAX_DIMS", "MAX_NAME", "Header", "KeyMissing", "KeyValue", "KeyValues", "LazyArray", "Read", "Shard", "TensorInfo",
    "TensorMissing", "Tensors", "ValueType", "check_data", "parse_header",
]  # fmt: skip

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_TENSORS = (2**64 - 1) // 344
MAX_PAIRS = (2**64 - 1) // 88
"""The real reader's limits: what 64 bits can address of its own records."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One file of a model. `path` is None for a file without one (bytes, an open file).

    `data_start` and `size` (of the whole file) are byte positions; `data_bytes` is the length of the data section,
    padding after the last tensor included (a tensor of unknown size counts as 0). `read` gives its bytes.
    """

    path: str | None
    version: int
    alignment: int
    data_start: int
    data_bytes: int
    size: int
    read: Read = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a model says before its weights: one GGUF file, or a split set as one model.

    `version`, `alignment`, `kv` and `data_start` are those of the first file; `shards` has every file's own. `size` is
    that of all files together. Each tensor carries its shard number and the absolute offset in that file. `dialect`
    is the one that the files were read with. Arrays among the values are read when asked for, so the source must stay
    readable; `close` (or leaving a `with` block) gives it back.
    """

    kv: KeyValues
    tensors: Tensors
    shards: tuple[Shard, ...]
    dialect: Dialect | None

    @property
    def version(self) -> int:
        """Of the container."""
        return self.shards[0].version

    @property
    def alignment(self) -> int:
        """Of the data section, in bytes."""
        return self.shards[0].alignment

    @property
    def data_start(self) -> int:
        """Byte position of the data section in the first file."""
        return self.shards[0].data_start

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards)

    @property
    def data_bytes(self) -> int:
        """Bytes of all data sections, tail padding included; a tensor of unknown size counts as 0."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def read(self) -> Read:
        """`read(offset, length)` of the first file."""
        return self.shards[0].read

    def tensor(self, name: str | bytes) -> TensorInfo:
        """The first tensor of that name, compared as C strings. TensorMissing (a LookupError) if there is none."""
        found = self.tensors.find(name)
        if found is None:
            raise TensorMissing("E_TENSOR_MISSING", f"no tensor {name!r}", tensor=name)
        return found

    @property
    def architecture(self) -> str | None:
        """`general.architecture` as the real programs see it; None if it is missing or no string."""
        pair = self.kv.find("general.architecture")
        return text(pair.cstr) if pair is not None and pair.type is ValueType.STR else None

    def close(self) -> None:
        """Close the files behind the header that were opened for it. Array elements can no longer be read."""
        for shard in self.shards:
            close = getattr(shard.read, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Header:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def parse_header(
    read: Read,
    size: int,
    *,
    dialect: Dialect | None = None,
    allow_gaps: bool = False,
    partial: bool = False,
    path: str | None = None,
) -> Header:
    """Read the header of one GGUF file of `size` bytes.

    Parameters
    ----------
    read
        `read(offset, length)` gives bytes of the file, fewer than asked for only at its end.
    dialect
        "llama.cpp" refuses every tensor type that llama.cpp refuses. "ik_llama.cpp" and None know the types of both
        programs (the named one's meaning first, llama.cpp's for None) and keep others as `UnknownType`.
    allow_gaps
        With dialect "ik_llama.cpp": tensors may leave gaps (ascending, aligned, no overlap, inside the file).
    partial
        The file may end before its data start: enough to plan with, not to load from.
    path
        The name that the header gives its only shard.

    Raises
    ------
    GGUFError
        The first rule that the file breaks, in the reading order of specification section 2; with gaps E_DATA_SHORT.
    UsageError
        E_DIALECT: no such dialect, or gaps in another one than ik_llama.cpp's.
    """
    check_dialect(dialect, allow_gaps)
    cursor = Cursor(read, size)
    version = _read_version(cursor)
    tensor_count = _read_count(cursor, "tensor count", MAX_TENSORS)
    pair_count = _read_count(cursor, "key count", MAX_PAIRS)
    kv = read_key_values(cursor, pair_count)
    alignment = _alignment(cursor, kv)
    infos = read_infos(cursor, tensor_count, dialect)
    data_start = pad(cursor.pos, alignment) if infos else cursor.pos
    if data_start > size and not partial:
        cursor.fail(
            "E_DATA_START", f"the data would start at byte {data_start}, past the end of the file at {size}",
            offset=cursor.pos, field="padding", expected=data_start, found=size,
        )  # fmt: skip
    data_bytes = check_offsets(cursor, infos, alignment, gaps=allow_gaps)
    if allow_gaps and not partial and infos and infos[-1].offset + (infos[-1].nbytes or 0) > size - data_start:
        cursor.fail("E_DATA_SHORT", "with gaps allowed, all tensors must be inside the file", offset=data_start,
                    field="data", expected=data_bytes, found=size - data_start)  # fmt: skip
    shard = Shard(path, version, alignment, data_start, data_bytes, size, read)
    return Header(kv, Tensors([Part(infos, data_start)]), (shard,), dialect)


def check_dialect(dialect: Dialect | None, allow_gaps: bool) -> None:
    """UsageError E_DIALECT: no such dialect, or gaps in one that has none."""
    if dialect is not None and dialect not in DIALECTS:
        raise UsageError("E_DIALECT", f"no dialect is called {dialect!r}", expected=DIALECTS, found=dialect)
    if allow_gaps and dialect != "ik_llama.cpp":
        raise UsageError("E_DIALECT", "gaps between tensors can be allowed in dialect ik_llama.cpp only", found=dialect)


def check_data(header: Header, size: int) -> None:
    """Step 10, reader "data": the whole data section must be in a file of `size` bytes, tail padding included.

    For a header of one file. GGUFError E_DATA_SHORT.
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
    pair = kv.find("general.alignment")
    if pair is None:
        return DEFAULT_ALIGNMENT
    cursor.subject = {"key": "general.alignment"}
    if pair.type is not ValueType.U32 or not isinstance(pair.value, int):
        cursor.fail("E_ALIGN_TYPE", f"alignment of type {pair.type.name.lower()}, not u32", offset=pair.offset,
                    field="value type", expected=ValueType.U32, found=pair.type)  # fmt: skip
    if pair.value.bit_count() != 1:
        cursor.fail("E_ALIGN_VALUE", f"alignment {pair.value} is no power of two", offset=pair.offset,
                    field="value", found=pair.value)  # fmt: skip
    return pair.value
