"""Bytes are Python integers everywhere; this is the only place where they become text for people."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def mib(nbytes: int) -> str:
    """Bytes as the real programs log them: MiB with two decimals, no unit.

    >>> mib(13271040)
    '12.66'
    """
    return f"{nbytes / MIB:.2f}"


def human(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more.

    >>> human(900), human(12852 * KIB)
    ('900 B', '12.55 MiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def pad(nbytes: int, alignment: int) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def pages_inside(start: int, end: int, page: int) -> tuple[int, int]:
    """[start, end) rounded inward to whole pages; an empty range comes back as (first, first)."""
    first = pad(start, page)
    return first, max(first, end // page * page)
