from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample import ALL
from workloads import Trace, concat, merge, read_trace


def three(**changes) -> Trace:
    columns = {"arrival_s": [0.5, 1.0, 1.0], "prompt_tokens": [10, 20, 30], "output_tokens": [1, 0, 3]}
    return Trace.from_arrays(**(columns | changes))


def test_columns_are_read_only_integers():
    trace = three()
    assert trace.arrival_ns.tolist() == [500_000_000, 1_000_000_000, 1_000_000_000]
    assert trace.prompt_tokens.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 7
    with pytest.raises(FrozenInstanceError):
        trace.source = "else"


def test_columns_are_copies_of_what_was_given():
    prompt = np.array([10, 20, 30])
    trace = three(prompt_tokens=prompt)
    prompt[0] = 99
    assert trace.prompt_tokens.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": [1, -2, 3]}, "row 1: prompt_tokens must be at least 0; got -2"),
        ({"prompt_tokens": [1, 2.5, 3]}, "row 1: prompt_tokens is a whole number; got 2.5"),
        ({"output_tokens": [1, 2, float("nan")]}, "row 2: output_tokens is a whole number; got nan"),
        ({"output_tokens": [True, False, True]}, "row 0: output_tokens is a whole number"),
        ({"prompt_tokens": [1, "2", 3]}, "row 0: prompt_tokens is a whole number that fits in 64 bits; got '1'"),
        (
            {"prompt_tokens": np.array([1, 2**63, 3], dtype=np.uint64)},
            "row 1: prompt_tokens must fit in 64 bits; got 9223372036854775808",
        ),
        ({"prompt_tokens": [1, 0, 3]}, "row 1: a request needs prompt_tokens or output_tokens above 0"),
        ({"prompt_tokens": [1, 2]}, "prompt_tokens needs one value a request (3); got 2"),
        ({"arrival_s": [0.0, 2.0, 1.0]}, "arrival_ns must not decrease; row 2 has 1000000000 after 2000000000"),
        ({"arrival_s": [0.0, float("nan"), 1.0]}, "row 1: arrival_s is a finite number of seconds from 0; got nan"),
        ({"arrival_s": [0.0, float("inf"), 1.0]}, "row 1: arrival_s is a finite number of seconds from 0; got inf"),
        ({"arrival_s": [-1.0, 0.0, 1.0]}, "row 0: arrival_s is a finite number of seconds from 0; got -1.0"),
        ({"deadline_s": [1.0, -1.0, 1.0]}, "row 1: deadline_s is a finite number of seconds from 0; got -1.0"),
    ],
)
def test_bad_values_are_refused_by_row_column_and_value(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        three(**changes)


def test_a_trace_needs_a_request():
    with pytest.raises(ValueError, match="at least one request"):
        Trace.from_arrays(arrival_s=[], prompt_tokens=[], output_tokens=[])


def test_an_absurdly_long_prompt_is_legal():
    assert three(prompt_tokens=60_000_000).prompt_tokens.tolist() == [60_000_000] * 3


def test_sorting_keeps_equal_arrivals_in_order_and_columns_together():
    trace = three(arrival_s=[2.0, 1.0, 1.0], model=["a", "b", "c"], deadline_s=[1, 2, float("nan")], sort=True)
    assert trace.prompt_tokens.tolist() == [20, 30, 10]
    assert [trace.model_of(i) for i in range(3)] == ["b", "c", "a"]
    assert trace.deadline_ns is not None
    assert trace.deadline_ns.tolist() == [2_000_000_000, -1, 1_000_000_000]


def test_models_and_their_index_must_agree():
    trace = three(model=["a", "b", "a"])
    with pytest.raises(ValueError, match="row 1: model_index is a row of the 1 models"):
        replace(trace, models=("a",))
    with pytest.raises(ValueError, match="models must differ"):
        replace(trace, models=("a", "a"))
    with pytest.raises(ValueError, match="needs model_index"):
        replace(trace, model_index=None)


def test_one_model_needs_no_index():
    assert three(model=["a", "a", "a"]) == three(model="a")


def test_limit_keeps_the_first():
    assert three().limit(2).prompt_tokens.tolist() == [10, 20]
    assert three().limit(9) == three()
    with pytest.raises(ValueError, match="positive number of requests; got 0"):
        three().limit(0)


def test_window_counts_time_from_its_start_and_leaves_its_end_out():
    trace = three(arrival_s=[0.5, 1.0, 2.0])
    part = trace.window(0.5, 2.0)
    assert part.arrival_ns.tolist() == [0, 500_000_000]
    with pytest.raises(ValueError, match=r"no request arrives in \[3.0, 4.0\) s"):
        trace.window(3.0, 4.0)


def test_scaling_the_rate_rounds_to_the_nearest_nanosecond():
    trace = Trace.from_arrays(arrival_ns=[1, 3, 10], prompt_tokens=1, output_tokens=1)
    assert trace.scale_rate(2).arrival_ns.tolist() == [1, 2, 5]
    assert trace.scale_rate(0.1).arrival_ns.tolist() == [10, 30, 100]


@given(st.integers(0, 2**61), st.floats(0.5, 1e6))
def test_scaling_the_rate_is_exact_for_any_arrival(arrival_ns, factor):
    trace = Trace.from_arrays(arrival_ns=[arrival_ns], prompt_tokens=1, output_tokens=1)
    exact = arrival_ns / Fraction(str(factor))
    assert abs(int(trace.scale_rate(factor).arrival_ns[0]) - exact) <= Fraction(1, 2)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), 1e-300])
