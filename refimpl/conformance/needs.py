"""What the values in a vectors file must be before anything is asked about them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Need:
    """What a value in a file must be before anything is asked about it."""

    what: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 4 and all(_is_whole(x) for x in value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and is_pair(value[:2]) and _is_shape(value[2])


def _is_recipe(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("tensors"), list):
        return False
    return isinstance(value.get("arch"), str) and all(map(_is_tensor, value["tensors"]))


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, str) for x in value)


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except (binascii.Error, ValueError):
        return False


TEXT = Need("a string", lambda value: isinstance(value, str))
TEXT_OR_NULL = Need("a string or null", lambda value: value is None or isinstance(value, str))
FLAG = Need("true or false", lambda value: isinstance(value, bool))
WHOLE = Need("a whole number", _is_whole)
U64 = Need("a whole number below 2^64", lambda value: _is_whole(value) and value < 1 << 64)
U64_OR_NULL = Need("a whole number below 2^64, or null", lambda value: value is None or U64.holds(value))
SIZE = Need("a whole number up to 2^30", lambda value: _is_whole(value) and value <= 1 << 30)
SHAPE = Need("a list of 1 to 4 whole numbers", _is_shape)
HASH = Need("a sha256 in hex", lambda value: isinstance(value, str) and len(value) == 64)
HASH_OR_NULL = Need("a sha256 in hex or null", lambda value: value is None or HASH.holds(value))
OBJECT = Need("an object", lambda value: isinstance(value, dict))
BY_NUMBER = Need(
    "an object with numbers as keys", lambda value: isinstance(value, dict) and all(key.isdecimal() for key in value)
)
PAIRS = Need("a list of pairs of strings", lambda value: isinstance(value, list) and all(is_pair(x) for x in value))
INTEGER = Need("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))
DIALECT = Need("llama.cpp or ik_llama.cpp", lambda value: value in ("llama.cpp", "ik_llama.cpp"))
BASE64 = Need("bytes in base64", _is_base64)
SHAPE_OR_NONE = Need("a list of 1 to 4 whole numbers, or absent", lambda value: value is None or _is_shape(value))
FILES = Need(
    "a list of files with their sizes and hashes",
    lambda value: isinstance(value, list) and all(OBJECT.holds(x) and HASH.holds(x.get("sha256")) for x in value),
)
TEXTS = Need("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
RECIPES = Need("an object of recipes", lambda value: isinstance(value, dict) and all(map(_is_recipe, value.values())))
OBJECTS = Need("an object of objects", lambda value: OBJECT.holds(value) and all(map(OBJECT.holds, value.values())))
