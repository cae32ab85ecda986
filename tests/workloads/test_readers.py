from __future__ import annotations

import gzip
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import read_function_counts, read_function_invocations, read_trace

PLAIN = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
COUNTS = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\n"
CALLS = "app,func,end_timestamp,duration\n"


def test_azure_2023_keeps_100_ns(write):
    trace = read_trace(write(AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319601,3180,8"))
    assert trace.arrival_ns.tolist() == [0, 52_000_100]
    assert trace.prompt_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]
    assert trace.source == "trace.csv"


def test_azure_2024_times_carry_an_offset_and_leave_zero_fractions_out(write):
    trace = read_trace(
        write(
            AZURE
            + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
            + "2024-05-10 00:00:01+00:00,2399,6\n"
            + "2024-05-10T00:00:02Z,76,15\n"
            + "2024-05-10T02:00:03.5+02:00,1,1\n"
            + "2024-05-09 23:00:04-01:00,1,1\n"
        )
    )
    assert trace.arrival_ns.tolist() == [0, 990_070_000, 1_990_070_000, 3_490_070_000, 3_990_070_000]


def test_azure_times_cross_leap_days_and_years(write):
    rows = ["2024-02-28 23:59:59", "2024-02-29 00:00:00", "2024-03-01 00:00:00", "2025-01-01 00:00:00"]
    trace = read_trace(write(AZURE + "".join(f"{row},1,1\n" for row in rows)))
    assert trace.arrival_s.tolist() == [0, 1, 86401, 86401 + 306 * 86400]


def test_burstgpt_has_models_and_seconds(write):
    trace = read_trace(
        write(BURST + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,230,1317,Conversation log\n")
    )
    assert trace.arrival_s.tolist() == [5.0, 45.5]
    assert trace.models == ("ChatGPT", "GPT-4")
    assert trace.output_tokens.tolist() == [18, 230]


def test_burstgpt_failures_without_tokens_can_be_left_out(write):
    path = write(BURST + "5,ChatGPT,0,0,0,API log\n6,ChatGPT,1,1,2,API log\n")
    with pytest.raises(ValueError, match="line 2: a request needs Request tokens or Response tokens above 0"):
        read_trace(path)
    assert read_trace(path, drop_empty=True).arrival_s.tolist() == [6.0]


def test_mooncake_keeps_prefix_blocks(write):
    trace = read_trace(
        write(
            '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}\n\n'
            '{"timestamp": 3052, "input_length": 600, "output_length": 1, "hash_ids": [0, 8]}\n',
            "trace.jsonl",
        )
    )
    assert trace.arrival_s.tolist() == [0.0, 3.052]
    assert [trace.prefix_of(i).tolist() for i in range(2)] == [[0, 7], [0, 8]]
    assert trace.prefix_block_tokens == 512
    assert trace.describe()["prefix_blocks_seen_before"] == 0.25


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_length": -4, "output_length": 1}', "line 2, column input_length: .* got -4"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 2, column input_length: .* got 1.5"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2, column timestamp: .* got nan"),
        ('{"timestamp": 1, "output_length": 1}', "line 2: input_length is missing"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "line 2, column hash_ids"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}', "line 2: 2 prefix blocks"),
        ('{"timestamp": 1, "input', "line 2: expected one JSON object"),
        ("[1, 2]", r"line 2: expected one JSON object; got \[1, 2\]"),
    ],
)
def test_bad_mooncake_lines_are_named(write, line, message):
    good = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}\n'
    with pytest.raises(ValueError, match=message):
        read_trace(write(good + line + "\n", "trace.jsonl"))


def test_plain_optional_columns_may_be_blank_and_in_any_order(write):
    trace = read_trace(
        write("deadline_s,model,arrival_s,output_tokens,prompt_tokens,session\n1.5,a,0,1,2,\n,b,0.25,3,4,7\n")
    )
    assert trace.models == ("a", "b")
    assert trace.deadline_ns is not None
    assert trace.session is not None
    assert trace.deadline_ns.tolist() == [1_500_000_000, -1]
    assert trace.session.tolist() == [-1, 7]


def test_plain_priorities_are_whole_numbers_of_either_sign(write):
    trace = read_trace(write("arrival_s,prompt_tokens,output_tokens,priority\n0,1,1,-3\n1,1,1,\n2,1,1,7\n"))
    assert trace.priority is not None
    assert trace.priority.tolist() == [-3, 0, 7]
    with pytest.raises(ValueError, match=r"line 2, column priority: expected a whole number; got '1\.5'"):
        read_trace(write("arrival_s,prompt_tokens,output_tokens,priority\n0,1,1,1.5\n"))


