"""Exports of the tools by which people log their requests: taken as they are, or refused with what would take them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.workloads.exports import EXPORTS, Export
from workloads import read_trace


def put(export: Export, folder: Path) -> Path:
    path = folder / export.name
    if isinstance(export.content, bytes):
        path.write_bytes(export.content)
        return path
    path.mkdir()
    for name, content in export.content.items():
        (path / name).write_bytes(content)
    return path


def check(export: Export, path: Path) -> None:
    timed = export.arrival_s is not None
    if export.refused:
        with pytest.raises(ValueError, match=r"\S") as caught:
            read_trace(path, timed=timed)
        missing = [text for text in export.refused if text not in str(caught.value)]
        assert not missing, str(caught.value)
        if not export.way_out:
            return
    trace = read_trace(path, timed=timed, **export.way_out)
    assert len(trace) >= 2
    if export.arrival_s is not None:
        assert trace.arrival_s.tolist() == pytest.approx(export.arrival_s, abs=2e-3)
    if export.prompts is not None:
        assert trace.prompt_tokens.tolist() == list(export.prompts)
    if export.outputs is not None:
        assert trace.output_tokens.tolist() == list(export.outputs)
    assert not [text for text in export.notes if text not in " ".join(trace.notes)], trace.notes


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.tool)
def test_an_export_is_taken_or_refused_with_the_way_out(export, tmp_path):
    check(export, put(export, tmp_path))


@pytest.mark.parametrize("export", [e for e in EXPORTS if isinstance(e.content, bytes)], ids=lambda export: export.tool)
def test_a_compressed_export_is_as_the_plain_one(export, tmp_path):
    path = tmp_path / f"{export.name}.gz"
    assert isinstance(export.content, bytes)
    path.write_bytes(gzip.compress(export.content))
    check(export, path)
