"""Split sets: one model in several files (specification: gguf.md 7).

Nothing in a file becomes part of a path: the names of all shards come from the name that the caller gave, and numbers.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence

from refimpl.errors import GGUFError, ModelError, OpenError
from refimpl.gguf.cursor import cstr
from refimpl.gguf.header import Header, TensorInfo, Tensors, ValueType

EachShard = Callable[[Header], None]
"""Called with the header of each file, in order, before anything behind it is looked at."""
OpenShard = Callable[[str], Header]

_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.gguf", re.DOTALL)


def shard_name(prefix: str, number: int, count: int) -> str:
    """The path of shard `number` (from 0) of `count`.

    >>> shard_name("folder/m", 0, 12)
    'folder/m-00001-of-00012.gguf'
    """
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


def shard_prefix(path: str, number: int, count: int) -> str:
    """What the names of all shards begin with. ModelError E_SPLIT_NAME if `path` is not that of shard `number`."""
    tail = shard_name("", number, count)
    if not path.endswith(tail) or len(path) == len(tail):
        text = f"{path} says that it is shard {number + 1} of {count}, so its name must end with {tail}"
        raise ModelError("E_SPLIT_NAME", text, path=path, expected=tail)
    return path.removesuffix(tail)


def split_number(header: Header) -> int | None:
    """`split.no`, from 0; None if it is missing. ModelError E_KV_TYPE_MISMATCH if it is no u16."""
    return _count(header, "split.no", ValueType.U16)


def split_count(header: Header) -> int:
    """`split.count`; 0 or 1 is a single file, and so is a file without it. ModelError E_KV_TYPE_MISMATCH."""
    return _count(header, "split.count", ValueType.U16) or 0


def _count(header: Header, key: str, wanted: ValueType) -> int | None:
    pair = header.kv.find(key)
    if pair is None:
        return None
    if pair.type is not wanted or not isinstance(pair.value, int):
        text = f"{key} is of type {pair.type.name.lower()}, not {wanted.name.lower()}"
        raise ModelError("E_KV_TYPE_MISMATCH", text, key=key, offset=pair.offset, expected=wanted, found=pair.type)
    return pair.value


class UniqueNames:
    """Tensor names across all shards, compared as C strings."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, shard: Header) -> None:
        for tensor in shard.tensors:
            self.add(tensor)

    def add(self, tensor: TensorInfo) -> None:
        """ModelError E_NAME_DUPLICATE if there was a tensor of that name before."""
        name = cstr(tensor.raw_name)
        if name in self._seen:
            raise ModelError("E_NAME_DUPLICATE", f"tensor {tensor.name!r} is there twice", tensor=tensor.name)
        self._seen.add(name)


def first_shard(header: Header, path: str, open_shard: OpenShard) -> Header:
    """The header of the set's first file, given that of any of its files; what is no shard comes back as it is.

    This is a convenience that the real programs do not have. `header` is closed if another one is returned.
    """
    try:
        number, count = split_number(header), split_count(header)
    except ModelError:  # the checks in their order will say so
        return header
    if not number or count < 2:
        return header
    name = shard_name(shard_prefix(path, number, count), 0, count)
    header.close()
    try:
        return open_shard(name)
    except (OpenError, GGUFError) as error:
        raise _bad_shard(0, count, name, error) from error


