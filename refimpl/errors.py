"""Everything that can go wrong, as data.

Every failure expected in normal operation is a `RefimplError` with a stable `code` (the vectors cite it) and
fields that say where and what. Programming errors stay Python's own exceptions.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters and the like as escapes: names in a file may hold anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class RefimplError(Exception):
    """Base of all expected failures.

    Attributes: `code` (stable, like "E_MAGIC"), `text` (one line for people), `fields` (machine-readable detail,
    for instance offset, field, expected, found, tensor). `exit_code` is what the command line returns.
    """

    exit_code = 3

    def __init__(self, code: str, text: str, **fields: object) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = printable(" ".join(text.split()))
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.text, self.fields))


def _rebuild(cls: type[RefimplError], code: str, text: str, fields: dict[str, object]) -> RefimplError:
    return cls(code, text, **fields)


class UsageError(RefimplError, ValueError):
    """The request itself makes no sense: unknown option value, unknown layout name (exit code 2)."""

    exit_code = 2


class GGUFError(RefimplError, ValueError):
    """The container breaks a rule. Fields: offset (byte position), field, expected, found where they apply."""


class OpenError(RefimplError, OSError):
    """E_OPEN: nothing there, or not a file."""


class LayoutError(RefimplError, ValueError):
    """A repack or unpack request that must be refused before a byte is written (E_LAYOUT_*)."""


class ModelError(RefimplError, ValueError):
    """The header is sound, but the model loader refuses it (E_ARCH, E_DATA_BOUNDS, ...)."""


class MachineError(RefimplError, OSError):
    """The machine refused: permission, input/output, memory (exit code 4)."""

    exit_code = 4


class VectorError(RefimplError, ValueError):
    """A vectors file that is not what its schema says (E_VECTORS)."""


class RecipeError(RefimplError, ValueError):
    """A recipe that describes no file, or a file that no recipe describes (E_RECIPE)."""


class ClosedError(RefimplError, ValueError):
    """E_CLOSED: a tensor of a model that was closed already."""
