"""Reading files of tables, packaged or a user's own: one reader for TOML, JSON and CSV, and what tells a profile."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOM = Path(__file__).parent
"""Where packaged tables lie."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; ValueError where it is not there or is none."""
    path = Path(path)
    try:
        return tomllib.loads(_text(path))
    except RecursionError:
        raise ValueError(f"{path} nests lists or tables deeper than can be read") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML ({error}); is the file truncated?") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """The object of a JSON file; ValueError where it is not there or holds none."""
    path = Path(path)
    try:
        data = json.loads(_text(path))
    except RecursionError:
        raise ValueError(f"{path} nests lists or objects deeper than can be read") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold one JSON object, a HuggingFace config")
    return data


def packaged_rows(name: str | Path) -> list[dict[str, str]]:
    """The rows of a packaged CSV file, a path or a name in `ROOM`; lines that begin with # are left out."""
    lines = _text(ROOM / name).splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def is_profile(path: str | Path) -> bool:
    """Whether a file is a calibrated profile rather than a datasheet: it says its format before its first table.

    Cut files are told too, so that their readers can say what is missing.
    """
    try:
        head = re.split(r"(?m)^\s*\[", _text(Path(path)), maxsplit=1)[0]
    except ValueError:
        return False
    return re.search(r"(?m)^(format|kernel_count)\s*=", head) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None