def whole_set(first: Header, names: str | Sequence[str], open_shard: OpenShard, each_shard: EachShard | None) -> Header:
    """All shards as one header, given that of the first and its path, or the caller's list of all paths.

    The order of the checks is that of the real loader. `open_shard` reads the container of one file.

    Raises
    ------
    ModelError
        E_KV_TYPE_MISMATCH, E_KEY_MISSING, E_SPLIT_FIRST, E_SPLIT_NAME, E_SPLIT_COUNT, E_SPLIT_SHARD,
        E_SPLIT_NO_MISSING, E_SPLIT_ORDER, E_NAME_DUPLICATE, E_SPLIT_TOTAL. The shards opened here are closed then.
    """
    if each_shard is not None:
        each_shard(first)
    count = split_count(first)
    if count < 2:
        if not isinstance(names, str) and len(names) > 1:
            raise ModelError("E_SPLIT_COUNT", f"{len(names)} files for a model in one file", expected=1)
        return first
    number = split_number(first)
    if number is None:
        raise ModelError("E_KEY_MISSING", f"split.no is missing, where split.count is {count}", key="split.no")
    if number:
        text = f"this is shard {number + 1} of {count}; the first one must be opened"
        raise ModelError("E_SPLIT_FIRST", text, expected=0, found=number)
    if isinstance(names, str):
        prefix = shard_prefix(names, 0, count)
        names = [shard_name(prefix, i, count) for i in range(count)]
    elif len(names) != count:
        text = f"{len(names)} files given, where split.count is {count}"
        raise ModelError("E_SPLIT_COUNT", text, expected=count, found=len(names))
    if each_shard is None:
        each_shard = UniqueNames()
        each_shard(first)
    headers = [first]
    try:
        for i in range(1, count):
            headers.append(_open_later(i, count, names[i], open_shard))
            each_shard(headers[-1])
        return _merged(headers)
    except BaseException:
        for header in headers[1:]:
            header.close()
        raise


def _open_later(number: int, count: int, name: str, open_shard: OpenShard) -> Header:
    try:
        header = open_shard(name)
    except (OpenError, GGUFError) as error:
        raise _bad_shard(number, count, name, error) from error
    try:
        found = split_number(header)
        if found is None:
            raise ModelError("E_SPLIT_NO_MISSING", f"{name} has no split.no", path=name)
        if found != number:
            text = f"{name} is shard {found + 1}, not {number + 1} of {count}"
            raise ModelError("E_SPLIT_ORDER", text, path=name, expected=number, found=found)
    except ModelError:
        header.close()
        raise
    return header


def _bad_shard(number: int, count: int, name: str, error: OpenError | GGUFError) -> ModelError:
    text = f"shard {number + 1} of {count}, {name}: {error.code}: {error.text}"
    return ModelError("E_SPLIT_SHARD", text, path=name, shard=number, cause=error.code)


def _merged(headers: list[Header]) -> Header:
    first = headers[0]
    tensors = Tensors([part for header in headers for part in header.tensors.parts])
    total = _count(first, "split.tensors.count", ValueType.I32)
    if total is None:
        raise ModelError("E_KEY_MISSING", "split.tensors.count is missing", key="split.tensors.count")
    if total != len(tensors):
        text = f"split.tensors.count is {total}, the {len(headers)} shards have {len(tensors)} tensors"
        raise ModelError("E_SPLIT_TOTAL", text, expected=total, found=len(tensors))
    return Header(first.kv, tensors, tuple(header.shards[0] for header in headers), first.dialect)


def find_split(path: str) -> str:
    """A shard's path for what is no file's path: a pattern (`m-*.gguf`), or what all names of a set begin with.

    Raises
    ------
    OpenError
        E_OPEN: nothing like that is there.
    ModelError
        E_SPLIT_NAME: there are files of several models.
    """
    matches: list[str] = []
    for pattern in (f"{glob.escape(path)}-00001-of-*.gguf", path):
        matches = matches or sorted(match for match in glob.glob(pattern) if os.path.isfile(match))
    names = [_SHARD_NAME.fullmatch(match) for match in matches]
    sets = {
        (name["prefix"], name["count"]) if name else ("", match) for name, match in zip(names, matches, strict=True)
    }
    if not sets:
        raise OpenError("E_OPEN", f"cannot open {path!r}: no such file, and nothing that it could be the pattern of")
    if len(sets) > 1:
        some = ", ".join(matches[:3]) + (", ..." if len(matches) > 3 else "")
        raise ModelError("E_SPLIT_NAME", f"{path!r} fits several models: {some}", path=path)
    return matches[0]
