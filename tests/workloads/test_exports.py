"""Exports of the tools by which people log their requests: taken as they are, or refused with what would take them."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads.exports import EXPORTS, Export
from workloads import Trace, read_trace
from workloads.records import rows_of
from workloads.texts import Approximate


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


ROWS = "ts,p,o\n"
NAMED = {"arrival": "ts", "prompt_tokens": "p", "output_tokens": "o"}


def told(trace: Trace) -> str:
    return "\n".join(trace.notes)


@pytest.mark.parametrize(
    ("stamps", "after_s", "said"),
    [
        (("1746100800", "1746100801.25"), 1.25, "seconds since 1970"),
        (("1746100800000", "1746100801250"), 1.25, "milliseconds since 1970"),
        (("1746100800000000", "1746100801250001"), 1.250001, "microseconds since 1970"),
        (("1746100800000000000", "1746100801250000001"), 1.250000001, "nanoseconds since 1970"),
        (("0.5", "1.75"), 1.25, "a zero of its own"),
        (("2025-05-01T12:00:00Z", "2025-05-01T14:00:01.25+02:00"), 1.25, "Arrivals are ts."),
        (("2025-05-01 12:00:00", "2025-05-01 12:00:01,250000001"), 1.250000001, "no zone is said"),
        (("01/May/2025:12:00:00 +0000", "01/May/2025:14:00:01 +0200"), 1.0, "Arrivals are ts."),
        (("2025-05-01T12:00:00+0530", "2025-05-01T06:30:01UTC"), 1.0, "Arrivals are ts."),
        (("2025-05-01T09:00:00-03", "2025-05-01T12:00:01Z"), 1.0, "Arrivals are ts."),
    ],
)
def test_times_are_told_apart_by_how_they_look_and_how_large_they_are(write, stamps, after_s, said):
    text = "ts,p,o\n" + "".join(f'"{stamp}",5,6\n' for stamp in stamps)
    trace = read_trace(write(text), columns=NAMED)
    assert trace.arrival_ns.tolist() == [0, round(after_s * 1e9)]
    assert said in told(trace)


def test_a_unit_behind_a_column_or_in_its_name_is_taken_before_the_size(write):
    rows = "0,5,6\n1500,5,6\n"
    for text, column in ((ROWS + rows, "ts:ms"), ("t_ms,p,o\n" + rows, "t_ms"), ("t (ms),p,o\n" + rows, "t (ms)")):
        assert read_trace(write(text), columns={**NAMED, "arrival": column}).arrival_s.tolist() == [0, 1.5]


@pytest.mark.parametrize("value", ["soon", "2025-02-30T00:00:00Z", "2025-05-01T25:00:00Z", "2025-05-01 12:00:00 CEST"])
def test_what_is_no_time_is_refused_by_line_and_column(write, value):
    with pytest.raises(ValueError, match=rf"line 3, column ts: expected a time .*{value[:4]}"):
        read_trace(write(f"{ROWS}2025-05-01T12:00:00Z,1,1\n{value},1,1\n"), columns=NAMED)


@pytest.mark.parametrize(
    ("form", "stamps", "after_s"),
    [
        ("%d.%m.%Y %H:%M:%S", ("03.11.2026 09:00:00", "04.11.2026 09:00:01"), 86_401),
        ("%m/%d/%Y %H:%M", ("11/03/2026 09:00", "11/04/2026 09:00"), 86_400),
        ("%d/%m/%Y %H:%M", ("11/03/2026 09:00", "11/04/2026 09:00"), 31 * 86_400),
        ("%b %d, %Y %H:%M:%S.%f", ("Nov 03, 2026 09:00:00.000000", "Nov 03, 2026 09:00:00.250001"), 0.250001),
        ("%d.%m.%Y %H:%M %z", ("03.11.2026 09:00 +0100", "03.11.2026 09:00 +0000"), 3600),
    ],
)
def test_dates_of_another_order_are_refused_with_the_way_out_which_takes_them(write, form, stamps, after_s):
    file = write("ts,p,o\n" + "".join(f'"{stamp}",5,6\n' for stamp in stamps))
    with pytest.raises(
        ValueError, match=r"line 2, column ts: .*--map 'arrival=ts:%d\.%m\.%Y %H:%M:%S' \(workload\.columns\)"
    ):
        read_trace(file, columns=NAMED)
    trace = read_trace(file, columns={**NAMED, "arrival": f"ts:{form}"})
    assert trace.arrival_ns.tolist() == [0, round(after_s * 1e9)]
    assert f"Arrivals are ts, written as {form}" in told(trace)
    assert ("UTC" in told(trace)) == ("%z" not in form)
    with pytest.raises(ValueError, match="line 2, column ts: expected a time written as %Y week %U; got"):
        read_trace(file, columns={**NAMED, "arrival": "ts:%Y week %U"})


def test_a_duration_has_a_unit_and_no_format(write):
    named = {"end": "ts", "duration": "p:%H", "prompt_tokens": "p", "output_tokens": "o"}
    with pytest.raises(ValueError, match="a duration is a number"):
        read_trace(write(ROWS + "1,5,6\n"), columns=named)


def test_arrivals_are_ends_less_durations_where_only_these_are_there(write):
    text = "end_time,latency_ms,prompt_tokens,completion_tokens\n2025-05-01T12:00:09Z,9000,1,2\n2025-05-01T12:00:10Z,500,3,4\n"
    assert read_trace(write(text)).arrival_s.tolist() == [0, 9.5]
    assert "Arrivals are the end, end_time, less latency_ms in milliseconds." in told(read_trace(write(text)))
    named = {"end": "e", "duration": "d:ms", "prompt_tokens": "p", "output_tokens": "o"}
    assert read_trace(write("e,d,p,o\n20,1000,1,2\n21,500,3,4\n"), columns=named).arrival_s.tolist() == [0, 1.5]


def test_requests_without_outputs_are_left_out_given_their_bound_or_drawn(write):
    head = "timestamp,prompt_tokens,completion_tokens,max_tokens\n"
    path = write(head + "".join(f"{i},10,{'' if i % 2 else 100 + i},{500 + i}\n" for i in range(40)))
    left = read_trace(path)
    assert (len(left), left.output_tokens.min()) == (20, 100)
    assert "of 40 rows 20 are taken; left out are 20 without output tokens (--missing-output" in told(left)
    assert "--missing-output" not in told(read_trace(path, missing_output="drop"))
    assert read_trace(path, missing_output="max_tokens").output_tokens[:4].tolist() == [100, 501, 102, 503]
    drawn = [read_trace(path, missing_output="draw", seed=seed).output_tokens for seed in (0, 0, 1)]
    assert set(drawn[0][1::2].tolist()) <= set(drawn[0][::2].tolist())
    assert drawn[0].tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert "outputs of 20 requests are drawn from those of the other 20" in told(
        read_trace(path, missing_output="draw")
    )
    with pytest.raises(ValueError, match="missing_output is one of drop, max_tokens, draw; got 'guess'"):
        read_trace(path, missing_output="guess")  # type: ignore[arg-type]


def test_failed_requests_are_left_out_with_their_number_or_kept(write):
    statuses = ("200", "429", "500", "ok", "ERROR", "timeout", "201", "")
    path = write(
        "timestamp,prompt_tokens,completion_tokens,status\n"
        + "".join(f"{i},10,5,{s}\n" for i, s in enumerate(statuses))
    )
    assert read_trace(path).arrival_s.tolist() == [0, 3, 6, 7]
    assert "left out are 4 failed (--keep-failed" in told(read_trace(path))
    assert len(read_trace(path, keep_failed=True)) == 8


def test_columns_that_are_named_go_before_those_that_are_found_and_may_be_sums(write):
    record = {
        "timestamp": 5,
        "usage": {"input_tokens": 7, "cache_read_input_tokens": 100, "output_tokens": 3},
        "n.b": {"in": 1},
    }
    path = write(json.dumps(record) + "\n" + json.dumps({**record, "timestamp": 6}), "log.jsonl")
    assert read_trace(path).prompt_tokens.tolist() == [107, 107]
    assert read_trace(path, columns={"prompt_tokens": "n.b.in"}).prompt_tokens.tolist() == [1, 1]
    assert read_trace(path, columns={"prompt_tokens": "n.b.in+usage.input_tokens"}).prompt_tokens.tolist() == [8, 8]
    for columns, message in (
        (
            {"prompt_tokens": "usage.inputs"},
            r"no column 'usage.inputs', which prompt_tokens is said to be in; it has timestamp, usage.*: name another with "
            r"--map prompt_tokens=COLUMN \(workload.columns\)$",
        ),
        ({"prompts": "n.b.in"}, "'prompts' is no column of a trace; did you mean prompt?"),
        ({"tokens_that_came": "n.b.in"}, "'tokens_that_came' is no column of a trace; known are arrival"),
    ):
        with pytest.raises(ValueError, match=message):
            read_trace(path, columns=columns)


def test_every_column_of_the_plain_format_can_be_named_in_an_export(write):
    columns = {
        "arrival_s": "0 2.5", "prompt_tokens": "30 40", "output_tokens": "5 6", "max_tokens": "9 10", "deadline_s": "3 4.5",
        "abort_s": "7 8", "priority": "1 0", "session": "4 4", "model": "a b", "class": "c d", "tenant": "e f",
        "encoder_tokens": "576 0", "predicted_tokens": "4 7", "adapter": "3 0",
        "images": "64x48#7 32x32", "audio_s": "1.5 4#2",
    }  # fmt: skip
    rows = ["\n".join(",".join(row) for row in zip(*(values.split() for values in columns.values()), strict=True)), ""]
    plain = read_trace(write("\n".join([",".join(columns), *rows])))
    named = {"arrival" if name == "arrival_s" else name: f"my {name[::-1]}" for name in columns}
    export = read_trace(write("\n".join([",".join(named.values()), *rows]), "log.csv"), columns=named)
    for name in (*plain.LEAST, "models", "classes", "tenants"):
        mine, theirs = getattr(export, name), getattr(plain, name)
        if name == "session":
            assert mine is None  # all rows are of one session
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
            assert theirs is not None, f"{name} is a column that this test does not write"


@pytest.mark.parametrize("own_names", [False, True])
@given(cells=st.lists(st.sampled_from(["", "sql-3", "chat", "v2.5", "a:b", "7b"]), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_names_of_adapters_are_numbered_in_the_order_in_which_they_are_first_seen(tmp_path_factory, own_names, cells):
    column = "lora_name" if own_names else "adapter"
    rows = [f"{at},5,6,{cell}" for at, cell in enumerate(cells)]
    path = tmp_path_factory.mktemp("named") / "log.csv"
    path.write_text("\n".join([f"arrival_s,prompt_tokens,output_tokens,{column}", *rows, ""]))
    trace = read_trace(path, columns={"adapter": "lora_name"} if own_names else None)
    names = list(dict.fromkeys(filter(None, cells)))
    np.testing.assert_array_equal(trace.adapter, [names.index(cell) if cell else -1 for cell in cells])
    notes = [note for note in trace.notes if "adapters have" in note]
    assert [f"adapters have {len(names)} name{'s' * (len(names) > 1)}," in note for note in notes] == [True] * bool(
        names
    )


@pytest.mark.parametrize("own_names", [False, True])
@pytest.mark.parametrize(
    ("cells", "expected", "got"),
    [
        ("sql 3", "a name of an adapter, as in the rows above", "3"),
        ("0 sql", "a whole number of an adapter, as in the rows above", "sql"),
        ("0 1.5", "a whole number from 0, or the name of an adapter", "1.5"),
        ("0 -4", "a whole number from 0, or the name of an adapter", "-4"),
    ],
)
def test_a_column_of_adapters_holds_numbers_or_names(write, own_names, cells, expected, got):
    column = "lora_name" if own_names else "adapter"
    rows = [f"{at},5,6,{cell}" for at, cell in enumerate(cells.split())]
    path = write("\n".join([f"arrival_s,prompt_tokens,output_tokens,{column}", *rows, ""]), "log.csv")
    with pytest.raises(ValueError, match=re.escape(f"column adapter: expected {expected}; got '{got}'")):
        read_trace(path, columns={"adapter": "lora_name"} if own_names else None)


def test_adapters_of_json_may_be_numbers_and_empty(write):
    columns = {"arrival": "at", "prompt_tokens": "p", "output_tokens": "o", "adapter": "lora"}
    lines = [f'{{"at": {at}, "p": 5, "o": 6, "lora": {cell}}}' for at, cell in enumerate(["3", "null", "NaN", "3.0"])]
    trace = read_trace(write("\n".join(lines), "log.jsonl"), columns=columns)
    np.testing.assert_array_equal(trace.adapter, [3, -1, -1, 3])


def test_cells_without_images_are_empty_and_a_guess_is_in_every_row(write):
    named = {**NAMED, "encoder_tokens": "images+videos"}
    trace = read_trace(write("ts,p,o,images,videos\n1,5,6,576,\n2,5,6,,\n3,5,6,1,2\n"), columns=named)
    assert trace.encoder_tokens.tolist() == [576, 0, 3]
    with pytest.raises(ValueError, match="column predicted_tokens: expected numbers; got None"):
        read_trace(write("ts,p,o,guess\n1,5,6,4\n2,5,6,\n"), columns={**NAMED, "predicted_tokens": "guess"})
    with pytest.raises(ValueError, match=r"expected a whole number of tokens from 0; got '1\.5'"):
        read_trace(write("ts,p,o,images\n1,5,6,1.5\n"), columns={**NAMED, "encoder_tokens": "images"})


def test_images_of_an_export_go_with_their_requests_and_have_a_form(write):
    named = {**NAMED, "images": "pictures"}
    trace = read_trace(write("ts,p,o,pictures\n2,5,6,64x48#7 8x8#1\n1,5,6,\n3,5,6,8x8#1\n"), columns=named)
    assert [trace.media_of("image", row) for row in range(3)] == [[], [(64, 48, 7), (8, 8, 1)], [(8, 8, 1)]]
    with pytest.raises(ValueError, match=r"column images: expected images with blanks between them, .*; got 'a\.png'"):
        read_trace(write("ts,p,o,pictures\n1,5,6,a.png\n"), columns=named)


@pytest.mark.parametrize("first", ["2026-11-03 09:00:00,120,30", "0,120,30", "a;1;2", "1746100800.5,llama,7,8"])
def test_a_file_without_names_is_told_to_have_some(write, first):
    with pytest.raises(ValueError, match="is a row and has no names of columns; put a line with names above it"):
        read_trace(write(f"{first}\n{first}\n"))


def test_formats_with_a_reader_of_their_own_take_no_settings_of_exports(write):
    with pytest.raises(ValueError, match="keep_failed belong to exports, and this file is plain"):
        read_trace(write("arrival_s,prompt_tokens,output_tokens\n0,1,1\n"), keep_failed=True)


def test_folders_and_patterns_are_read_in_order_of_name_and_no_further_than_the_limit(tmp_path):
    for hour in (3, 1, 2):
        rows = "".join(f"{hour * 3600 + i},{hour * 100 + i},1\n" for i in range(4))
        (tmp_path / f"h{hour}.csv").write_text("timestamp,prompt_tokens,completion_tokens\n" + rows)
    (tmp_path / "h9.csv").write_text("no trace\n")
    assert read_trace(tmp_path / "h[1-3].csv").prompt_tokens.tolist() == [
        h * 100 + i for h in (1, 2, 3) for i in range(4)
    ]
    assert read_trace(tmp_path, limit=6).prompt_tokens.tolist() == [100, 101, 102, 103, 200, 201]
    with pytest.raises(ValueError, match=r"h9\.csv: no columns are found in its first line"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match="no file is there that could be part of a trace"):
        read_trace(tmp_path / "x*.csv")


def test_a_limit_reads_no_further_into_an_export_than_it_takes(write):
    # What is behind would be refused.
    lines = [json.dumps({"ts": 1e9 + i, "prompt_tokens": 1 + i, "completion_tokens": 5}) for i in range(20)]
    path = write("\n".join(lines) + "\n{" + "x" * 100, "log.jsonl")
    assert read_trace(path, limit=19).prompt_tokens.tolist() == [*range(1, 20)]
    with pytest.raises(ValueError, match="line 21: expected one JSON object"):
        read_trace(path, limit=21)


def test_columns_that_are_kept_are_those_of_the_whole_file(tmp_path):
    compared = 0
    for export in EXPORTS:
        path = put(export, tmp_path / "")
        try:
            whole = rows_of(path, None)
        except (ValueError, OSError):
            continue
        kept = rows_of(path, None, lambda rows: rows.names)
        assert (kept.names, kept.numbers, kept.is_all) == (whole.names, whole.numbers, True)
        assert {name: kept.column(name) for name in kept.names} == {name: whole.column(name) for name in whole.names}
        compared += isinstance(kept.source, dict)
    assert compared > 5


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_what_nobody_asks_for_is_not_held(name, tmp_path):
    asked = [
        {
            "created": 1.75e9 + i,
            "model": "llama-3.1-8b",
            "usage": {"prompt_tokens": i, "completion_tokens": 5},
            "body": f"{i:04}" * 500,
        }
        for i in range(1, 3001)
    ]
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist(asked), path, compression="none", use_dictionary=False
        )
    else:
        path.write_text("\n".join(map(json.dumps, asked)))
    del asked
    size = path.stat().st_size
    assert size > 6e6
    tracemalloc.start()
    trace = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.prompt_tokens.tolist() == list(range(1, 3001))
    assert peak < size / 2


def test_a_column_that_is_named_is_found_where_few_rows_have_it(write):
    rows = [{"created": 1.75e9 + i, "usage": {"prompt_tokens": 5, "completion_tokens": 5}} for i in range(3000)]
    rows[1501]["rare"] = {"deep": 77}
    path = write("\n".join(map(json.dumps, rows)), "log.jsonl")
    trace = read_trace(path, columns={"prompt_tokens": "rare.deep"})
    assert trace.prompt_tokens.tolist() == [77]
    with pytest.raises(ValueError, match=r"no column 'rare.shallow', which prompt_tokens is said to be in"):
        read_trace(path, columns={"prompt_tokens": "rare.shallow"})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_in_any_way(end, write):
    rows = [{"created": 1.75e9 + i, "usage": {"prompt_tokens": 5 + i, "completion_tokens": 5}} for i in range(9)]
    path = write("\ufeff" + end.join(map(json.dumps, rows)), "log.jsonl")
    assert read_trace(path).prompt_tokens.tolist() == list(range(5, 14))


def test_a_line_that_is_no_object_is_refused_by_its_number(write):
    lines = [
        json.dumps({"created": 1.75e9 + i, "usage": {"prompt_tokens": 5, "completion_tokens": 5}}) for i in range(900)
    ]
    for bad, said in (
        (b"{", "line 701: expected one JSON object"),
        (b"\xff", "line 701: not UTF-8 text; convert the file"),
    ):
        text = "\n".join(lines).encode().split(b"\n")
        text[700] = bad
        with pytest.raises(ValueError, match=said):
            read_trace(write(b"\n".join(text), "log.jsonl"))


def test_a_limit_passes_over_rows_that_are_no_requests(write):
    spans = [{"startTime": f"2025-05-01T12:00:{i:02}Z", "type": "SPAN"} for i in range(30)]
    asked = [{**span, "usage": {"input": 10 + i, "output": 5}} for i, span in enumerate(spans)]
    trace = read_trace(write("\n".join(map(json.dumps, [*spans, *asked])), "log.jsonl"), limit=3)
    assert trace.prompt_tokens.tolist() == [10, 11, 12]


def test_zstd_is_unpacked(write):
    pyarrow = pytest.importorskip("pyarrow")
    text = b"timestamp,prompt_tokens,completion_tokens\n" + b"".join(b"%d,%d,1\n" % (i, i + 1) for i in range(5000))
    packed = pyarrow.compress(text, codec="zstd", asbytes=True)
    assert len(read_trace(write(packed, "log.csv.zst"))) == 5000
    assert len(read_trace(write(packed, "log.csv.zst"), limit=3)) == 3
    with pytest.raises(ValueError, match="the compressed file is damaged"):
        read_trace(write(packed[: len(packed) // 2], "cut.csv.zst"))


SYSTEM = "You help the customers of a shop with their orders and returns. " * 12


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": "system", "content": SYSTEM}, *({"role": roles[i % 2], "content": t} for i, t in enumerate(texts))]


def chats(*prompts: list[dict[str, str]], answer: str = "Yes. ", **more: Any) -> str:
    return "\n".join(
        json.dumps({"ts": 1746100800 + i, "request": {"messages": each}, "response": {"text": answer * 30}, **more})
        for i, each in enumerate(prompts)
    )


def test_prompts_that_begin_alike_share_the_ids_of_their_blocks_and_answers_are_found_in_the_next_prompt(write):
    first, other = said("Where is my order? " * 20), said("May I return it? " * 20)
    following = said("Where is my order? " * 20, "Yes. " * 30, "And when does it come?")
    trace = read_trace(write(chats(first, other, following), "log.jsonl"))
    rows = [trace.prefix_of(i).tolist() for i in range(3)]
    system = len(Approximate().of(SYSTEM)) // 16
    shared = [a == b for a, b in zip(rows[0], rows[1], strict=False)]
    assert all(shared[:system])
    assert not any(shared[system + 1 :])
    # Of the second turn all full blocks of the first one's prompt and answer are known.
    assert rows[2][: len(rows[0])] == rows[0]
    assert len(rows[0]) == (trace.prompt_tokens[0] + trace.output_tokens[0]) // 16
    assert "hashes of blocks alone are kept" in told(trace)


def test_blocks_are_stretched_to_the_tokens_that_the_log_counts(write):
    prompts = [said(f"{word} " * 200) for word in ("order", "return", "refund")]
    counted = read_trace(write(chats(*prompts), "log.jsonl")).prompt_tokens
    halves = [json.loads(line) for line in chats(*prompts).splitlines()]
    for record, tokens in zip(halves, counted.tolist(), strict=True):
        record["usage"] = {"prompt_tokens": tokens // 2, "completion_tokens": 20}
    trace = read_trace(write("\n".join(map(json.dumps, halves)), "halves.jsonl"))
    assert trace.prompt_tokens.tolist() == [tokens // 2 for tokens in counted.tolist()]
    # What all prompts share is the system's message, of which the log counts half as many tokens.
    alike = set(trace.prefix_of(0).tolist()) & set(trace.prefix_of(1).tolist())
    assert len(alike) == pytest.approx(len(Approximate().of(SYSTEM)) / 2 / 16, abs=1)
    assert "2.0" in told(trace)


def test_token_numbers_are_names_of_blocks_as_they_are(write):
    same = list(range(1000, 1064))
    rows = [{"ts": i, "prompt_token_ids": [*same, *[i] * 32], "completion_tokens": 9} for i in range(2)]
    trace = read_trace(write("\n".join(map(json.dumps, rows)), "ids.jsonl"))
    assert trace.prompt_tokens.tolist() == [96, 96]
    shared = [a == b for a, b in zip(trace.prefix_of(0).tolist(), trace.prefix_of(1).tolist(), strict=True)]
    assert shared == [True] * 4 + [False] * 2


def test_a_tokenizer_counts_texts_in_place_of_the_approximation(write, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write('{"ts": 1, "prompt": "one two three four", "response": "five six"}\n' * 2, "log.jsonl")
    trace = read_trace(path, tokenizer=tmp_path / "tokenizer.json")
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([4, 4], [2, 2])
    with pytest.raises(ValueError, match=r"none\.json does not exist; give a tokenizer\.json"):
        read_trace(path, tokenizer=tmp_path / "none.json")


def test_sessions_of_one_name_alone_are_none(write):
    head = "timestamp,prompt_tokens,completion_tokens,session_id\n"
    several = read_trace(write(head + "0,1,1,a\n1,1,1,b\n2,1,1,a\n")).session
    assert several is not None
    assert several.tolist() == [0, 1, 0]
    alone = read_trace(write(head + "0,1,1,a\n1,1,1,a\n"))
    assert alone.session is None
    assert "All rows are of one session" in told(alone)


def test_rows_out_of_order_are_sorted_and_said(write):
    trace = read_trace(write("timestamp,prompt_tokens,completion_tokens\n30,3,1\n10,1,1\n20,2,1\n"))
    assert trace.prompt_tokens.tolist() == [1, 2, 3]
    assert "1 rows came before the one above them; all are sorted by arrival" in told(trace)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_marks_between_columns_are_found(write, mark):
    text = "timestamp,prompt_tokens,completion_tokens,note\n0,1,2,a\n1,3,4,b\n".replace(",", mark)
    assert read_trace(write(text)).output_tokens.tolist() == [2, 4]
