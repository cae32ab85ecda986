"""The file for records of a run that memory should not hold: it has no name, and is deleted with its last reader."""

from __future__ import annotations

import mmap
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

IN_MEMORY_BYTES = 1 << 26
"""Records of iterations of all machines together that stay in memory until the run ends."""

_LEAST_BYTES = 1 << 14

Place = tuple[int, int]
"""Position in the file, and number of bytes."""


class Spill:
    """A file in *folder*, or in the system's folder for such files (TMPDIR), which is made when something is first written to it.

    Each of *n_recorders* writes what it holds when that is more than `at_bytes`.
    """

    def __init__(self, folder: Path | None, n_recorders: int) -> None:
        self.at_bytes = max(IN_MEMORY_BYTES // max(n_recorders, 1), _LEAST_BYTES)
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._mapped: mmap.mmap | None = None

    def write(self, content: Any) -> Place:
        """Add *content*, anything that has a buffer, at the end."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  (goes with its last reader)
            weakref.finalize(self, self._file.close)
        self._file.seek(self._end)
        n = self._file.write(content)
        self._end += n
        return self._end - n, n

    def read(self, place: Place) -> bytes:
        at, n = place
        assert self._file is not None
        self._file.seek(at)
        return self._file.read(n)

    def array(self, place: Place, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Records in the file; they are read into memory where they are accessed. Nothing is written afterwards."""
        at, n = place
        if not n:
            return np.empty(0, dtype)
        if self._mapped is None:
            assert self._file is not None
            self._file.flush()
            self._mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._mapped, dtype, n // dtype.itemsize, at)


def together(places: Sequence[Place]) -> Place:
    """Places that follow one another, as one."""
    return places[0][0], sum(n for _, n in places)


def let_go(records: NDArray[Any]) -> None:
    """Release the memory into which records of a file were read; they are read again where they are accessed again."""
    base: Any = records
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    # Systems without madvise do so by themselves when memory becomes scarce.
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def in_blocks(records: NDArray[Any], n: int) -> Iterator[NDArray[Any]]:
    """*records* in pieces of *n*, each to be done with before the next."""
    for at in range(0, len(records), n):
        yield records[at : at + n]
        let_go(records)
