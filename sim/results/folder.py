"""The folder of a run: it takes its place as a whole, and only where nothing but older results are in the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.errors import OutputError
from workloads.write import write_whole

DATA = ("summary.json", "requests.parquet", "iterations.parquet", "manifest.json")
"""The files that every result is read from."""
FILES = (*DATA, "latency.png", "timeline.png")
"""The files of every folder, pictures last."""
SOMETIMES = ("kv_transfers.parquet", "fleet.png", "classes.png", "arrivals.csv", "replay.yaml")
"""The files of a folder where KV crossed links, where machines come and go, and where clients were served."""
_MARK = "manifest.json"


def write_json(path: Path, value: Any) -> None:
    """Write *value* as indented JSON with a newline at the end; NaN is refused."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Reads a file of a results folder: what goes wrong in the block is one sentence, an OutputError, that the file is missing or
    damaged."""
    try:
        yield
    except FileNotFoundError:
        raise OutputError(f"{path} is missing; run again what wrote its folder") from None
    except (
        OSError,
        ValueError,
        KeyError,
        NotImplementedError,
        RecursionError,
    ) as error:  # all of pyarrow's are some of these
        reason = str(error).strip().rstrip(".").partition("\n")[0]
        raise OutputError(f"{path} is damaged ({reason}); run again what wrote it") from None


def read_json(path: Path, key: str) -> dict[str, Any]:
    """The object in a file of a results folder; OutputError where it is damaged, or has no *key*."""
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"it holds no {key}")
        return found


@contextlib.contextmanager
def staging(folder: str | os.PathLike[str], *, files: Sequence[str] = (*FILES, *SOMETIMES)) -> Iterator[Path]:
    """A hidden scratch folder beside *folder* that takes its place when the block ends well, and vanishes otherwise.

    Entered before a run, it finds out at once whether the folder can be written. An existing folder is replaced
    only if it is empty or holds nothing but *files* with a manifest among them. Raises OutputError.
    """
    target = Path(folder).resolve()
    _check_replaceable(target, files)
    # Named before they are made, so that an interruption at any point finds what to remove.
    made = _missing_parents(target.parent)
    scratch = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    done = False
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
            yield scratch
            _check_replaceable(target, files)
            _swap_in(scratch, target)
        except OutputError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write results into {folder}: {reason}; choose another --out") from error
        done = True
    finally:
        if not done:
            shutil.rmtree(scratch, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _check_replaceable(target: Path, files: Sequence[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{target} is a file, not a folder; choose another --out")
    try:
        names = sorted(entry.name for entry in target.iterdir())
    except OSError as error:
        raise OutputError(f"cannot read {target}: {error.strerror}; choose another --out") from None
    foreign = [name for name in names if name not in files]
    if foreign or (names and _MARK not in names):
        shown = ", ".join((foreign or names)[:3]) + (", ..." if len(foreign or names) > 3 else "")
        raise OutputError(f"{target} holds files that are not Rooftrace results ({shown}); choose another --out")


def _missing_parents(folder: Path) -> list[Path]:
    """Those of *folder* and its parents that are not there, innermost first."""
    missing = list(itertools.takewhile(lambda parent: not parent.exists(), (folder, *folder.parents)))
    nearest = missing[-1].parent if missing else folder
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file, not a folder; choose another --out")
    return missing


def _swap_in(scratch: Path, target: Path) -> None:
    """Rename *scratch* to *target*; what was there is put back if that fails."""
    if not target.exists():
        scratch.rename(target)
        return
    old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
    try:
        target.rename(old)
        scratch.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