def test_a_rate_factor_without_meaning_is_refused(factor):
    with pytest.raises(ValueError, match="rate factor"):
        three().scale_rate(factor)


def test_merge_interleaves_and_joins_models_by_name():
    a = three(model="a", session=[0, 0, 1])
    b = three(model="b", arrival_s=[0.7, 1.0, 3.0])
    both = merge([a, b])
    assert both.arrival_s.tolist() == [0.5, 0.7, 1.0, 1.0, 1.0, 3.0]
    assert [both.model_of(i) for i in range(6)] == ["a", "b", "a", "a", "b", "b"]
    assert both.session is not None
    assert both.session.tolist() == [0, -1, 0, 1, -1, -1]
    with pytest.raises(ValueError, match="with and without model names"):
        merge([a, three()])


def test_merge_keeps_sessions_and_blocks_apart_unless_they_are_shared():
    blocks = {"prefix_blocks": [0, 1, 0], "prefix_offsets": [0, 2, 3, 3], "prefix_block_tokens": 8}
    trace = replace(three(session=[0, 0, 1]), **blocks)
    apart, shared = concat([trace, trace]), concat([trace, trace], shared_ids=True)
    assert apart.session is not None
    assert apart.session.tolist() == [0, 0, 1, 2, 2, 3]
    assert [apart.prefix_of(i).tolist() for i in range(6)] == [[0, 1], [0], [], [2, 3], [2], []]
    assert [shared.prefix_of(i).tolist() for i in range(6)] == [[0, 1], [0], []] * 2


def test_priorities_go_along_with_their_requests(tmp_path):
    hasty = Trace.from_arrays(arrival_s=[3, 1], prompt_tokens=5, output_tokens=5, priority=[-2, 7], sort=True)
    plain = Trace.from_arrays(arrival_s=[2], prompt_tokens=5, output_tokens=5)
    assert merge([hasty, plain]).priority.tolist() == [7, 0, -2]
    assert hasty.limit(1).priority.tolist() == [7]
    assert hasty.describe()["priorities"] == {"-2": 1, "7": 1}
    hasty.to_csv(tmp_path / "t.csv")
    assert read_trace(tmp_path / "t.csv").priority.tolist() == [7, -2]
    assert plain.priority is None
    with pytest.raises(ValueError, match=r"priority needs one value a request \(1\); got 2"):
        Trace(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1], priority=[0, 1])


def test_concat_starts_the_next_after_the_last_arrival():
    assert concat([three(), three()], gap_s=2.0).arrival_s.tolist() == [0.5, 1.0, 1.0, 3.5, 4.0, 4.0]


def test_take_moves_prefix_blocks_with_their_requests():
    blocks = {"prefix_blocks": [5, 6, 7], "prefix_offsets": [0, 2, 2, 3], "prefix_block_tokens": 8}
    part = replace(three(), **blocks).take([0, 2])
    assert [part.prefix_of(i).tolist() for i in range(2)] == [[5, 6], [7]]


