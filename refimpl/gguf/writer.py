"""Writing GGUF files: the same arguments give the same bytes (specification: gguf.md 1).

Everything is streamed: string arrays and tensor data may come from generators, and a tensor without data is a hole.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

from refimpl.errors import GGUFError, UsageError
from refimpl.gguf.cursor import I32, I64, U32, U64, cstr
from refimpl.gguf.files import atomic_file
from refimpl.gguf.header import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME
from refimpl.gguf.values import CODECS, LazyArray, ValueType
from refimpl.types import TensorType
from refimpl.units import MIB, pad

Name: TypeAlias = str | bytes
Type: TypeAlias = ValueType | tuple[Literal["arr"], ValueType]
Pair: TypeAlias = tuple[Name, Type, Any]
Data: TypeAlias = "bytes | bytearray | memoryview | Iterable[bytes | bytearray | memoryview] | None"
Tensor: TypeAlias = tuple[Name, TensorType, Sequence[int], Data]

_ALIGNMENT_KEY = b"general.alignment"
_BATCH = 4096
_ZEROS = bytes(MIB)


@dataclass(frozen=True, slots=True)
class Counted:
    """Array elements from an iterable that does not know its length, such as a generator."""

    count: int
    items: Iterable[Any]


def write_gguf(
    target: str | os.PathLike[str] | BinaryIO,
    kv: Sequence[Pair],
    tensors: Sequence[Tensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    version: int = 3,
) -> None:
    """Write a model.

    Parameters
    ----------
    target
        A path (written under another name and renamed when complete) or an open binary file, written from where it
        stands; its holes are sparse if it can be positioned, zeros otherwise.
    kv
        Pairs (key, type, value); the type of an array is ("arr", element type), its value any iterable with a length,
        or `Counted`. An alignment other than 32 is added as the last key unless the keys have it.
    tensors
        (name, type, shape with the fastest dimension first, data). Data is bytes-like, an iterable of bytes-like
        chunks, or None for a hole of zeros.
    alignment
        In bytes. Tensors stand one behind the other, each padded to it.

    Raises
    ------
    GGUFError
        The arguments describe a file that no reader takes (E_KEY_EMPTY, E_KEY_DUPLICATE, E_ALIGN_VALUE, E_NAME_LONG,
        E_NAME_DUPLICATE, E_NDIMS, E_DIM_NEGATIVE, E_DIMS_OVERFLOW, E_BLOCK, E_VERSION).
    UsageError
        E_VALUE: a value that its type cannot hold, or another number of elements than announced.
        E_DATA_SIZE: another number of data bytes than type and shape take.
    OpenError, MachineError
        As `refimpl.gguf.files.atomic_file`, for a path.
    """
    if isinstance(target, str | os.PathLike):
        with atomic_file(Path(target)) as file:
            write_gguf(file, kv, tensors, alignment=alignment, version=version)
        return
    out = _Out(target)
    for piece in _header(kv, tensors, alignment, version):
        out.write(piece)
    for name, kind, shape, data in tensors:
        nbytes = kind.tensor_bytes(shape)
        if data is None:
            out.hole(nbytes)
        else:
            _write_data(out, name, data, nbytes)
        out.hole(pad(nbytes, alignment) - nbytes)
    out.finish()


def header_bytes(
    kv: Sequence[Pair], tensors: Sequence[Tensor], *, alignment: int = DEFAULT_ALIGNMENT, version: int = 3
) -> bytes:
    """What `write_gguf` writes before the first tensor's data, padding included. Errors as there."""
    return b"".join(_header(kv, tensors, alignment, version))


