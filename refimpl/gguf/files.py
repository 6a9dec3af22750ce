"""Files written whole or not at all, and the machine's errors as coded ones."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from refimpl.errors import MachineError, OpenError, RefimplError

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
TEMPORARY_SUFFIX = ".tmp"


def coded(error: OSError, doing: str) -> RefimplError:
    """The coded error for what the system said while `doing`: E_OPEN (nothing there), E_PERMISSION or E_IO."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in _NOT_THERE:
        return OpenError("E_OPEN", text)
    return MachineError("E_PERMISSION" if error.errno in _FORBIDDEN else "E_IO", text)


def file_identity(descriptor: int) -> tuple[int, int, int, int]:
    """Device, inode, size and time of change: the same as long as it is the same file with the same content."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when the block ends, and is gone if it ends by an exception.

    Readers and other writers of `path` never see a part of it, even if this process is killed.

    Raises
    ------
    OpenError, MachineError
        E_OPEN, E_PERMISSION or E_IO (a full disk included) for what the system refuses.
    """
    with new_files([path]) as (file,):
        yield file


@contextmanager
def new_files(paths: Sequence[Path], *, fsync: bool = True) -> Iterator[list[BinaryIO]]:
    """Several such files, which take their names together, the first one last. `fsync` waits for the disk before.

    Errors as for atomic_file.
    """
    temporaries = [path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}") for path in paths]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open(temporary, "xb")) for temporary in temporaries]
            yield [cast(BinaryIO, file) for file in files]
            for file in files:
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
        for temporary, path in reversed(list(zip(temporaries, paths, strict=True))):
            os.replace(temporary, path)
    except BaseException as error:
        for temporary in temporaries:
            with suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError) and not isinstance(error, RefimplError):
            raise coded(error, f"cannot write {paths[0]}") from error
        raise
