"""Finished runs of a study in a folder: one file each, there in whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.errors import OutputError, RooftraceError


class Store:
    """Finished runs in a folder, one file each, named by key; a file is there in whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __contains__(self, key: str) -> bool:
        return os.path.exists(self.path(key))

    def path(self, key: str) -> str:
        return f"{self.folder}/{key}.json"

    def put(self, key: str, record: str) -> None:
        scratch = f"{self.folder}/.{key}.{os.getpid()}.{secrets.token_hex(3)}"
        try:
            with open(scratch, "w", encoding="utf-8") as file:
                file.write(record)
            os.replace(scratch, self.path(key))
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            if isinstance(error, OSError):
                raise OutputError(
                    f"cannot write into {self.folder}: {error.strerror}; what was finished is kept, and the same command goes on"
                ) from None
            raise

    def get(self, key: str) -> dict[str, Any]:
        """The record of *key*; RooftraceError where it is missing or damaged."""
        try:
            with open(self.path(key), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError) as error:
            raise RooftraceError(
                f"{self.path(key)} cannot be read ({error}); delete it and run the sweep again"
            ) from None

    def clear_scratch(self) -> None:
        """Remove what processes that are no more left half written."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not _alive(entry.name.split(".")[2:3]):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)


def _alive(pid: Sequence[str]) -> bool:
    if not pid or not pid[0].isdigit():
        return False
    try:
        os.kill(int(pid[0]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
