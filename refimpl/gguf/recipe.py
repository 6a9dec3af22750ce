"""Recipes: all that a header says, as JSON, without the weights (golden/README.md, "Recipes").

A recipe becomes a header again, or a sparse file that real programs open; so a planning problem can be shared without
its weights. Bytes that are no UTF-8 are kept as lone surrogates (U+DC80 and up, as Python's surrogateescape).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refimpl.errors import GGUFError, RecipeError, RefimplError, UsageError
from refimpl.gguf.files import atomic_file
from refimpl.gguf.header import DEFAULT_ALIGNMENT, Header, parse_header
from refimpl.gguf.values import CODECS, KeyValue, LazyArray, ValueType
from refimpl.gguf.writer import Pair, Tensor, Type, header_bytes
from refimpl.types import Dialect, TensorType, type_by_name
from refimpl.units import pad

Recipe = dict[str, Any]

_TYPES = {kind.name.lower(): kind for kind in ValueType if kind is not ValueType.ARR}
_NEEDED = {"arch": str, "gguf_version": int, "alignment": int, "file_size": int, "kv": dict, "tensors": list}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def recipe_of(header: Header, name: str) -> Recipe:
    """The recipe of a model, called `name`.

    Raises
    ------
    GGUFError
        E_TENSOR_TYPE: a tensor of a type that nobody knows, and whose size is unknown therefore.
    RecipeError
        E_RECIPE: a split set, or tensors with gaps between them, which no recipe describes.
    """
    if len(header.shards) > 1:
        raise RecipeError("E_RECIPE", "a recipe describes one file; merge the shards first, or take one of them alone")
    end = 0
    for tensor in header.tensors:
        if not isinstance(tensor.type, TensorType):
            tensor.type.row_bytes(1)
        if tensor.offset != end:
            raise RecipeError("E_RECIPE", f"tensor {tensor.name} stands behind a gap, which no recipe describes")
        end += pad(tensor.nbytes or 0, header.alignment)
    recipe: Recipe = {
        "name": name,
        "arch": header.architecture or "",
        "gguf_version": header.version,
        "alignment": header.alignment,
        # Of a download that has not come to its data yet, the size that it will have.
        "file_size": header.size if header.size >= header.data_start else header.data_start + end,
        "kv": {_text(pair.key): _value(pair) for pair in header.kv.items_raw()},
        "tensors": [[_text(t.raw_name), t.type.name, list(t.shape)] for t in header.tensors],
        "tensor_bytes": sum(tensor.nbytes or 0 for tensor in header.tensors),
    }
    if header.dialect == "ik_llama.cpp":
        recipe["dialect"] = header.dialect
    return recipe


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """The one way in which a recipe is written: a line per key and per tensor. Lines come with their ends."""
    yield "{"
    for number, (key, value) in enumerate(recipe.items()):
        yield ("," if number else "") + f"\n {json.dumps(key)}: "
        if key == "tensors" and value:
            rows = (json.dumps(row, separators=(",", ":")) for row in value)
            yield "[\n  " + ",\n  ".join(rows) + "\n ]"
        else:
            yield json.dumps(value)
    yield "\n}\n"


def read_recipe(raw: bytes, source: str) -> Recipe:
    """A recipe from its JSON text. RecipeError E_RECIPE if it is none; `source` names it there."""
    try:
        recipe = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecipeError("E_RECIPE", f"{source} is not JSON: {error or 'nested too deeply'}") from error
    if not isinstance(recipe, dict):
        raise RecipeError("E_RECIPE", f"{source} is no object")
    for key, kind in _NEEDED.items():
        if not isinstance(recipe.get(key), kind) or isinstance(recipe[key], bool):
            raise RecipeError("E_RECIPE", f"{source} has no {key} that is {kind.__name__}", field=key)
    try:
        recipe_header(recipe)
    except RecipeError as error:
        raise RecipeError("E_RECIPE", f"{source}: {error.text}", **error.fields) from error
    return recipe


def recipe_bytes(recipe: Recipe) -> bytes:
    """The header that a recipe describes, padding included. RecipeError E_RECIPE if it describes none."""
    dialect: Dialect | None = recipe.get("dialect")
    try:
        kv: list[Pair] = [(_bytes(key), *_typed(key, value)) for key, value in recipe["kv"].items()]
        tensors: list[Tensor] = []
        for row in recipe["tensors"]:
            name, kind, shape = row
            if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
                raise RecipeError("E_RECIPE", f"tensor {name!r} has shape {shape}")
            tensors.append((_bytes(name), type_by_name(kind, dialect), tuple(shape), None))
        if "general.alignment" not in recipe["kv"] and recipe["alignment"] != DEFAULT_ALIGNMENT:
            raise RecipeError("E_RECIPE", f"alignment {recipe['alignment']} without the key general.alignment")
        return header_bytes(kv, tensors, alignment=recipe["alignment"], version=recipe["gguf_version"])
    except RecipeError:
        raise
    except (RefimplError, TypeError, ValueError, AttributeError) as error:
        raise RecipeError("E_RECIPE", f"the recipe describes no file: {error}") from error


def recipe_header(recipe: Recipe) -> Header:
    """The header of the file that a recipe describes, without any file. RecipeError E_RECIPE."""
    data, size = recipe_bytes(recipe), recipe["file_size"]
    if size < len(data) and recipe["tensors"]:
        raise RecipeError("E_RECIPE", f"file_size is {size}, the header alone takes {len(data)}")
    try:
        return parse_header(lambda offset, length: data[offset : offset + length], size, dialect=recipe.get("dialect"))
    except (GGUFError, UsageError) as error:
        raise RecipeError("E_RECIPE", f"the recipe describes no sound header: {error}") from error


def make_sparse(recipe: Recipe, out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the header of a recipe and a hole in the place of the weights, `file_size` bytes in all.

    Raises
    ------
    UsageError
        E_EXISTS: `out` is there already, and `force` is not given.
    RecipeError, OpenError, MachineError
        E_RECIPE, E_OPEN, E_PERMISSION, E_IO; nothing is left behind then.
    """
    path = Path(out)
    data = recipe_bytes(recipe)
    if not force and os.path.lexists(path):
        raise UsageError("E_EXISTS", f"{path} is there already (--force replaces it)", path=str(path))
    with atomic_file(path) as file:
        file.write(data)
        file.truncate(recipe["file_size"])


