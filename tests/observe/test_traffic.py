"""Traffic that is rebuilt from counters."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from sim import Scenario
from sim.errors import RooftraceError
from sim.observe import observed, observed_traffic
from sim.observe.fit import stretches
from sim.observe.observation import Source, traffic_of
from sim.observe.replay import hours, replay
from sim.observe.samples import Collected, Matching, read_files


def scraped(folder, scrapes, name="scrape@{at}.prom"):
    """Files of scrapes: pairs of an instant and the text of the exposition."""
    files = []
    for at, text in scrapes:
        path = folder / name.format(at=1_700_000_000 + at)
        path.write_text(text)
        files.append(path)
    return read_files(files, Matching(labels={}))


def exposition(finished, running, waiting=0, prompt=(0, 0, 0), output=(0, 0, 0)):
    """vLLM's counts: of lengths how many are at most 500 and 1,000 tokens, and their sum."""
    lines = [
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{finished_reason="stop"}} {finished}',
        f"vllm:num_requests_running {running}",
        f"vllm:num_requests_waiting {waiting}",
    ]
    for metric, (some, every, total) in (("prompt", prompt), ("generation", output)):
        head = f"vllm:request_{metric}_tokens"
        lines += [
            f'{head}_bucket{{le="500"}} {some}',
            f'{head}_bucket{{le="1000"}} {every}',
            f'{head}_bucket{{le="+Inf"}} {every}',
            f"{head}_sum {total}",
            f"{head}_count {every}",
        ]
    return "\n".join(lines)


def test_requests_that_came_are_those_that_ended_and_those_more_in_flight(tmp_path):
    seen = observed(scraped(tmp_path, [(0, exposition(10, 4)), (60, exposition(30, 9, 5))]), "x")
    traffic = observed_traffic(seen, prompt_tokens=100, output_tokens=10)
    assert traffic.arrivals.sum() == pytest.approx(30 - 10 + 14 - 4)
    assert traffic.rate_per_s.mean() == pytest.approx(30 / 60)
    assert len(traffic.workload(0)) == 30


def test_a_restart_loses_no_count_but_that_of_before_it(tmp_path):
    seen = observed(
        scraped(tmp_path, [(0, exposition(100, 0)), (60, exposition(160, 0)), (120, exposition(25, 0))]), "x"
    )
    traffic = observed_traffic(seen, prompt_tokens=100, output_tokens=10)
    assert traffic.arrivals.tolist() == [60, 25]
    assert "began anew 1 times" in seen.notes[0]


def test_lengths_keep_the_means_and_the_buckets_of_the_histograms(tmp_path):
    series = scraped(
        tmp_path, [(0, exposition(0, 0)), (60, exposition(400, 0, 0, (300, 400, 220_000), (400, 400, 40_000)))]
    )
    traffic = observed_traffic(observed(series, "x"))
    trace = traffic.workload(3)
    assert trace.prompt_tokens.mean() == pytest.approx(550, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(100, rel=0.02)
    assert (trace.prompt_tokens <= 500).mean() == pytest.approx(0.75, abs=0.07)
    assert trace.prompt_tokens.max() <= 1000
    assert "the median is between 0 and 500 tokens" in traffic.prompt.precision


def test_prompts_share_what_the_prefix_cache_found():
    collected = Collected()
    for at, n in ((0, 0), (60, 100)):
        for name, value in (("request_success", n), ("prompt_tokens", 1000 * n), ("prefix_cache_hits", 600 * n)):
            collected.add(f"vllm:{name}_total", {}, at, value)
    series = collected.series(Matching(labels={}))
    traffic = observed_traffic(observed(series, "x"), prompt_tokens=1000, output_tokens=5)
    assert traffic.prefix_hit.tolist() == [pytest.approx(0.6)]
    blocks, seen = traffic.workload(0), set()
    found = []
    assert blocks.prefix_blocks is not None
    assert blocks.prefix_offsets is not None
    for row in range(100):
        ids = blocks.prefix_blocks[blocks.prefix_offsets[row] : blocks.prefix_offsets[row + 1]]
        found.append(np.isin(ids, list(seen)).mean())
        seen |= set(ids.tolist())
    assert np.mean(found[1:]) == pytest.approx(0.6, abs=0.02)


def test_what_is_missing_is_said_with_the_names_that_were_looked_for(tmp_path):
    seen = observed(scraped(tmp_path, [(0, exposition(10, 4)), (60, exposition(30, 9))]), "x")
    assert any("TTFT was not found; looked for vllm:time_to_first_token_seconds" in each for each in seen.missing)
    with pytest.raises(RooftraceError, match="none of its 1 series has a name that is known; looked for vLLM"):
        observed(scraped(tmp_path, [(0, "other_metric 1")]), "x")


def test_scrapes_of_one_instant_say_no_rate(tmp_path):
    with pytest.raises(RooftraceError, match="all samples are of one instant"):
        observed(scraped(tmp_path, [(0, exposition(10, 4))]), "x")


def table(*rows):
    """A table of counters: seconds, finished, output tokens, running."""
    collected = Collected()
    for at, finished, tokens, running in rows:
        for name, value in (("finished_total", finished), ("generation_tokens_total", tokens), ("running", running)):
            collected.add(name, {}, at, value)
    return observed(collected.series(Matching(labels={})), "x")


def test_without_gaps_time_per_token_is_how_long_requests_run_over_their_tokens():
    seen = table((0, 0, 0, 4), (60, 100, 6000, 4), (120, 200, 12_000, 4))
    traffic = observed_traffic(seen, prompt_tokens=300, output_tokens=60)
    (each,) = stretches(seen, traffic)
    assert each.by_running
    assert each.measured_s == {"tpot_s": pytest.approx(4 / 100)}


def test_clients_that_wait_for_answers_have_no_more_in_flight_than_they_are_said_to():
    seen = table((0, 0, 0, 0), (10, 200, 40_000, 0))
    traffic = observed_traffic(seen, prompt_tokens=300, output_tokens=200)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    free, limited = (
        replay(Scenario.default(), replace(traffic, in_flight=limit), edges_s, seeds=[0]).rows["in_flight"].max()
        for limit in (None, 8)
    )
    assert free > 12
    assert 7 < limited <= 8


def test_prompts_of_a_session_begin_with_the_prompt_before(tmp_path):
    rows = [(0, 160, 0, "a"), (1, 320, 160, "a"), (2, 160, 0, "b"), (3, 480, 320, "a")]
    path = tmp_path / "log.jsonl"
    names = ("arrival_s", "prompt_tokens", "cached_tokens", "session")
    lines = [json.dumps({**dict(zip(names, row, strict=True)), "output_tokens": 5, "e2el_s": 1}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    trace = traffic_of(Source(), *Source(files=(path,)).read()).workload(0)
    assert trace.prefix_blocks is not None
    assert trace.prefix_offsets is not None
    a, b, c, d = (trace.prefix_blocks[i:j].tolist() for i, j in itertools.pairwise(trace.prefix_offsets.tolist()))
    assert b[:10] == a
    assert d[:20] == b
    assert not set(c) & {*a, *b, *d}
