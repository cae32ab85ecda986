"""The measured steps of a file of any form that is known."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwmodels.steps.recording import recorded_rows
from hwmodels.steps.rows import Columns, StepRows, forward_rows, is_forward, plain_rows, read_csv
from hwmodels.steps.table import Table
from hwmodels.tables import read_json

SCHEMA = 6
"""The version of aiconfigurator's whole-forward tables that is read."""
_FORMS = "a table in Parquet or CSV, or a recording of vllm-vcr (.jsonl, .jsonl.gz)"


def read_steps(file: Path, where: Mapping[str, Any]) -> StepRows:
    """The measured steps in *file* of the deployment that *where* (column: value) singles out; ValueError, in one sentence, for
    what is not understood."""
    name = file.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        if where:
            raise ValueError(f"{file} is a recording, of one deployment; leave hardware.where out")
        return recorded_rows(file)
    if not name.endswith((".parquet", ".csv")):
        raise ValueError(f"{file} is no table of steps; give {_FORMS}")
    columns, notes = _parquet(file) if name.endswith(".parquet") else (read_csv(file), ())
    rows = (forward_rows if is_forward(columns) else plain_rows)(columns, file, where)
    return replace(rows, notes=(*notes, *rows.notes))


@functools.lru_cache(maxsize=32)
def table_of(file: Path, digest: str, where: tuple[tuple[str, Any], ...]) -> tuple[StepRows, Table]:
    """The rows of *file*, whose content has *digest*, and the table over them."""
    rows = read_steps(file, dict(where))
    try:
        return rows, Table(rows.prompts, rows.decodes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _parquet(file: Path) -> tuple[Columns, tuple[str, ...]]:
    """The columns of a Parquet file, checked against the metadata beside it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is no Parquet: {error}") from None
    columns = {name: found.column(name).to_pylist() for name in found.column_names}
    beside = file.with_name(f"{file.stem}.metadata.json")
    if not is_forward(columns):
        return columns, ()
    if not beside.is_file():
        return columns, (
            f"{file.name} has no {beside.name} beside it: its schema version and whether it is whole are not checked.",
        )
    said = read_json(beside)
    if said.get("schema_version") != SCHEMA:
        raise ValueError(
            f"{beside}: schema_version is {said.get('schema_version')!r}, and whole-forward tables of version {SCHEMA} are read"
        )
    for key, is_ in (("row_count", found.num_rows), ("parquet_sha256", digest_of(file))):
        if key in said and said[key] != is_:
            raise ValueError(
                f"{beside}: {key} is {said[key]}, and that of {file.name} is {is_}; one of the two is not the other's"
            )
    return columns, ()
