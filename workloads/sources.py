"""Files of a trace: one, those of a folder, or those that a pattern names; unpacked as they are read."""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


def trace_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that *path* stands for, in order of name: itself, all in the folder, or all that the pattern names.

    In folders, hidden files, empty ones and those that begin with an underscore are no part of a trace.
    """
    text = os.fspath(path)
    if os.path.isdir(text):
        found = [each for each in Path(text).rglob("*") if _is_part(each.relative_to(text))]
    elif os.path.exists(text) or not glob.has_magic(text):
        return [Path(text)]
    else:
        found = [Path(each) for each in glob.glob(text, recursive=True)]
    return sorted(each for each in found if each.is_file() and each.stat().st_size)


def _is_part(path: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.parts)


class _Reading:
    """The file that this process opened last, as it lies on the disk."""

    def __init__(self) -> None:
        self.raw: IO[bytes] | None = None


_READING = _Reading()


def megabytes_read() -> tuple[float, float]:
    """Megabytes of the file that was opened last that have been read, and that there are."""
    raw = _READING.raw
    if raw is None or raw.closed:
        return 0.0, 0.0
    return raw.tell() / 1e6, os.fstat(raw.fileno()).st_size / 1e6


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[tuple[IO[bytes], str]]:
    """The bytes of a file, unpacked, and by what it is packed: gzip, zstd or nothing ("")."""
    with Path(path).open("rb") as raw:
        _READING.raw = raw
        begin = raw.read(4)
        raw.seek(0)
        if begin.startswith(_GZIP):
            with gzip.GzipFile(fileobj=raw) as file:
                yield file, "gzip"  # type: ignore[misc]
        elif begin == _ZSTD:
            yield _zstd(path, raw), "zstd"
        else:
            yield raw, ""


def _zstd(path: Any, raw: IO[bytes]) -> IO[bytes]:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"{path} is packed by zstd, which needs pyarrow: pip install pyarrow, or unpack it") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))  # type: ignore[arg-type]


def is_parquet(path: str | os.PathLike[str]) -> bool:
    with opened(path) as (file, _):
        try:
            return file.read(4) == _PARQUET
        except (OSError, EOFError, zlib.error):  # which are told of where the file is read
            return False