def test_quoted_cells_and_blanks_are_understood(write):
    trace = read_trace(write('arrival_s, prompt_tokens, output_tokens, model\n0, 1, 2, "a, b"\n1 ,3,4,c\n'))
    assert trace.models == ("a, b", "c")
    assert trace.prompt_tokens.tolist() == [1, 3]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_ends_are_understood(write, end):
    assert read_trace(write(f"arrival_s,prompt_tokens,output_tokens{end}1,2,3{end}4,5,6")).prompt_tokens.tolist() == [
        2,
        5,
    ]


def test_blanks_around_cells_are_no_part_of_them(write):
    trace = read_trace(write("arrival_s, prompt_tokens , output_tokens,model\n 0,  1 ,2, a b \n"))
    assert trace.prompt_tokens.tolist() == [1]
    assert trace.models == ("a b",)


def test_compressed_files_and_byte_order_marks_are_read(write):
    text = b"\xef\xbb\xbf" + PLAIN.encode() + b"1,2,3\n"
    assert read_trace(write(gzip.compress(text), "trace.csv.gz")).arrival_s.tolist() == [1.0]
    with pytest.raises(ValueError, match="compressed file is damaged"):
        read_trace(write(gzip.compress(text)[:-6], "trace.csv.gz"))


def test_seconds_are_rounded_to_the_nearest_nanosecond(write):
    cells = ["0.1234567891", "0.1234567895", "0.12345678951", "2e-1", ".5", "1.", "12.000000000000000000000001"]
    trace = read_trace(write(PLAIN + "".join(f"{cell},1,1\n" for cell in cells)))
    assert trace.arrival_ns.tolist() == [
        123_456_789,
        123_456_790,
        123_456_790,
        200_000_000,
        500_000_000,
        1_000_000_000,
        12_000_000_000,
    ]


