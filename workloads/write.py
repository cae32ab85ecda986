"""Every file that Rooftrace is told to write: whole or not at all, and never in the place of what is no file."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def open_whole(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file whose content is that of *path* when the block ends well; until then, and otherwise, *path* is what it was.

    Symbolic links are followed. Devices, pipes, and the file that is standard output or standard error already, are written
    through: nothing takes their place. Text is UTF-8 with the newlines that it has. OSError with `filename` where that
    cannot be, a folder included.
    """
    try:
        with _open(path, {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": ""}) as file:
            yield file
    except OSError as error:
        # A write that fails says no name, and that of the scratch file tells nobody anything.
        error.filename, error.filename2 = os.fspath(path), None
        raise


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Put *content* into the file at *path* (see `open_whole`)."""
    with open_whole(path, binary=isinstance(content, bytes)) as file:
        file.write(content)


def unwritable(path: str | os.PathLike[str]) -> str:
    """Why `open_whole` cannot write *path*, as far as can be told beforehand; empty where it can."""
    if os.path.isdir(path):
        return "it is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return "" if os.access(path, os.W_OK) else "it cannot be written to"
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return f"{folder} is not a folder that can be written to"
    return ""


@contextlib.contextmanager
def _open(path: str | os.PathLike[str], how: dict[str, Any]) -> Iterator[IO[Any]]:
    there = _status(path)
    if there is not None and (not stat.S_ISREG(there.st_mode) or _is_standard(there)):
        with open(path, **how) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, **how) as file:
            yield file
        # mkstemp gives 0600; the file should look as if open() had made it, or as it did.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o666 & ~umask if there is None else stat.S_IMODE(there.st_mode))
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        raise


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_standard(there: os.stat_result) -> bool:
    """Whether it is where this process writes what it says, such as /dev/stdout that goes into a file."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(there, os.fstat(number)):
                return True
    return False
