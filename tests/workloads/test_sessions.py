"""Sessions from files: who waits for whom, how long, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workloads import Deterministic, Trace, read_sessions, reuse

MS = 1_000_000
STARTS = Deterministic(rate_per_s=1.0)
AGENTIC = Path(__file__).resolve().parents[3] / "shared" / "serving" / "agentic_sessions.parquet"


def row(session: int, tokens: int, ids: list[int], **more) -> dict:
    return {"session_id": session, "input_length": tokens, "output_length": 5, "hash_ids": ids, **more}


TWO_TURNS = [row(8, 130, [0, 1], delay=0), row(3, 70, [7]), row(8, 200, [0, 1, 2], delay=1500, timestamp=9000)]


def json_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in rows) + "\n")
    return path


def parquet(path: Path, rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for each in rows for name in each)
    pq.write_table(pa.table({name: [each.get(name) for each in rows] for name in names}), path)
    return path


def waits(trace: Trace) -> list[list[tuple[int, int]]]:
    follows = trace.follows
    if follows is None:
        return [[] for _ in range(len(trace))]
    edges = list(zip(follows.rows.tolist(), (follows.delay_ns // MS).tolist(), strict=True))
    return [edges[a:b] for a, b in zip(follows.offsets[:-1].tolist(), follows.offsets[1:].tolist(), strict=True)]


@pytest.mark.parametrize("write", [json_lines, parquet])
def test_a_turn_waits_for_the_one_before_it(tmp_path, write):
    trace = read_sessions(write(tmp_path / "s", TWO_TURNS), starts=STARTS)
    assert trace.prompt_tokens.tolist() == [130, 70, 200]
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.prefix_block_tokens == 64
    assert trace.prefix_of(2).tolist() == [0, 1, 2]
    assert waits(trace) == [[], [], [(0, 1500)]]


def test_a_main_agent_waits_for_the_agents_that_it_started(tmp_path):
    rows = [
        row(1, 64, [0], agent=0, request=0),
        row(1, 64, [1], agent=1, request=0, spawned_by_request=0, delay=3),
        row(1, 64, [2], agent=2, request=0, spawned_by_request=0),
        row(1, 128, [1, 3], agent=1, request=1, delay=4),
        row(1, 192, [0, 4, 5], agent=0, request=1, delay=20),
        row(1, 192, [0, 4, 6], agent=0, request=2, delay=30),
    ]
    trace = read_sessions(json_lines(tmp_path / "s", rows), starts=STARTS, block_tokens=64)
    assert waits(trace) == [[], [(0, 3)], [(0, 0)], [(1, 4)], [(0, 20), (3, 0), (2, 0)], [(4, 30)]]


def test_nobody_stands_before_whom_it_waits_for_even_where_stamps_say_so(tmp_path):
    rows = [
        row(1, 64, [0], agent=0, request=0, timestamp=0),
        row(1, 64, [1], agent=1, request=0, spawned_by_request=0, timestamp=900),
        row(1, 192, [0, 4, 5], agent=0, request=1, timestamp=500),
    ]
    trace = read_sessions(json_lines(tmp_path / "s", rows), starts=STARTS, block_tokens=64)
    assert waits(trace) == [[], [(0, 0)], [(0, 0), (1, 0)]]


def test_ids_name_an_answer_that_the_next_prompt_goes_on_from(tmp_path):
    # 120 tokens and 5 of an answer are one full block of 64, and 130 and 5 two; the third prompt of the first session starts anew.
    rows = [row(1, 125, [0]), row(1, 200, [0, 1, 2]), row(1, 70, [9]), row(2, 60, []), row(2, 66, [4])]
    trace = read_sessions(json_lines(tmp_path / "s", rows), starts=STARTS, block_tokens=64)
    of_session = {
        number: [trace.prefix_of(i).tolist() for i in np.flatnonzero(trace.session == number)] for number in (0, 1)
    }
    assert of_session == {0: [[0, 1], [0, 1, 2], [9]], 1: [[4], [4]]}


def test_a_prompt_too_short_for_the_answer_before_it_does_not_name_it(tmp_path):
    for tokens, first in ((134, [0]), (135, [0, 1])):
        rows = [{**row(1, 100, [0]), "output_length": 35}, row(1, tokens, [0, 1])]
        trace = read_sessions(json_lines(tmp_path / "s", rows), starts=STARTS, block_tokens=64)
        assert trace.prefix_of(0).tolist() == first


def test_stamps_that_go_backwards_give_way_to_who_waits_for_whom(tmp_path):
    rows = [row(1, 64, [i], timestamp=stamp) for i, stamp in enumerate((9000, 5000, 1000))]
    trace = read_sessions(json_lines(tmp_path / "s", rows), starts=STARTS)
    assert [trace.prefix_of(i).tolist() for i in range(3)] == [[0], [1], [2]]
    assert waits(trace) == [[], [(0, 0)], [(1, 0)]]
    assert len(set(trace.arrival_ns.tolist())) == 1


def test_what_is_left_out_holds_nobody_up(tmp_path):
    trace = read_sessions(json_lines(tmp_path / "s", TWO_TURNS), starts=STARTS)
    assert waits(trace.take([1, 2])) == [[], []]
    assert waits(trace.take([0, 2])) == [[], [(0, 1500)]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"session_id": 1, "input_length": 3, "output_length": 1}],
            "line 1: sessions need the columns .*; hash_ids is missing",
        ),
        ([row(1, 64, [0], delay=-3)], "row 1, column delay: expected milliseconds from 0; got -3"),
        ([row(1, 64, [0], delay="soon")], "row 1, column delay: expected a number; got 'soon'"),
        ([row(1, 64, [-1])], "line 1, column hash_ids: expected a list of whole numbers from 0"),
        ([row(1, 64, [10**25])], "line 1, column hash_ids: expected a list of whole numbers from 0"),
        ([row(1, 64, [0]), row(1, 64, [0], delay=1e30)], "row 2, column delay: expected milliseconds from 0; got 1e"),
        ([row(1, 0, [])], "row 1: input_length must be at least 1; got 0"),
        ([row("abc", 64, [0])], "row 1: session_id is a whole number that fits in 64 bits; got 'abc'"),
        ([row(1, 64, [])], "no prompt has hash_ids"),
        (
            [row(1, 130, [0, 1]), row(2, 70, [7]), row(1, 1000, [0, 1, 2])],
            "leave open how many tokens .* mend rows whose ids do not cover their prompt",
        ),
        ([row(1, 100, [0, 1, 2, 3, 4])], "leave open how many tokens an id stands for; give block_tokens"),
        (
            [row(1, 200, [0, 1, 2]), row(1, 64, [0], agent=1)],
            "row 2, column spawned_by_request: agent 1 needs a request",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read_sessions(json_lines(tmp_path / "s.jsonl", rows), starts=STARTS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1, 130, [0.0, 1.5])], "column hash_ids: expected lists of whole numbers; got list<.*: double>"),
        ([row(1, 130, ["a", "b"])], "column hash_ids: expected lists of whole numbers; got list<.*: string>"),
        ([row(1, 70, [0]), row(1, 130, [0, None])], "row 2, column hash_ids: expected whole numbers .*; got nothing"),
        ([row(1, 70, [0]), row(1, 130, [0, -1])], "row 2, column hash_ids: expected whole numbers from 0 .*; got -1"),
        ([row(1, 70, [0], delay="soon")], "column delay: expected numbers; got string"),
        ([row(1, None, [0]), row(1, 70, [0])], "row 1: input_length is a whole number; got nan"),
        ([], "sessions need the columns"),
    ],
)
def test_a_parquet_file_that_cannot_be_meant_is_refused_in_a_sentence(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read_sessions(parquet(tmp_path / "s", rows), starts=STARTS)


def test_ids_of_parquet_that_do_not_fit_in_64_bits_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = pa.array([[2**63]], pa.list_(pa.uint64()))
    table = pq.read_table(parquet(tmp_path / "s", [row(1, 70, [0])])).drop(["hash_ids"]).append_column("hash_ids", ids)
    pq.write_table(table, tmp_path / "s")
    with pytest.raises(ValueError, match=f"row 1, column hash_ids: .* fit in 64 bits; got {2**63}"):
        read_sessions(tmp_path / "s", starts=STARTS)


def test_a_parquet_file_without_rows_has_no_requests(tmp_path):
    import pyarrow.parquet as pq

    path = parquet(tmp_path / "s", TWO_TURNS)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ValueError, match="no requests"):
        read_sessions(path, starts=STARTS)


def test_sessions_are_read_from_parquet_without_data_frames(tmp_path):
    path = parquet(tmp_path / "s", TWO_TURNS)  # with and without gaps, and lists
    code = (
        "import sys; from workloads import Deterministic, read_sessions; "
        f"print(len(read_sessions({str(path)!r}, starts=Deterministic(rate_per_s=1.0))), 'pandas' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "3 False\n"
    )


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64"])
def test_numbers_of_any_width_are_read_from_parquet(tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(TWO_TURNS)
    lengths = pa.array(np.array([10, 20, 30], kind))
    pq.write_table(
        table.set_column(table.schema.get_field_index("output_length"), "output_length", lengths), tmp_path / "s"
    )
    assert read_sessions(tmp_path / "s", starts=STARTS).output_tokens.tolist() == [10, 30, 20]  # by their times


def test_ids_that_do_not_cover_the_prompt_are_refused_and_none_at_all_are_not(tmp_path):
    short = json_lines(tmp_path / "short", [row(1, 130, [0, 1]), row(1, 1000, [0, 1, 2])])
    with pytest.raises(ValueError, match="row 2, column hash_ids: 3 ids of 64 tokens do not cover the prompt of 1000"):
        read_sessions(short, starts=STARTS, block_tokens=64)
    none = json_lines(tmp_path / "none", [row(1, 130, [0, 1]), row(1, 70, [0]), row(1, 1000, [])])
    trace = read_sessions(none, starts=STARTS)
    assert (trace.prefix_block_tokens, trace.prefix_of(2).tolist()) == (64, [])


@pytest.mark.slow(reason="a whole recorded trace")
def test_the_recorded_sessions_find_their_published_share_again():
    if not AGENTIC.exists():
        pytest.skip("the recorded sessions are not in ../shared/serving")
    trace = read_sessions(AGENTIC, starts=STARTS)
    assert len(trace) == 10_321
    assert trace.prefix_block_tokens == 64
    # The index of the recording: a cache without limit finds 96.05 % of the prompt tokens.
    assert reuse(_prompts_only(trace)).best_hit_rate == pytest.approx(0.9605, abs=5e-5)
    assert reuse(trace).best_hit_rate > 0.9605
    assert np.count_nonzero(trace.follows.counts == 0) == 146


def _prompts_only(trace: Trace) -> Trace:
    pieces = [trace.prefix_of(row)[: trace.prompt_tokens[row] // 64] for row in range(len(trace))]
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)])
    return replace(trace, prefix_blocks=np.concatenate(pieces), prefix_offsets=offsets)


@pytest.mark.parametrize(
    ("kind", "last", "held"), [("int32", 2**31 - 1, 4), ("int64", 2**31 - 1, 4), ("int64", 2**31, 8)]
)
def test_ids_that_fit_in_32_bits_are_kept_in_them_and_longer_ones_are_not(tmp_path, kind, last, held):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"session_id": [1, 2], "input_length": [128, 64], "output_length": [5, 5]}
    ids = pa.array([[1, last], [3]], pa.list_(getattr(pa, kind)()))
    pq.write_table(pa.table({**columns, "hash_ids": ids}), tmp_path / "s")
    trace = read_sessions(tmp_path / "s", starts=STARTS, block_tokens=64)
    assert trace.prefix_blocks.itemsize == held
    assert trace.prefix_blocks.tolist() == [1, last, 3]


def test_the_row_of_a_wrong_id_is_named_however_far_behind_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("workloads.sessions._ROWS", 2)
    rows = [row(number, 64, [number]) for number in range(7)]
    rows[5]["hash_ids"] = [-1]
    with pytest.raises(ValueError, match="row 6, column hash_ids: expected whole numbers from 0"):
        read_sessions(parquet(tmp_path / "s", rows), starts=STARTS)
