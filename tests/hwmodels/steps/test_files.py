"""Files of measured steps: their forms, and what is wrong with one in a sentence."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hwmodels.steps.files import read_steps

PLAIN = """\
# taken on a machine of ours
batch_size,new_tokens,cached_tokens,latency_ms
1,256,0,12
2,512,1024,30
4,1,1023,6
8,1,2047,7
"""


def written(folder: Path, text: str, name: str = "steps.csv") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_tokens_of_a_plain_table_are_those_of_each_sequence(tmp_path: Path) -> None:
    found = read_steps(written(tmp_path, PLAIN), {})

    assert found.prompts.rows.tolist() == [256, 1024]
    assert found.prompts.keys.tolist() == [128.5, 1024 + 256.5]
    assert found.decodes.rows.tolist() == [4, 8]
    assert found.decodes.keys.tolist() == [1024, 2048]
    assert found.decodes.seconds.tolist() == pytest.approx([6e-3, 7e-3])
    assert found.notes == ()


@pytest.mark.parametrize(("unit", "value"), [("latency_us", "7000"), ("latency_s", "0.007"), ("latency_ms", "7")])
def test_latencies_are_in_the_unit_of_their_column(tmp_path: Path, unit: str, value: str) -> None:
    text = f"batch_size,new_tokens,past_kv,{unit}\n1,1,9,{value}\n1,8,0,{value}\n"

    assert read_steps(written(tmp_path, text), {}).decodes.seconds.tolist() == pytest.approx([7e-3])


def test_a_prompt_of_one_token_is_told_from_a_decode_by_its_phase(tmp_path: Path) -> None:
    text = "phase,batch_size,new_tokens,cached_tokens,latency_ms\nprefill,1,1,9,5\ndecode,1,1,9,5\n"

    found = read_steps(written(tmp_path, text), {})
    assert (len(found.prompts.rows), len(found.decodes.rows)) == (1, 1)


def test_steps_measured_again_count_with_their_median_and_a_note_says_so(tmp_path: Path) -> None:
    found = read_steps(written(tmp_path, PLAIN + "8,1,2047,9\n8,1,2047,8\n"), {})

    assert found.notes == ("steps.csv measures 2 steps again: the median of each counts.",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("cached_tokens", "cached"), "has no column cached_tokens"),
        (("latency_ms", "latency_ms,color"), "row 1 has 4 values under 5 columns"),
        (("8,1,2047,7", "8,1,2047,0"), r"steps\.csv, row 4: latency_ms is above 0; got 0"),
        (("8,1,2047,7", "8,1,2047,nan"), "latency_ms is a finite number"),
        (("8,1,2047,7", "8,1,2047,fast"), "row 4: latency_ms is a number; got 'fast'"),
        (("8,1,2047,7", "0,1,2047,7"), "a whole number of sequences, at least 1; got 0"),
        (("8,1,2047,7", "8,1,-1,7"), "row 4: a step has a whole number of cached tokens, at least 0; got -1"),
        (("8,1,2047,7", "8,1.5,2047,7"), "a whole number of new tokens, at least 1; got 1.5"),
        (("batch_size", "latency_ms"), "two columns of one name"),
    ],
)
def test_what_is_wrong_with_a_plain_table_is_said(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_steps(written(tmp_path, PLAIN.replace(*change)), {})


def test_a_column_that_is_not_read_is_refused(tmp_path: Path) -> None:
    text = "batch_size,new_tokens,cached_tokens,latency_ms,clock\n1,1,9,5,low\n"

    with pytest.raises(ValueError, match="has a column clock, which is not read"):
        read_steps(written(tmp_path, text), {})


def test_decode_rows_that_verify_drafted_tokens_are_refused(tmp_path: Path) -> None:
    text = "phase,batch_size,new_tokens,cached_tokens,latency_ms\ndecode,1,4,9,5\n"

    with pytest.raises(ValueError, match="decode rows compute 4 tokens a sequence"):
        read_steps(written(tmp_path, text), {})


def test_rows_of_several_deployments_are_singled_out_by_where(tmp_path: Path) -> None:
    text = "batch_size,new_tokens,cached_tokens,latency_ms,tp\n1,1,9,5,1\n1,8,0,6,1\n1,1,9,3,2\n1,8,0,4,2\n"
    file = written(tmp_path, text)

    assert read_steps(file, {"tp": 2}).decodes.seconds.tolist() == pytest.approx([3e-3])
    with pytest.raises(
        ValueError, match=r"several deployments: tp is 1, 2; say which in hardware.where, such as \{tp: 1\}"
    ):
        read_steps(file, {})
    file.write_text(text + "1,1,8,none,2\n")
    with pytest.raises(ValueError, match="row 5: latency_ms is a number; got 'none'"):
        read_steps(file, {"tp": 2})
    file.write_text(text)
    with pytest.raises(ValueError, match="has no rows with tp 4; it has tp 1, 2"):
        read_steps(file, {"tp": 4})
    with pytest.raises(ValueError, match="has no column dp that says whose rows they are; it has tp"):
        read_steps(file, {"dp": 4})


FORWARD = {
    "model_path": ["m"] * 4,
    "tp": [1] * 4,
    "partition_policy": ["balanced_v1"] * 4,
    "workload_kind": ["prefill", "prefill", "decode", "decode"],
    "batch_size": [1, 4, 1, 8],
    "total_prefill_tokens": [256, 1024, 0, 0],
    "total_kv_read_tokens": [0, 4096, 128, 8192],
    "latency_ms": [10.0, 30.0, 5.0, 6.0],
}


def forward(folder: Path, said: Mapping[str, Any] | None = None, **columns: Any) -> Path:
    file = folder / "forward.parquet"
    pq.write_table(pa.table({**FORWARD, **columns}), file)
    if said is not None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        whole = {"schema_version": 6, "row_count": 4, "parquet_sha256": digest, **said}
        (folder / "forward.metadata.json").write_text(json.dumps(whole))
    return file


def test_tokens_of_a_whole_forward_table_are_totals_of_the_batch(tmp_path: Path) -> None:
    found = read_steps(forward(tmp_path, {}), {})

    assert found.prompts.rows.tolist() == [256, 1024]
    assert found.prompts.keys.tolist() == [128.5, 1024 + 128.5]
    assert found.decodes.rows.tolist() == [1, 8]
    assert found.decodes.keys.tolist() == [128, 1024]
    assert found.says == {"model_path": "m", "tp": "1"}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"schema_version": 7}, "schema_version is 7, and whole-forward tables of version 6 are read"),
        ({"row_count": 5}, "row_count is 5, and that of forward.parquet is 4"),
        ({"parquet_sha256": "0"}, "parquet_sha256 is 0"),
    ],
)
def test_a_whole_forward_table_is_held_against_the_metadata_beside_it(
    tmp_path: Path, said: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_steps(forward(tmp_path, said), {})


def test_a_whole_forward_table_without_metadata_is_read_with_a_note(tmp_path: Path) -> None:
    (note,) = read_steps(forward(tmp_path), {}).notes
    assert "its schema version and whether it is whole are not checked" in note


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"total_prefill_tokens": [256, 1024, 0, 1]}, "decode rows have prefill tokens"),
        ({"batch_size": [1, 4, 8, 8], "total_kv_read_tokens": [0, 4096, 8192, 8192]}, "measures one step twice"),
        ({"partition_policy": ["skewed"] * 4}, "partition_policy is skewed"),
        ({"workload_kind": ["mixed"] * 4}, "prefill or decode; got 'mixed'"),
        ({"wave": [1] * 4}, "has a column wave, which is not read"),
        ({"backend_version": ["1", "1", "1", "2"]}, "several deployments: backend_version is 1, 2"),
    ],
)
def test_what_is_wrong_with_a_whole_forward_table_is_said(
    tmp_path: Path, columns: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_steps(forward(tmp_path, {}, **columns), {})


def request(**given: Any) -> dict[str, Any]:
    gaps = given.get("itl_ms", [])
    context = {"num_running": [1] * len(gaps), "prefill_tokens": [0] * len(gaps)}
    return {"prompt_tokens": 100, "output_tokens": len(gaps) + 1, "ttft_ms": 20.0, "itl_ctx": context, **given}


def recording(folder: Path, *requests: Mapping[str, Any], zipped: bool = False) -> Path:
    lines = "\n".join(map(json.dumps, ({"meta": {"model": "m", "gpu": "H100", "tp": 2}}, *requests)))
    file = folder / ("trace.jsonl.gz" if zipped else "trace.jsonl")
    file.write_bytes(gzip.compress(lines.encode()) if zipped else lines.encode())
    return file


@pytest.mark.parametrize("zipped", [False, True])
def test_gaps_of_a_recording_are_decode_steps_at_the_mean_context_of_what_ran(tmp_path: Path, zipped: bool) -> None:
    # Both have their first token at 20 ms; the second has 900 prompt tokens.
    both = {"num_running": [2, 2], "prefill_tokens": [0, 0]}
    file = recording(
        tmp_path,
        request(arrival_ms=0.0, itl_ms=[8.0, 8.0], itl_ctx=both),
        request(arrival_ms=0.0, itl_ms=[8.0, 8.0], itl_ctx=both, prompt_tokens=900),
        request(arrival_ms=500.0, itl_ms=[6.0, 6.0]),
        zipped=zipped,
    )

    found = read_steps(file, {})
    by_batch = {rows: (keys, seconds) for rows, keys, seconds in zip(*map(list, found.decodes), strict=True)}
    assert by_batch[1.0] == (pytest.approx(101, rel=0.1), pytest.approx(6e-3))
    assert by_batch[2.0] == (pytest.approx(501, rel=0.1), pytest.approx(8e-3))
    assert found.says == {"model": "m", "gpu": "H100", "tp": "2"}


def test_prompts_of_a_recording_are_first_tokens_of_lone_requests_and_gaps_in_which_prompts_ended(
    tmp_path: Path,
) -> None:
    one = {"num_running": [1, 1, 1], "prefill_tokens": [0, 400, 0]}
    file = recording(
        tmp_path,
        request(concurrency=1, itl_ms=[6.0, 26.0, 6.0], itl_ctx=one),
        request(concurrency=2, ttft_ms=77.0, itl_ms=[7.0, 7.0, 7.0], prompt_tokens=4000),
    )

    found = read_steps(file, {}).prompts
    # The gap of 26 ms has a decode in it that is the least there is.
    assert dict(zip(found.rows.tolist(), found.seconds.tolist(), strict=True)) == pytest.approx(
        {100: 20e-3, 400: 26e-3}
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([request(itl_ms=[6.0, 7.0], itl_tokens=[2, 1])], "1 requests with speculation"),
        ([request(itl_summary={"mean_ms": 8, "count": 3})], "1 requests with a mean gap alone"),
        ([request(itl_ms=[6.0], itl_ctx=None)], "1 requests whose gaps do not say what ran in them"),
        ([request(cached_tokens=100)], "1 requests with times of 0, or with no prompt token to compute"),
    ],
)
def test_what_of_a_recording_is_not_used_is_counted_in_notes(
    tmp_path: Path, lines: list[Mapping[str, Any]], said: str
) -> None:
    enough = [request(itl_ms=[6.0]), request(itl_ms=[9.0], prompt_tokens=5000)]

    assert any(said in note for note in read_steps(recording(tmp_path, *enough, *lines), {}).notes)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda f: recording(f, {"scheduler": {}}), "statistics of steps, which say nothing of their times"),
        (lambda f: recording(f, request(colour=1)), "line 2 has a key colour, which is not read"),
        (lambda f: recording(f, request()), "0 different decode steps without prompts"),
        (lambda f: recording(f, {"prompt_tokens": 3}), "a request has prompt_tokens, ttft_ms"),
        (lambda f: written(f, "{", "trace.jsonl"), "is no JSONL"),
        (lambda f: written(f, "[]", "trace.jsonl"), "line 1 is no JSON object"),
        (lambda f: written(f, "x", "trace.jsonl.gz"), "cannot be read"),
        (lambda f: written(f, "x", "steps.parquet"), "is no Parquet"),
        (lambda f: written(f, "x", "steps.txt"), "is no table of steps; give a table in Parquet or CSV"),
        (lambda f: written(f, "batch_size,new_tokens,cached_tokens,latency_ms\n"), "has no rows"),
        (lambda f: written(f, ""), "has no column batch_size"),
    ],
)
def test_what_is_no_file_of_steps_is_said(tmp_path: Path, made: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_steps(made(tmp_path), {})