class _Out:
    """An output that makes holes by moving on where it can."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sparse = file.seekable()
        self._ends_in_hole = False

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:  # an unbuffered file may take less than it is given
            view = view[self._file.write(view) :]
            self._ends_in_hole = False

    def hole(self, nbytes: int) -> None:
        if not self._sparse:
            for done in range(0, nbytes, len(_ZEROS)):
                self.write(_ZEROS[: nbytes - done])
        elif nbytes:
            self._file.seek(nbytes, os.SEEK_CUR)
            self._ends_in_hole = True

    def finish(self) -> None:
        """Give a file that ends in a hole its full size."""
        if self._ends_in_hole:
            end = self._file.tell()
            self._file.truncate(end)
            if self._file.seek(0, os.SEEK_END) < end:  # files in memory do not grow that way
                self._file.seek(end - 1)
                self._file.write(b"\0")


def _write_data(out: _Out, name: Name, data: Any, nbytes: int) -> None:
    try:
        chunks: Iterable[Any] = (memoryview(data),)
    except TypeError:  # not bytes-like
        chunks = data
    done = 0
    for chunk in chunks:
        view = memoryview(chunk)
        done += view.nbytes
        if done > nbytes:
            break
        if view.nbytes:
            out.write(view.cast("B"))
    if done != nbytes:
        raise UsageError(
            "E_DATA_SIZE", f"tensor {name!r} takes {nbytes} bytes of data, not {done}{' or more' * (done > nbytes)}",
            tensor=name, expected=nbytes, found=done,
        )  # fmt: skip


def _header(kv: Sequence[Pair], tensors: Sequence[Tensor], alignment: int, version: int) -> Iterator[bytes]:
    """The header piece by piece. All but the values of the keys is checked before the first piece is made."""
    if version not in (2, 3):
        raise GGUFError("E_VERSION", f"version {version}", field="version", expected=(2, 3), found=version)
    pairs = [(_bytes(key), kind, value) for key, kind, value in kv]
    pairs += _missing_alignment(pairs, alignment)
    _check_names("key", "E_KEY_DUPLICATE", [key for key, _, _ in pairs])
    if any(not key for key, _, _ in pairs):
        raise GGUFError("E_KEY_EMPTY", "an empty key", field="key")
    yield from header_pieces(pairs, _infos(tensors, alignment), alignment, version)


class Info(NamedTuple):
    """A tensor as the header describes it; `offset` in the data section, in bytes."""

    name: bytes
    type_id: int
    shape: Sequence[int]
    offset: int


def header_pieces(
    pairs: Sequence[tuple[bytes, Type, Any]], infos: Sequence[Info], alignment: int, version: int = 3
) -> Iterator[bytes]:
    """A header from finished parts, none of which is checked: also headers that contradict themselves."""
    head = MAGIC + U32.pack(version) + I64.pack(len(infos)) + I64.pack(len(pairs))
    size = 0
    for piece in chain((head,), chain.from_iterable(_pair(*pair) for pair in pairs), map(_info, infos)):
        size += len(piece)
        yield piece
    if infos:
        yield bytes(pad(size, alignment) - size)


def _info(info: Info) -> bytes:
    sizes = b"".join(map(I64.pack, info.shape))
    return b"".join(
        (_string(info.name), U32.pack(len(info.shape)), sizes, I32.pack(info.type_id), U64.pack(info.offset))
    )


def _missing_alignment(pairs: list[tuple[bytes, Type, Any]], alignment: int) -> list[tuple[bytes, Type, Any]]:
    """The alignment key if the file needs it and has none; what the keys say must be what is done."""
    said = next((pair[1:] for pair in pairs if cstr(pair[0]) == _ALIGNMENT_KEY), None)
    wanted = (ValueType.U32, alignment)
    if alignment.bit_count() != 1 or alignment < 1 or said not in (None, wanted):
        raise GGUFError("E_ALIGN_VALUE", f"alignment {alignment}, where the keys say {said}", found=alignment)
    return [] if said or alignment == DEFAULT_ALIGNMENT else [(_ALIGNMENT_KEY, *wanted)]


def _check_names(what: str, code: str, names: list[bytes]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise GGUFError(code, f"{what} {twice!r} is there twice", **{what: twice})


def _pair(key: bytes, kind: Type, value: Any) -> Iterator[bytes]:
    yield _string(key)
    if kind is ValueType.ARR and isinstance(value, LazyArray):
        kind = ("arr", value.element_type)
    try:
        if isinstance(kind, tuple):
            yield from _array(kind[1], value)
        else:
            yield I32.pack(kind)
            yield _string(value) if kind is ValueType.STR else CODECS[kind].pack(value)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise UsageError("E_VALUE", f"key {key!r}: {error}", key=key) from error


def _array(element: ValueType, value: Any) -> Iterator[bytes]:
    count, items = (value.count, value.items) if isinstance(value, Counted) else (len(value), value)
    yield I32.pack(ValueType.ARR) + I32.pack(element) + U64.pack(count)
    encode: Callable[[Any], bytes] = CODECS[element].pack if element in CODECS else _string
    if isinstance(value, LazyArray) and value.element_type is element:  # copied as it is, whatever its bits
        yield from value.packed()
        return
    done = 0
    rest = iter(items)
    while batch := [encode(item) for item in islice(rest, _BATCH)]:
        done += len(batch)
        yield b"".join(batch)
    if done != count:
        raise UsageError("E_VALUE", f"an array of {count} elements came with {done}", expected=count, found=done)


def _infos(tensors: Sequence[Tensor], alignment: int) -> list[Info]:
    names = [_bytes(name) for name, *_ in tensors]
    _check_names("tensor", "E_NAME_DUPLICATE", names)
    infos: list[Info] = []
    offset = 0
    for name, (_, kind, shape, _) in zip(names, tensors, strict=True):
        if len(name) >= MAX_NAME:
            raise GGUFError("E_NAME_LONG", f"tensor {name!r}: more than {MAX_NAME - 1} bytes", tensor=name)
        if len(shape) > MAX_DIMS:
            raise GGUFError("E_NDIMS", f"tensor {name!r}: {len(shape)} dimensions", tensor=name)
        if any(size < 0 for size in shape):
            raise GGUFError("E_DIM_NEGATIVE", f"tensor {name!r}: shape {tuple(shape)}", tensor=name)
        info = Info(name, kind.id, shape, offset)
        try:
            _info(info)
        except struct.error as error:
            raise GGUFError("E_DIMS_OVERFLOW", f"tensor {name!r}: {tuple(shape)} at {offset}", tensor=name) from error
        infos.append(info)
        offset += pad(kind.tensor_bytes(shape), alignment)
    return infos


def _string(value: Name) -> bytes:
    data = _bytes(value)
    return U64.pack(len(data)) + data


def _bytes(name: Name) -> bytes:
    return name if isinstance(name, bytes) else name.encode()
