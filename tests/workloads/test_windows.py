"""Windows of time over traces: what is within is taken, what is outside is not held, and reading stops where times are in order."""

from __future__ import annotations

import json
import random
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.sample import few
from workloads import read_trace, readers, records

FIRST = datetime(2026, 11, 3, 9, tzinfo=UTC)
N = 200


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Files are read in pieces that small files have many of."""
    monkeypatch.setattr(records, "_PIECE", 16)
    monkeypatch.setattr(readers, "_PIECE", 16)


def stamp(at_s: float) -> str:
    return (FIRST + timedelta(seconds=at_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def put(folder: Path, kind: str, at_s: list[float]) -> Path:
    """A trace of one kind, whose prompts are the numbers of its rows from 1 on."""
    rows = [(at, n) for n, at in enumerate(at_s, start=1)]
    if kind == "plain":
        text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},{n},1\n" for at, n in rows)
    elif kind == "azure_llm":
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{stamp(at)},{n},1\n" for at, n in rows)
    elif kind == "burstgpt":
        text = "Timestamp,Model,Request tokens,Response tokens\n" + "".join(f"{at},m,{n},1\n" for at, n in rows)
    elif kind == "mooncake":
        records = [{"timestamp": round(1000 * at), "input_length": n, "output_length": 1} for at, n in rows]
        text = "".join(json.dumps(each) + "\n" for each in records)
    elif kind in ("csv", "semicolons", "quoted"):
        mark, quote = (";" if kind == "semicolons" else ","), ('"' if kind == "quoted" else "")
        lines = [f"{stamp(at)}{mark}{n}{mark}1{mark}{quote}no{quote and chr(10)}te{quote}" for at, n in rows]
        text = "\n".join([mark.join(("ts", "prompt_tokens", "output_tokens", "note")), *lines]) + "\n"
    else:
        records = [
            {"ts": stamp(at), "usage": {"prompt_tokens": n, "completion_tokens": 1}, "note": "x"} for at, n in rows
        ]
        if kind == "parquet":
            return parquet(folder, records)
        text = json.dumps(records) if kind == "json" else "".join(json.dumps(each) + "\n" for each in records)
    path = folder / kind
    path.write_text(text)
    return path


def parquet(folder: Path, records: list[dict]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "log.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=40, compression="none")
    return path


OWN = ("plain", "azure_llm", "burstgpt", "mooncake")
EXPORTS = ("csv", "semicolons", "quoted", "jsonl", "json", "parquet")
DATED = ("azure_llm", *EXPORTS)


@pytest.mark.parametrize("kind", [*OWN, *EXPORTS])
@pytest.mark.parametrize("seed", range(4))
def test_a_window_takes_the_rows_between_its_ends_whatever_their_order(kind, seed, tmp_path):
    rng = random.Random(seed)
    at_s = sorted(rng.randrange(100) * 0.5 for _ in range(N))
    if seed % 2:
        rng.shuffle(at_s)
    path = put(tmp_path, kind, at_s)
    since, until = sorted((rng.uniform(-10, 60), rng.uniform(0, 70)))
    options = {} if kind in EXPORTS else {"sort": True}
    limit = rng.choice([None, 3, 40])
    inside = [(at, n) for n, at in enumerate(at_s, start=1) if since <= at - at_s[0] < until][:limit]
    # A limit takes the first rows of exports, in the order of the file, and the first to arrive of other formats.
    if limit is not None and kind not in EXPORTS:
        every = [(at, n) for n, at in enumerate(at_s, start=1) if since <= at - at_s[0] < until]
        inside = sorted(every, key=lambda each: each[0])[:limit]
    inside.sort(key=lambda each: each[0])
    if not inside:
        with pytest.raises(ValueError, match="no requests are left"):
            read_trace(path, since=since, until=until, limit=limit, **options)
        return
    trace = read_trace(path, since=since, until=until, limit=limit, **options)
    assert trace.prompt_tokens.tolist() == [n for _, n in inside]
    assert trace.arrival_s.tolist() == pytest.approx([at - inside[0][0] for at, _ in inside])
    if kind in DATED:
        dates = {"since": stamp(at_s[0] + since), "until": stamp(at_s[0] + until)}
        assert read_trace(path, **dates, limit=limit, **options).prompt_tokens.tolist() == trace.prompt_tokens.tolist()


@pytest.mark.parametrize("kind", [*OWN, *EXPORTS])
def test_what_is_left_out_is_counted_and_said(kind, tmp_path):
    path = put(tmp_path, kind, [*range(60), *range(50, 90)])
    trace = read_trace(path, since=10, until=70, **({} if kind in EXPORTS else {"sort": True}))
    assert f"{path.name}: of 100 rows 70 are taken; left out are 20 from 70 on; 10 before 10." in trace.notes


@pytest.mark.parametrize("kind", [kind for kind in (*OWN, *EXPORTS) if kind != "json"])
def test_reading_stops_at_the_end_of_the_window_where_times_are_in_order(kind, tmp_path):
    path = put(tmp_path, kind, list(range(N)))
    spoil_the_end(path)
    trace = read_trace(path, since=20, until=40)
    assert trace.prompt_tokens.tolist() == list(range(21, 41))
    line = 41 if kind in ("jsonl", "mooncake", "parquet") else 83 if kind == "quoted" else 42
    where = "Row" if kind == "parquet" else "Line"
    assert any(
        f"{where} {line} is the first from 40 on; as times are in order up to it, nothing" in note
        for note in trace.notes
    )
    assert read_trace(path, since=20, limit=5).prompt_tokens.tolist() == list(range(21, 26))
    with pytest.raises(ValueError, match=r"\S"):
        read_trace(path, since=20)


def spoil_the_end(path: Path) -> None:
    """Makes the last rows of a file such that reading them is an error."""
    if path.suffix != ".parquet":
        path.write_text(path.read_text() + "{,,,,,,,,,\n")
        return
    from pyarrow import parquet

    last = parquet.ParquetFile(path).metadata.row_group(4).column(0)
    content = bytearray(path.read_bytes())
    at = last.dictionary_page_offset or last.data_page_offset
    content[at : at + last.total_compressed_size] = b"\xff" * last.total_compressed_size
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind", few(["csv", "jsonl", "parquet", "mooncake", "azure_llm"], 3, reason="memory is traced")
)
def test_what_is_before_the_window_is_not_held(kind, tmp_path):
    path = put(tmp_path, kind, list(range(100)))
    read_trace(path, since=99)  # imports
    peaks = []
    for n in (500, 2000):
        path = put(tmp_path, kind, list(range(n)))
        tracemalloc.start()
        trace = read_trace(path, since=n - 100)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(trace) == 100
    assert peaks[1] < 1.3 * peaks[0] + 50_000


def test_lines_are_named_by_their_numbers_in_the_file(tmp_path):
    path = tmp_path / "log.csv"
    rows = [f"{stamp(at)},{at},1\n" for at in range(50)]
    rows[44] = f"{stamp(44)},many,1\n"
    path.write_text("ts,prompt_tokens,output_tokens\n" + "".join(rows))
    with pytest.raises(
        ValueError, match="line 46, column prompt_tokens: expected a whole number of tokens from 0; got 'many'"
    ):
        read_trace(path, since=40)
    assert len(read_trace(path, since=10, until=40)) == 30
    path.write_text("ts,prompt_tokens,output_tokens\n" + "".join(rows[:30]) + "1\n")
    with pytest.raises(ValueError, match="line 32: expected 3 columns; got 1"):
        read_trace(path, since=10)


def test_seconds_run_from_the_first_row_of_the_first_file_of_a_folder(tmp_path):
    for hour in range(3):
        lines = [
            {"ts": stamp(3600 * hour + at), "prompt_tokens": 1000 * hour + at, "completion_tokens": 1}
            for at in range(1, 60)
        ]
        (tmp_path / f"{hour}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    trace = read_trace(tmp_path, since=3610, until=7203)
    assert trace.prompt_tokens.tolist() == [*range(1011, 1060), *range(2001, 2004)]


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (
            {"since": "soon"},
            "since is a date with a time, such as 2026-11-03T09:00, or seconds from the first row; got 'soon'",
        ),
        ({"until": "03.11.2026"}, "until is a date"),
        ({"since": 9, "until": 9}, "since is before until; got 9 and 9"),
        ({"since": "2026-11-04", "until": "2026-11-03"}, "since is before until"),
        ({"until": "2026-11-03"}, "arrivals run from 2026-11-03T09:00:00Z to 2026-11-03T09:00:00Z and on"),
        (
            {"since": 500},
            r"no requests are left of 200 rows: 200 before 500; arrivals run from 2026-.*T09:00:00Z to .*09:03:19Z",
        ),
        ({"since": 5, "timed": False}, "since and until are about arrivals, which are not read here"),
    ],
)
def test_a_window_that_cannot_be_is_refused(window, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_trace(put(tmp_path, "jsonl", list(range(N))), **window)


def test_dates_are_refused_where_a_trace_has_none(tmp_path):
    for kind in ("plain", "mooncake", "burstgpt"):
        with pytest.raises(ValueError, match="since is a date, 2026-11-03, and the times of the trace are none"):
            read_trace(put(tmp_path, kind, list(range(N))), since="2026-11-03")