@given(st.decimals(0, 10**9, allow_nan=False, places=9))
def test_nine_decimals_are_exact(tmp_path_factory, seconds):
    path = tmp_path_factory.mktemp("exact") / "t.csv"
    path.write_text(f"{PLAIN}{seconds},1,1\n")
    assert int(read_trace(path).arrival_ns[0]) == int(seconds * 10**9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (PLAIN, "a header and no rows"),
        ("arrival_s,prompt_tokens\n0,1\n", "line 1: column output_tokens is missing"),
        ("TIMESTAMP,ContextTokens\n0,1\n", "line 1: column GeneratedTokens is missing"),
        (
            "x,y\n1,2\n",
            "no column is known to say arrival and prompt_tokens; it has x, y: name them, with --map arrival=COLUMN",
        ),
        (PLAIN.strip() + ",modle\n0,1,1,a\n", "'modle' is not a column of the plain format"),
        (PLAIN.strip() + ",arrival_s\n0,1,1,2\n", "column arrival_s is there twice"),
        (PLAIN + "0,1,1\n1,1\n", "line 3: expected 3 columns; got 2"),
        (
            PLAIN.strip() + ",max_tokens\n0,1,1,9\n1,1,5,4\n",
            "line 3, column max_tokens: expected at least the 5 output tokens; got '4'",
        ),
        (PLAIN + "0,1,1\n\n1,-4,1\n", "line 4, column prompt_tokens: expected a whole number from 0; got '-4'"),
        (PLAIN + "0,1,1.5\n", "line 2, column output_tokens: expected a whole number from 0; got '1.5'"),
        (PLAIN + "0,1,\n", "line 2, column output_tokens: expected a whole number from 0; got ''"),
        (PLAIN + "0,nan,1\n", "line 2, column prompt_tokens: expected a whole number from 0; got 'nan'"),
        (PLAIN + "NaN,1,1\n", "line 2, column arrival_s: expected a finite number from 0; got 'NaN'"),
        (PLAIN + "inf,1,1\n", "line 2, column arrival_s: expected a finite number from 0; got 'inf'"),
        (PLAIN + "-1,1,1\n", "line 2, column arrival_s: expected a finite number from 0; got '-1'"),
        (PLAIN + "1.2.3,1,1\n", "line 2, column arrival_s: expected a number from 0; got '1.2.3'"),
        (PLAIN + "0,0,0\n", "line 2: a request needs prompt_tokens or output_tokens above 0"),
        (PLAIN + "0,99999999999999999999,1\n", "line 2, column prompt_tokens: expected a whole number"),
        (PLAIN + "0,1,1\n5,1,1\n3,1,1\n2,1,1\n", "line 4, column arrival_s: arrivals are out of order"),
        (AZURE + "2024-02-30 00:00:00,1,1\n", "line 2, column TIMESTAMP: expected a time like"),
        (AZURE + "2023-11-16 24:00:00,1,1\n", "line 2, column TIMESTAMP"),
        (AZURE + "2023-11-16 18:17:03.,1,1\n", "line 2, column TIMESTAMP"),
        (AZURE + "2023-11-16 18:17:03.1234567891,1,1\n", "line 2, column TIMESTAMP"),
        (AZURE + "2023-11-16 18:17,1,1\n", "line 2, column TIMESTAMP"),
        (AZURE + "17,1,1\n", "line 2, column TIMESTAMP: expected a time like 2023-11-16 18:17:03.9799600; got '17'"),
    ],
)
def test_bad_files_are_refused_by_line_column_and_value(write, text, message):
    path = write(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


def test_text_that_is_not_utf8_is_refused(write):
    with pytest.raises(ValueError, match="byte 38 is not UTF-8"):
        read_trace(write(PLAIN.encode() + b"\xff,1,1\n"))


def test_unsorted_arrivals_can_be_sorted_on_request(write):
    path = write(PLAIN + "5,1,1\n3,2,1\n")
    assert read_trace(path, sort=True).prompt_tokens.tolist() == [2, 1]


def test_the_format_can_be_named(write):
    path = write(PLAIN + "5,1,1\n")
    assert len(read_trace(path, "plain")) == 1
    with pytest.raises(ValueError, match="column TIMESTAMP is missing"):
        read_trace(path, "azure_llm")
    with pytest.raises(ValueError, match="format is auto or one of"):
        read_trace(path, "parquet")


def test_limit_keeps_the_first_requests(write):
    assert read_trace(write(PLAIN + "1,1,1\n2,1,1\n3,1,1\n"), limit=2).arrival_s.tolist() == [1.0, 2.0]


MOONCAKE_ROW = '{{"timestamp": {0}000, "input_length": {0}, "output_length": 1, "hash_ids": []}}\n'
MANY = range(1, 4001)


@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
@pytest.mark.parametrize(
    "text",
    [
        PLAIN + "".join(f"{i},{i},1\n" for i in MANY),
        PLAIN.replace("\n", ",model\n") + "".join(f'{i},{i},1,"a\n{i}"\n' for i in MANY),
        PLAIN + "".join(f"{i},{i},1\r\n\r\n" for i in MANY),
        AZURE + "".join(f"2023-11-16 18:{i // 60 % 60:02}:{i % 60:02},{i},1\n" for i in range(1, 3600)),
        BURST + "".join(f"{i},a,{i},1,{i + 1},api\n" for i in MANY),
        "".join(MOONCAKE_ROW.format(i) for i in MANY),
    ],
    ids=["plain", "quoted", "blank-lines", "azure", "burstgpt", "mooncake"],
)
def test_a_limit_reads_no_further_than_it_takes(write, text: str, packed: bool) -> None:
    # What is behind would be refused, if anybody read it.
    data = text.encode() + b"what is no row\n" * 50_000
    path = write(gzip.compress(data) if packed else data)
    tracemalloc.start()
    assert read_trace(path, limit=20).prompt_tokens.tolist() == [*range(1, 21)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < len(data) / 4
    with pytest.raises(ValueError, match="line"):
        read_trace(path)


def test_a_limit_counts_the_requests_that_are_kept(write) -> None:
    path = write(PLAIN + "".join(f"{i},{i if i % 100 == 0 else 0},0\n" for i in MANY))
    assert read_trace(path, limit=3, drop_empty=True).prompt_tokens.tolist() == [100, 200, 300]
    assert len(read_trace(path, limit=100, drop_empty=True)) == 40


def test_arrivals_out_of_order_are_sorted_before_the_limit(write) -> None:
    path = write(PLAIN + "".join(f"{i},{i},1\n" for i in reversed(MANY)))
    assert read_trace(path, limit=2, sort=True).prompt_tokens.tolist() == [1, 2]


def test_a_60_million_token_prompt_is_read(write):
    assert read_trace(write(PLAIN + "0,60000000,1\n")).prompt_tokens.tolist() == [60_000_000]


def test_function_arguments_are_refused_for_request_files(write):
    with pytest.raises(
        ValueError, match="models, start_s belong to the azure_functions formats and this file is plain"
    ):
        read_trace(write(PLAIN + "0,1,1\n"), models=["a"], start_s=0)


def test_functions_2019_drop_the_idle_and_stripe_the_rest_over_models(write):
    path = write(COUNTS + "o,a,f,http,2,0,1\no,a,idle,http,0,0,9\no,a,g,http,0,1,0\no,a,h,timer,4,0,0\n")
    counts = read_function_counts(path)
    assert counts.functions == ("o/a/f", "o/a/idle", "o/a/g", "o/a/h")
    assert counts.stripe(2, end_s=120).tolist() == [[6, 0], [0, 1]]
    assert counts.stripe(2).tolist() == [[2, 1, 1], [4, 0, 9]]
    with pytest.raises(ValueError, match=r"whole bins of 60 s within 0 to 180 s; got 0\.0 to 90"):
        counts.stripe(2, end_s=90)


def test_functions_2019_as_requests_are_spread_evenly_over_each_minute(write):
    path = write(COUNTS + "o,a,f,http,2,0,1\no,a,g,http,0,1,0\n")
    trace = read_trace(path, models=["m", "n"], prompt_tokens=2048)
    assert trace.arrival_s.tolist() == [15.0, 45.0, 90.0, 150.0]
    assert [trace.model_of(i) for i in range(4)] == ["m", "m", "n", "m"]
    assert trace.prompt_tokens.tolist() == [2048] * 4
    assert trace.output_tokens.tolist() == [0] * 4


def test_functions_2019_triggers_of_one_function_count_together_and_days_follow_each_other(write):
    one = write(COUNTS + "o,a,f,http,1,0,0\no,a,f,timer,1,0,2\n", "d1.csv")
    two = write(COUNTS + "o,a,g,http,0,5,0\no,a,f,http,0,0,1\n", "d2.csv")
    days = read_function_counts(one, two)
    assert days.functions == ("o/a/f", "o/a/g")
    assert days.counts.tolist() == [[2, 0, 2, 0, 0, 1], [0, 0, 0, 0, 5, 0]]


def test_functions_2019_without_models_say_what_is_needed(write):
    with pytest.raises(ValueError, match="give models and prompt_tokens"):
        read_trace(write(COUNTS + "o,a,f,http,1,0,0\n"))
    with pytest.raises(ValueError, match="line 2, column 2: expected a whole number from 0; got '-1'"):
        read_function_counts(write(COUNTS + "o,a,f,http,1,-1,0\n"))
    with pytest.raises(ValueError, match="minutes are columns 1, 2, 3"):
        read_function_counts(write("HashOwner,HashApp,HashFunction,Trigger,1,3\no,a,f,http,1,0\n"))


def test_functions_2021_are_ordered_by_start(write):
    path = write(CALLS + "a,f,1.5,0.25\na,g,2.0,1.5\nb,f,3.0,1.0\na,f,9.0,8.0\n")
    calls = read_function_invocations(path)
    assert calls.functions == ("a/f", "a/g", "b/f")
    assert (calls.arrival_ns / 1e9).tolist() == [0.5, 1.0, 1.25, 2.0]
    assert calls.function_index.tolist() == [1, 0, 0, 2]
    assert [part.tolist() for part in calls.stripe(2, start_s=0.75)] == [
        [250_000_000, 500_000_000],
        [1_250_000_000],
    ]
    trace = read_trace(path, models=["m", "n"], prompt_tokens=7)
    assert [trace.model_of(i) for i in range(4)] == ["n", "m", "m", "m"]


def test_functions_2021_windows_without_calls_are_refused(write):
    path = write(CALLS + "a,f,1.5,0.25\n")
    with pytest.raises(ValueError, match=r"no function is called from 5\.0 s to 6\.0"):
        read_trace(path, models=["m"], prompt_tokens=7, start_s=5.0, end_s=6.0)


@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "prompt_total", "output_total"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, 3501.721937, 22361870, 4088665),
        ("AzureLLMInferenceTrace_code.csv", 8819, 3435.948056, 18059974, 245896),
        ("mooncake_conversation.jsonl", 12031, 3536.999, 144793823, 4122048),
    ],
)
def test_published_files_are_read_whole(real_trace, name, requests, duration_s, prompt_total, output_total):
    trace = read_trace(real_trace(name))
    assert len(trace) == requests
    assert trace.duration_s == duration_s
    assert int(trace.prompt_tokens.sum()) == prompt_total
    assert int(trace.output_tokens.sum()) == output_total


@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"])
def test_fast_parsing_agrees_with_pandas(real_trace, name):
    pandas = pytest.importorskip("pandas")
    path = real_trace(name)
    trace, frame = read_trace(path), pandas.read_csv(path)
    stamps = pandas.to_datetime(frame.TIMESTAMP).astype("datetime64[ns]").astype("int64").to_numpy()
    assert np.array_equal(trace.arrival_ns, stamps - stamps[0])
    assert np.array_equal(trace.prompt_tokens, frame.ContextTokens)
    assert np.array_equal(trace.output_tokens, frame.GeneratedTokens)


def test_mooncake_blocks_cover_each_prompt(real_trace):
    trace = read_trace(real_trace("mooncake_conversation.jsonl"))
    assert trace.prefix_offsets is not None
    assert np.array_equal(np.diff(trace.prefix_offsets), -(-trace.prompt_tokens // 512))