def test_prefix_blocks_cannot_outnumber_prompt_and_output():
    with pytest.raises(
        ValueError, match="row 0: prefix_blocks has 3 blocks of 8 tokens for a prompt of 10 and 1 output tokens"
    ):
        replace(three(), prefix_blocks=[1, 2, 3], prefix_offsets=[0, 3, 3, 3], prefix_block_tokens=8)


def test_deadlines_can_be_given_by_model():
    trace = three(model=["a", "b", "a"]).with_deadline({"a": 0.5})
    assert trace.deadline_ns is not None
    assert trace.deadline_ns.tolist() == [500_000_000, -1, 500_000_000]
    with pytest.raises(ValueError, match=r"got \['c'\]"):
        trace.with_deadline({"c": 1.0})


def test_describe_counts_rate_between_first_and_last_arrival():
    facts = Trace.from_arrays(arrival_s=[1, 2, 4], prompt_tokens=[1, 2, 6], output_tokens=2).describe()
    assert facts["requests"] == 3
    assert facts["duration_s"] == 3.0
    assert facts["rate_per_s"] == pytest.approx(2 / 3)
    assert facts["interarrival_cv"] == pytest.approx(0.5 / 1.5)
    assert facts["prompt_tokens"]["mean"] == 3.0
    assert facts["prompt_tokens"]["median"] == 2.0
    assert facts["prompt_tokens"]["max"] == 6
    assert facts["prompt_tokens"]["total"] == 9
    assert facts["output_tokens"]["p99"] == 2.0


def test_describe_of_one_request_has_no_rate():
    facts = three().limit(1).describe()
    assert facts["rate_per_s"] is None
    assert facts["interarrival_cv"] is None


def test_repr_is_short():
    assert repr(three(source="here")) == "Trace(3 requests in 0.5 s, source='here')"


def test_equal_traces_are_equal_also_after_pickling():
    trace = three(model=["a", "b", "a"])
    copy = pickle.loads(pickle.dumps(trace))
    assert copy == trace
    assert hash(copy) == hash(trace)
    assert trace != three()
    assert trace != trace.scale_rate(2)


LETTERS = "aZ09-_./:,;|#='\"\\éß漢字\U0001f600"
"""Letters of a model's name, some of which stand for something in a file. All of Unicode takes a second to be put in order."""


@st.composite
def traces(draw) -> Trace:
    n = draw(st.integers(1, 6))

    def column(low: int, high: int):
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    names = draw(st.lists(st.text(LETTERS, min_size=1), max_size=3))
    # The file lists models in order of appearance, so the trace does too.
    names = list(dict.fromkeys(names))[:n]
    index = [*range(len(names)), *(draw(st.integers(0, max(len(names) - 1, 0))) for _ in range(n - len(names)))]
    prompt = column(1, 10**12)
    blocks = [draw(st.lists(st.integers(0, 2**40), max_size=min(4, -(-p // 16)))) for p in prompt]
    with_blocks = draw(st.booleans())
    return Trace(
        arrival_ns=np.sort(column(0, 10**17)),
        prompt_tokens=prompt,
        output_tokens=column(0, 2**40),
        model_index=index if names else None,
        models=tuple(names),
        deadline_ns=column(-1, 10**15) if draw(st.booleans()) else None,
        session=column(-1, 2**40) if draw(st.booleans()) else None,
        prefix_blocks=[b for row in blocks for b in row] if with_blocks else None,
        prefix_offsets=np.cumsum([0, *map(len, blocks)]) if with_blocks else None,
        prefix_block_tokens=16 if with_blocks else None,
        source="round.csv",
    )


@given(traces())
@settings(max_examples=80 if ALL else 12, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("csv") / "round.csv"
    trace.to_csv(path)
    assert read_trace(path) == trace


def test_writing_leaves_nothing_half_written(tmp_path, monkeypatch):
    three().to_csv(tmp_path / "t.csv")
    before = (tmp_path / "t.csv").read_bytes()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("workloads.write.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        three().scale_rate(2).to_csv(tmp_path / "t.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
    assert (tmp_path / "t.csv").read_bytes() == before
