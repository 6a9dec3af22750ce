"""What the real programs look at when they validate tensor bytes, as data (specification: validate.md).

Three functions: `ggml_validate_row_data` of each dialect, which sees a run of blocks, and `iqk_validate_tensor` of
ik_llama.cpp, which sees a tensor. For every type that a function knows there is one rule; quants are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from refimpl.errors import GGUFError, UsageError
from refimpl.types import LLAMA_TYPE_COUNT, REMOVED_IDS, TYPES, Dialect, TensorType, UnknownType

Function = Literal["ggml_validate_row_data", "iqk_validate_tensor"]
Mode = Literal["oracle", "correct"]
Predicate = Literal["bad16", "nan16", "bf16", "bad32", "f64", "ff", "iq1_m"]

ROW_DATA: Function = "ggml_validate_row_data"
TENSOR: Function = "iqk_validate_tensor"
FUNCTIONS: dict[Dialect, tuple[Function, ...]] = {"llama.cpp": (ROW_DATA,), "ik_llama.cpp": (ROW_DATA, TENSOR)}
MODES: tuple[Mode, ...] = ("oracle", "correct")

IK_TYPE_COUNT = 400

WIDTHS: dict[Predicate, int] = {"bad16": 2, "nan16": 2, "bf16": 2, "bad32": 4, "f64": 8, "ff": 1, "iq1_m": 8}
"""Bytes of the value that a predicate judges."""

REASONS: dict[Predicate, str] = {
    "bad16": "Inf or NaN as f16",
    "nan16": "NaN as f16",
    "bf16": "Inf or NaN as bf16",
    "bad32": "Inf or NaN as f32",
    "f64": "Inf or NaN when converted to f32",
    "ff": "exponent 0xff",
    "iq1_m": "the scale put together from the top nibbles of four words is Inf or NaN as f16",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at: the values called `fields`, side by side from byte `offset` of every unit.

    A unit is a block (of `rows` interleaved rows, then `rows` blocks long), a row, or a group of `rows` rows. With
    interleaved rows there is one value per row.
    """

    predicate: Predicate
    fields: tuple[str, ...]
    offset: int = 0
    rows: int = 1
    unit: Literal["block", "row", "group"] = "block"

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return WIDTHS[self.predicate]

    def unit_bytes(self, block_bytes: int, row_bytes: int) -> int:
        """Bytes from one unit to the next."""
        return {"block": self.rows * block_bytes, "row": row_bytes, "group": self.rows * row_bytes}[self.unit]


Rule = Look | Literal["never", "always"]
"""What is looked at; or the verdict is the same whatever the bytes are: bad "never", bad "always"."""


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _d(offset: int = 0) -> Look:
    return Look("bad16", ("d",), offset)


def _scales(predicate: Predicate, rows: int, unit: Literal["block", "row"] = "block") -> Look:
    return Look(predicate, tuple(f"d[{row}]" for row in range(rows)), rows=rows, unit=unit)


_COMMON: dict[str, Rule] = {
    "f32": Look("bad32", ("value",)),
    "f16": Look("bad16", ("value",)),
    "bf16": Look("bf16", ("value",)),
    "f64": Look("f64", ("value",)),
    **_each("i8 i16 i32 i64", "never"),
    **_each("q4_0 q5_0 q8_0 iq4_nl iq1_s iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs", _d()),
    **_each("q4_1 q5_1", Look("bad16", ("d", "m"))),
    **_each("q4_K q5_K", Look("bad16", ("d", "dmin"))),
    "q2_K": Look("bad16", ("d", "dmin"), 80),
    "q3_K": _d(108),
    "q6_K": _d(208),
    "q8_K": Look("bad32", ("d",)),
    "iq1_m": Look("iq1_m", ("scale",), 48),
    "q8_1": "always",
}
"""Of both dialects' row data function (validate.md 1 and 2)."""

