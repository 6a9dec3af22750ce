"""The typed getters of the model loader (specification: gguf.md 6.5): a key has exactly the wanted type, or fails."""

from __future__ import annotations

from refimpl.errors import ModelError
from refimpl.gguf.cursor import text
from refimpl.gguf.values import KeyValue, KeyValues, LazyArray, ValueType


class Keys:
    """The keys of a model, read as its loader does.

    A look-up that fails is ModelError: E_KEY_MISSING, E_KV_TYPE_MISMATCH, E_ARRAY_LENGTH, E_ARRAY_TYPE.
    """

    def __init__(self, kv: KeyValues) -> None:
        self._kv = kv

    def u32(self, key: str) -> int | None:
        """A count; None if there is no such key."""
        return self._number(self._typed(key, ValueType.U32))

    def need_u32(self, key: str) -> int:
        """A count that must be there."""
        value = self.u32(key)
        if value is None:
            raise _missing(key)
        return value

    def string(self, key: str) -> str | None:
        """A string up to its first NUL; None if there is no such key."""
        pair = self._typed(key, ValueType.STR)
        return None if pair is None else text(pair.cstr)

    def check(self, key: str, kind: ValueType, *, needed: bool = False) -> None:
        """Only look that a key has this type, for a value that nothing here depends on."""
        if self._typed(key, kind) is None and needed:
            raise _missing(key)

    def per_layer(self, key: str, layers: int) -> list[int] | None:
        """A count for each layer, from one number or an array; None if there is no such key."""
        pair = self._kv.find(key)
        if pair is None:
            return None
        if not isinstance(pair.value, LazyArray):
            return [self._number(self._typed(key, ValueType.U32)) or 0] * layers
        if len(pair.value) != layers:
            text = f"{key} is an array of {len(pair.value)} elements, the model has {layers} layers"
            raise ModelError(
                "E_ARRAY_LENGTH", text, key=key, offset=pair.offset, expected=layers, found=len(pair.value)
            )
        if pair.value.element_type not in (ValueType.U32, ValueType.I32):
            found = pair.value.element_type
            text = f"{key} is an array of {found.name.lower()}, not of u32 or i32"
            raise ModelError("E_ARRAY_TYPE", text, key=key, offset=pair.offset, found=found)
        return [int(value) for value in pair.value]

    def count_of_strings(self, key: str) -> int:
        """Length of an array of strings that must be there."""
        pair = self._kv.find(key)
        if pair is None:
            raise _missing(key)
        if not isinstance(pair.value, LazyArray):
            raise _mismatch(pair, key, ValueType.ARR)
        if pair.value.element_type is not ValueType.STR:
            found = pair.value.element_type
            text = f"{key} is an array of {found.name.lower()}, not of strings"
            raise ModelError("E_ARRAY_TYPE", text, key=key, offset=pair.offset, found=found)
        return len(pair.value)

    def _typed(self, key: str, kind: ValueType) -> KeyValue | None:
        pair = self._kv.find(key)
        if pair is not None and pair.type is not kind:
            raise _mismatch(pair, key, kind)
        return pair

    @staticmethod
    def _number(pair: KeyValue | None) -> int | None:
        return pair.value if pair is not None and isinstance(pair.value, int) else None


def _missing(key: str) -> ModelError:
    return ModelError("E_KEY_MISSING", f"{key} is missing", key=key)


def _mismatch(pair: KeyValue, key: str, wanted: ValueType) -> ModelError:
    text = f"{key} is of type {pair.type.name.lower()}, not {wanted.name.lower()}"
    return ModelError("E_KV_TYPE_MISMATCH", text, key=key, offset=pair.offset, expected=wanted, found=pair.type)
