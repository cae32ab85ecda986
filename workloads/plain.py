"""The plain format: requests as the text of a CSV file, which `read_trace` reads back."""

from __future__ import annotations

import csv
import io
from typing import Any

from workloads.columns import NS_PER_S
from workloads.media import CELLS, cells_of
from workloads.requests import Requests


def plain_csv(requests: Requests) -> str:
    """The text of the file; `Trace.to_csv` says which columns it has."""
    header = ["arrival_s", "prompt_tokens", "output_tokens"]
    columns: list[list[Any]] = [
        [_decimal_s(ns) for ns in requests.arrival_ns.tolist()],
        requests.prompt_tokens.tolist(),
        requests.output_tokens.tolist(),
    ]
    if requests.models:
        index = [0] * len(requests) if requests.model_index is None else requests.model_index.tolist()
        header.append("model")
        columns.append([requests.models[i] for i in index])
    if requests.deadline_ns is not None:
        header.append("deadline_s")
        columns.append(["" if ns < 0 else _decimal_s(ns) for ns in requests.deadline_ns.tolist()])
    for name, may_be_blank in (("session", True), ("adapter", True), ("priority", False), ("max_tokens", False)):
        if (numbers := getattr(requests, name)) is not None:
            header.append(name)
            columns.append(["" if may_be_blank and number < 0 else number for number in numbers.tolist()])
    if requests.abort_ns is not None:
        header.append("abort_s")
        columns.append(["" if ns < 0 else _decimal_s(ns) for ns in requests.abort_ns.tolist()])
    for name, index, names in (
        ("class", requests.class_index, requests.classes),
        ("tenant", requests.tenant_index, requests.tenants),
    ):
        if index is not None:
            header.append(name)
            columns.append([names[row] for row in index.tolist()])
    for name in ("predicted_tokens", "encoder_tokens"):
        if (numbers := getattr(requests, name)) is not None:
            header.append(name)
            columns.append(numbers.tolist())
    media = {cells.column: cells_of(requests, medium) for medium, cells in CELLS.items()}
    named = {**media, f"prefix_blocks_{requests.prefix_block_tokens}": _blocks_of(requests)}
    kept = {name: cells for name, cells in named.items() if cells is not None}
    header += kept
    columns += kept.values()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _blocks_of(requests: Requests) -> list[str] | None:
    if requests.prefix_blocks is None or requests.prefix_offsets is None:
        return None
    ids, offsets = requests.prefix_blocks.tolist(), requests.prefix_offsets.tolist()
    return [" ".join(map(str, ids[offsets[i] : offsets[i + 1]])) for i in range(len(requests))]


def _decimal_s(ns: int) -> str:
    return f"{ns // NS_PER_S}.{ns % NS_PER_S:09d}"