RULES: Mapping[tuple[Dialect, Function], Mapping[str, Rule]] = {
    ("llama.cpp", ROW_DATA): {
        **_COMMON,
        **_each("q1_0 q2_0", _d()),
        "tq1_0": _d(52),
        "tq2_0": _d(64),
        "mxfp4": Look("ff", ("e",)),
        "nvfp4": "never",
    },
    ("ik_llama.cpp", ROW_DATA): {
        **_COMMON,
        **_each("q4_0_4x4 q4_0_4x8", _scales("bad16", 4)),
        "q4_0_8x8": _scales("bad16", 8),
        **_each("q8_0_x4 q8_1_x4 q8_2_x4 q8_K16 q8_K32 q8_K64 q8_K128 q8_KR8", "always"),
        **_each("mxfp4 q6_0 iq1_bn iq2_bn i2_s q1_0_g128 q8_KV", "never"),
        **_each("iq2_k iq3_k iq4_k iq5_k iq6_k iq2_ks iq3_ks iq4_ks iq5_ks iq4_kss iq2_kl", "never"),
        **_each("iq1_kt iq2_kt iq3_kt iq4_kt", "never"),
        **{kind.name: "never" for kind in TYPES if kind.name.endswith(("_r4", "_r8", "_r16"))},
    },
    ("ik_llama.cpp", TENSOR): {
        **{kind.name: "never" for kind in TYPES if "ik_llama.cpp" in kind.dialects},
        **_each(
            "iq2_k iq3_k iq4_k iq5_k iq6_k iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs",
            Look("nan16", ("d",)),
        ),
        **_each(
            "iq2_k_r4 iq3_k_r4 iq4_k_r4 iq5_k_r4 iq2_xxs_r4 iq2_xs_r4 iq2_s_r4 iq3_xxs_r4 iq3_s_r4",
            _scales("bad16", 4),
        ),
        "iq4_xs_r8": _scales("bad16", 8),
        **_each("iq2_bn iq4_kss iq4_ks iq5_ks", Look("bad32", ("row scale",), unit="row")),
        **_each("iq1_bn iq2_ks iq2_kl iq3_ks", Look("bad16", ("row scale",), unit="row")),
        # The scales of four rows stand at the start of every fourth row only, but the real function looks at all.
        **_each("iq2_bn_r4 iq4_ks_r4 iq5_ks_r4", _scales("bad32", 4, "row")),
        **_each("iq1_s_r4 iq1_m_r4", _scales("bad16", 4, "row")),
    },
}
"""What the real functions do, with their defects."""


def corrected(rule: Rule) -> Rule:
    """The rule without the documented defect: scales of interleaved rows are looked for where a group starts."""
    if isinstance(rule, Look) and rule.unit == "row" and rule.rows > 1:
        return replace(rule, unit="group")
    return rule


def function_of(dialect: Dialect, function: Function | None, mode: Mode) -> Function:
    """The function that is meant (default: the one behind --check-tensors). UsageError E_DIALECT, E_FUNCTION, E_MODE"""
    if dialect not in FUNCTIONS:
        raise UsageError("E_DIALECT", f"no dialect is called {dialect!r}; there are {', '.join(FUNCTIONS)}")
    if mode not in MODES:
        raise UsageError("E_MODE", f"mode is 'oracle' or 'correct', not {mode!r}", found=mode)
    if function is not None and function not in FUNCTIONS[dialect]:
        text = f"{dialect} has no function {function!r}; there is {' and '.join(FUNCTIONS[dialect])}"
        raise UsageError("E_FUNCTION", text, found=function)
    return function or ROW_DATA


def rule_of(kind: TensorType | UnknownType, dialect: Dialect, function: Function, mode: Mode = "oracle") -> Rule | None:
    """The rule of a type; None if its id is none at all, which the row data functions call bad data.

    Raises
    ------
    GGUFError
        E_TENSOR_TYPE: a gap in the enumeration, where the real function divides by zero.
    """
    known = isinstance(kind, TensorType) and dialect in kind.dialects
    if not known and function == TENSOR:
        return "never"
    if not known:
        count = LLAMA_TYPE_COUNT if dialect == "llama.cpp" else IK_TYPE_COUNT
        if 0 <= kind.id < count and (dialect != "llama.cpp" or kind.id in REMOVED_IDS):
            text = f"tensor type {kind.id} has no size in {dialect}, whose {function} would divide by zero"
            raise GGUFError("E_TENSOR_TYPE", text, field="type", found=kind.id)
        return None
    rule = RULES[dialect, function][kind.name]
    return rule if mode == "oracle" else corrected(rule)
