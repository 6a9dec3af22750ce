"""What this process holds in memory, by the kernel's own counters."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Rss:
    """Resident bytes: in all, anonymous, and of file mappings (shared memory included)."""

    total: int
    anon: int
    file: int

    def to_json(self) -> dict[str, int]:
        """Plain data."""
        return {"total": self.total, "anon": self.anon, "file": self.file}


def current_rss(proc: Path = _PROC) -> Rss:
    """The resident bytes now: exact from smaps_rollup on Linux, else the total that psutil knows (kinds unknown: 0)."""
    try:
        counters = _kib_lines((proc / "smaps_rollup").read_text())
    except OSError:
        import psutil

        return Rss(int(psutil.Process().memory_info().rss), 0, 0)
    total, anon = counters.get("Rss", 0), counters.get("Anonymous", 0)
    return Rss(total, anon, total - anon)


def peak_rss(proc: Path = _PROC) -> int | None:
    """The highest resident bytes of this process so far; None where the system keeps no such figure."""
    try:
        return _kib_lines((proc / "status").read_text()).get("VmHWM")
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(proc: Path = _PROC) -> bool:
    """Start the peak counter again at the current value (Linux). Only a program may do this, never a library."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kib_lines(text: str) -> dict[str, Any]:
    """`Name:  123 kB` lines, in bytes."""
    values = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
            values[words[0].rstrip(":")] = int(words[1]) * 1024
    return values