def _value(pair: KeyValue) -> list[Any]:
    if isinstance(pair.value, LazyArray):
        kind = pair.value.element_type
        if kind is ValueType.STR:
            return ["arr:str", [_text(raw) for raw in pair.value.raws()]]
        return [f"arr:{kind.name.lower()}", [_number(kind, item) for item in pair.value]]
    if isinstance(pair.value, bytes):
        return ["str", _text(pair.value)]
    return [pair.type.name.lower(), _number(pair.type, pair.value)]


def _number(kind: ValueType, value: Any) -> Any:
    """An f32 as the shortest decimal that gives it again; what JSON has no number for as its name."""
    if kind not in (ValueType.F32, ValueType.F64):
        return value
    if not math.isfinite(value):
        return str(value)  # nan, inf or -inf
    if kind is ValueType.F64:
        return value
    codec = CODECS[kind]
    wanted = codec.pack(value)
    return next(short for short in (float(f"{value:.{digits}g}") for digits in range(1, 18)) if _packs(short, wanted))


def _packs(short: float, wanted: bytes) -> bool:
    try:
        return struct.pack("<f", short) == wanted
    except OverflowError:  # rounded up past the largest f32
        return False


def _typed(key: str, value: Any) -> tuple[Type, Any]:
    try:
        name, content = value
        element = name.removeprefix("arr:")
        kind = _TYPES[element]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise RecipeError("E_RECIPE", f"key {key!r} is no pair of a type and a value", key=key) from None
    is_array = element != name
    items = content if is_array else [content]
    if not isinstance(items, list) or not all(_fits(kind, item) for item in items):
        raise RecipeError("E_RECIPE", f"key {key!r} has a value that is no {name}", key=key)
    made = [_made(kind, item) for item in items]
    return (("arr", kind), made) if is_array else (kind, made[0])


def _fits(kind: ValueType, item: Any) -> bool:
    if kind is ValueType.STR:
        return isinstance(item, str)
    if kind is ValueType.BOOL:
        return isinstance(item, bool)
    if kind in (ValueType.F32, ValueType.F64):
        return (isinstance(item, int | float) and not isinstance(item, bool)) or item in _SPECIAL
    return isinstance(item, int) and not isinstance(item, bool)


def _made(kind: ValueType, item: Any) -> Any:
    if kind is ValueType.STR:
        return _bytes(item)
    return _SPECIAL[item] if isinstance(item, str) else item


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
