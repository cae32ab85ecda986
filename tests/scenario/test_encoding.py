"""`encode`: what a scenario makes of it, what a run says of it, and what is refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.errors import ScenarioError
from sim.results import Result, fact_rows, latency_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve
from sim.serve.setup import set_up
from workloads import concat, read_trace

ENCODE = {"token_s": 1e-5, "request_s": 2e-3, "batch_s": 5e-3, "bandwidth_gb_per_s": 1.0, "latency_s": 1e-4}
DRAWN = {"arrivals": {"process": "poisson", "rate_per_s": 5.0}, "prompt_tokens": 700, "output_tokens": 5, "requests": 8}
IMAGES = """arrival_s,prompt_tokens,output_tokens,encoder_tokens
0.0,700,5,576
10.0,100,5,0
20.0,1300,5,1152
"""


def scenario(encode: dict[str, Any] | None, folder: Path = Path(), **settings: Any) -> Scenario:
    return Scenario.from_mapping(
        {"model": "llama-3.1-8b", "scheduler": "vllm", "workload": DRAWN, "encode": encode, **settings}, folder=folder
    )


def with_images(encode: dict[str, Any] | None, folder: Path) -> Scenario:
    (folder / "images.csv").write_text(IMAGES)
    return scenario(encode, folder, workload={"trace": "images.csv"})


def test_requests_are_encoded_and_sent_before_their_prompt_is_computed(tmp_path: Path) -> None:
    result = simulate(build(with_images(ENCODE, tmp_path)))
    requests = result.columns.requests
    begun, encoded, landed = (requests[name] for name in ("encode_begin_ns", "encoded_ns", "encode_landed_ns"))
    images = np.array([True, False, True])
    # 7 ms and 10 us a token; two bytes for each of 4,096 numbers of a token, at 1 GB/s and 0.1 ms later.
    assert (encoded - begun)[images].tolist() == [7_000_000 + 5_760_000, 7_000_000 + 11_520_000]
    sent_ns = np.array([576, 1152]) * 8192 + 100_000
    assert (landed - encoded)[images].tolist() == (sent_ns + 1).tolist()
    assert (requests["scheduled_ns"] >= landed).all()
    assert (begun[1], requests["status"].tolist()) == (-1, [0, 0, 0])


def test_the_stages_before_the_prompt_are_in_the_summary_and_the_files(tmp_path: Path) -> None:
    result = simulate(build(with_images({**ENCODE, "replicas": 2}, tmp_path)))
    found = result.summary["encode"]
    assert found["requests"] == 2
    # Alone at its encoder a request waits for the front end only.
    passed_s = result.requests.eval("encode_begin_ns - arrival_ns").to_numpy()[[0, 2]] * 1e-9
    assert {name: each["mean"] for name, each in found["stages"].items()} == {
        "queue_s": pytest.approx(passed_s.mean()),
        "encode_s": pytest.approx(0.007 + 864e-5),
        "transfer_s": pytest.approx(864 * 8192e-9 + 1e-4, abs=2e-9),
        "prompt_queue_s": pytest.approx(result.requests.eval("scheduled_ns - encode_landed_ns")[[0, 2]].mean() * 1e-9),
    }
    # The whole time before the prompt is computed is the queue's, and each part of it is told.
    assert sum(each["mean"] for each in found["stages"].values()) == pytest.approx(
        result.requests["queue_s"][[0, 2]].mean()
    )
    assert "2 requests, queued for" in (told := dict(fact_rows(result.summary))["Encoded"])
    assert ", then queued for" in told
    assert dict(latency_rows(result.summary)).keys() >= {"Queue (encoding is in it)"}
    again = Result.load(result.save(tmp_path / "out"))
    assert again.summary == result.summary
    assert again.requests["encoder"].isna().tolist() == [False, True, False]
    assert "encode" not in simulate(build(scenario(None))).summary


def test_every_request_of_a_workload_without_the_column_may_have_as_many_tokens() -> None:
    encode = build(
        scenario({**ENCODE, "encoder_tokens": 576, "replicas": 3, "max_batch": 4, "bytes_per_token": 10})
    ).encode
    assert encode is not None
    assert (list(encode.sizes), encode.bytes_per_unit) == ([576] * 8, 10)
    assert [machine.max_batch for machine in encode.machines] == [4] * 3


@pytest.mark.parametrize(
    ("encode", "settings", "sentence"),
    [
        ({}, {}, r"the workload does not say what there is to encode; give encode.encoder_tokens, a trace"),
        ({"encoder_tokens": 1, "router": "prefix"}, {}, "encode: .* asks for more than loads"),
        ({"encoder_tokens": 1}, {"router": {"policy": "prefix", "event_delay_s": 0.1}}, "learns late of machines"),
        ({"encoder_tokens": 1, "router": "best"}, {}, "encode.router: 'best' is not a policy"),
        ({"encoder_tokens": 1, "token_s": -1}, {}, "encode.token_s"),
        ({"encoder_tokens": 1, "token_s": None}, {}, "token_s is missing, the seconds that each token takes"),
        ({"encoder_tokens": 1, "bandwidth_gb_per_s": None}, {}, "bandwidth_gb_per_s is missing"),
        ({"encoder_tokens": 1, "budget_tokens": 5}, {}, "budget_tokens is of encoding in the steps of an engine"),
        ({"at": "engine"}, {}, "request_s is of machines that only encode"),
        ({"encoder_tokens": 1}, {"pools": {"a": {}, "b": {"model": "llama-3.2-1b"}}}, "encode: .* give bytes_per_token"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(
    encode: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    if "pools" in settings:
        settings = {**settings, "workload": {**DRAWN, "models": {"llama-3.1-8b": 1, "llama-3.2-1b": 1}}}
    with pytest.raises(ScenarioError, match=sentence):
        build(scenario({**ENCODE, **encode}, **settings))


SCHEDULE = {"policy": {"policy": "schedule", "at_s": [0, 0.3], "machines": [1, 2]}, "max": 2, "interval_s": 0.1}


def test_machines_that_encode_and_those_that_serve_come_and_go_and_fail() -> None:
    settings = {
        "workload": {**DRAWN, "arrivals": {"process": "poisson", "rate_per_s": 50.0}, "requests": 80},
        "autoscale": SCHEDULE,
        "failures": {"times": [{"machine": 0, "at_s": 0.4, "for_s": 0.2}, {"machine": 2, "at_s": 0.5, "for_s": 0.1}]},
    }
    asked = scenario({**ENCODE, "encoder_tokens": 500, "autoscale": SCHEDULE}, **settings)
    result = simulate(build(asked))
    assert set(result.requests["encoder"]) == {2, 3}
    assert set(result.requests["status"]) == {"finished"}
    assert result.summary["fleet"]["failures"] == 2
    with pytest.raises(ScenarioError, match=r"encode\.autoscale\.policy: perfect knows when"):
        build(
            scenario(
                {
                    **ENCODE,
                    "encoder_tokens": 1,
                    "autoscale": {**SCHEDULE, "policy": {"policy": "perfect", "rate_per_s": 5}},
                }
            )
        )


def test_a_trace_that_says_what_there_is_to_encode_says_it_alone(tmp_path: Path) -> None:
    both = with_images({**ENCODE, "encoder_tokens": 3}, tmp_path)
    with pytest.raises(ScenarioError, match="the trace says what there is to encode; leave encoder_tokens out"):
        build(both)
    notes = resolve(with_images(None, tmp_path)).manifest["notes"]
    assert any("there is no encode: every prompt is computed at once" in note for note in notes)


def test_a_refusal_of_another_trace_has_the_setting_that_lets_it_run(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,70,5\n")
    (tmp_path / "images.csv").write_text(IMAGES)
    drawn, recorded = scenario({**ENCODE, "encoder_tokens": 3}, tmp_path), with_images(ENCODE, tmp_path)
    for asked, trace in ((drawn, "plain.csv"), (drawn, "images.csv"), (recorded, "plain.csv")):
        told, sets = "", [f"workload.trace={trace}"]
        for _ in range(3):
            try:
                assert len(build(asked.with_set(*sets)).workload) > 0
            except ScenarioError as error:
                told = str(error)
                sets = [*(sets if "--set 'workload=" not in told else ()), re.search(r"--set '?([^')]+)", told)[1]]
        assert "--set" in told
        assert len(build(asked.with_set(*sets)).workload) == (1 if trace == "plain.csv" else 3)


def test_an_endpoint_does_not_encode() -> None:
    with pytest.raises(ScenarioError, match=r"encode: .* leave encode out"):
        set_up(scenario({**ENCODE, "encoder_tokens": 1}))


def test_the_column_is_read_and_written_and_joined(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(IMAGES)
    trace = read_trace(tmp_path / "images.csv")
    trace.to_csv(tmp_path / "again.csv")
    again = read_trace(tmp_path / "again.csv")
    taken, joined = again.take([1, 2]).encoder_tokens, concat([trace, again]).encoder_tokens
    assert taken is not None
    assert joined is not None
    assert (taken.tolist(), joined.tolist()) == ([0, 1152], [576, 0, 1152] * 2)
    assert trace.describe()["encoder_tokens"]["max"] == 1152
