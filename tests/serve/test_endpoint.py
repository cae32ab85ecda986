"""Answers of an endpoint, and what is left when it stops."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx", reason="needs httpx (pip install -e '.[test]')")
pytest.importorskip("uvicorn", reason="needs the serve extra (pip install -e '.[serve]')")
pytest.importorskip("starlette", reason="needs the serve extra (pip install -e '.[serve]')")

import httpx

from sim import Scenario, simulate
from sim.engine.record.streaming import Stream
from sim.engine.spec.lifecycle import READY
from sim.errors import RooftraceError
from sim.serve.app import Limits
from sim.serve.bodies import Refusal, asked_of
from sim.serve.filler import WORDS
from sim.serve.script import Fault, Script, read_script
from sim.serve.session import Session
from sim.serve.setup import set_up
from tests.engine.build import patches_the_engine
from tests.serve.serving import HELD, Serving, patiently, serving, until
from workloads.texts import Approximate, digests


@pytest.fixture(scope="module")
def at() -> Iterator[Serving]:
    with serving(speed=10.0, limits=Limits(body_bytes=1 << 20, streams=8)) as found:
        yield found


def post(at: Serving, path: str = "/v1/completions", **body: Any) -> Any:
    # Without `verify` each call reads the certificates of all authorities first.
    return httpx.post(f"{at.url}{path}", json=body, timeout=30, verify=False)


def events(at: Serving, path: str, **body: Any) -> list[Any]:
    with httpx.stream("POST", f"{at.url}{path}", json={**body, "stream": True}, timeout=30, verify=False) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_an_answer_has_as_many_tokens_as_asked_for_and_says_when(at: Serving) -> None:
    answer = post(at, prompt="Tell me a story", max_tokens=7, ignore_eos=True)
    body = answer.json()
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11,
                             "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    assert len(body["choices"][0]["text"].split()) == 7
    assert body["choices"][0]["finish_reason"] == "length"
    times = httpx.get(f"{at.url}/rooftrace/requests/{answer.headers['x-rooftrace-request']}").json()
    ttft_s = (times["first_token_ns"] - times["arrival_ns"]) * 1e-9
    assert float(answer.headers["x-rooftrace-ttft-seconds"]) == pytest.approx(ttft_s, abs=1e-9)
    assert float(answer.headers["x-rooftrace-e2el-seconds"]) > ttft_s > 0


def test_a_stream_has_an_event_for_every_token_and_its_usage_when_asked(at: Serving) -> None:
    said = events(at, "/v1/completions", prompt="a b c", max_tokens=5, stream_options={"include_usage": True})
    assert [len(event["choices"]) for event in said] == [1] * 5 + [0]
    assert "".join(event["choices"][0]["text"] for event in said[:-1]) == " the of and to in"
    assert [event["choices"][0]["finish_reason"] for event in said[:-1]] == [None] * 4 + ["length"]
    assert said[-1]["usage"]["completion_tokens"] == 5
    assert all("usage" not in event for event in said[:-1])


def test_a_chat_opens_with_its_role(at: Serving) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    said = events(at, "/v1/chat/completions", messages=messages, max_completion_tokens=3)
    deltas = [event["choices"][0]["delta"] for event in said]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:]] == [" the", " of", " and"]


def test_prompts_that_begin_alike_are_found_again(at: Serving) -> None:
    begin = " ".join(f"word{i % 7}" for i in range(400))
    first = post(at, prompt=begin + " one", max_tokens=2).json()["usage"]
    second = post(at, prompt=begin + " two and more", max_tokens=2).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (first["prompt_tokens"] - 1) // 16 * 16


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": [1, -2]}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": "ten"}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**12}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 200_000}, 400, "max_tokens"),
    ({"prompt": "a", "n": 2}, 400, "n"),
    ({"prompt": "a", "logprobs": 3}, 400, "logprobs"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "a", "model": "gpt-5"}, 404, "model"),
    ({"prompt": "a", "model": 7}, 400, "model"),
    ({"prompt": "a", "priority": 2**70}, 400, "priority"),
    ({"prompt": "word " * 150_000}, 400, "prompt"),
    ({"prompt": list(range(140_000))}, 400, "prompt"),
    ({"prompt": "x" * (1 << 20)}, 413, None),
    ({"prompt": "x" * 10_000_000}, 413, None),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_is_answered_in_openai_s_words(
    at: Serving, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = post(at, **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"prompt": NaN}'])
def test_bodies_that_are_no_object_are_refused(at: Serving, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = httpx.post(f"{at.url}{path}", content=data, timeout=30, verify=False)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("messages", [None, [], "hi", [1], [{"content": "x"}], [{"role": "user", "content": 3}],
                                      [{"role": "user", "content": [{"type": "image_url"}]}]])  # fmt: skip
def test_messages_are_checked(at: Serving, messages: Any) -> None:
    answer = post(at, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)


def test_unknown_places_and_methods_are_answered_in_the_same_shape(at: Serving) -> None:
    assert httpx.get(f"{at.url}/v2/nothing").json()["error"]["code"] == 404
    assert httpx.get(f"{at.url}/v1/completions").json()["error"]["code"] == 405
    assert httpx.get(f"{at.url}/rooftrace/requests/999999").json()["error"]["code"] == 404
    assert httpx.get(f"{at.url}/v1/models/none").json()["error"]["code"] == 404


def test_models_and_tokens_are_told(at: Serving) -> None:
    (card,) = httpx.get(f"{at.url}/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("llama-3.1-8b", 131072)
    assert httpx.get(f"{at.url}/v1/models/{card['id']}").json() == card
    assert httpx.get(f"{at.url}/health").status_code == 200
    told = post(at, "/tokenize", prompt="It is a test").json()
    assert told["count"] == len(told["tokens"]) == 4


def test_more_streams_than_allowed_are_told_to_come_again(at: Serving) -> None:
    long = {"prompt": "a", "max_tokens": 120_000, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=30) as client:
        opened = [
            client.send(client.build_request("POST", f"{at.url}/v1/completions", json=long), stream=True)
            for _ in range(8)
        ]
        try:
            refused = post(at, prompt="a", max_tokens=1)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        finally:
            for response in opened:
                response.close()
    until(lambda: post(at, prompt="a", max_tokens=1).status_code == 200)


def metrics(at: Serving) -> dict[str, float]:
    return samples(httpx.get(f"{at.url}/metrics").text)


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_go_by_vllm_s_names_and_say_how_late_the_endpoint_is(at: Serving) -> None:
    before = metrics(at)
    events(at, "/v1/completions", prompt="a b c", max_tokens=9)
    after = metrics(at)
    label = '{model_name="llama-3.1-8b",engine="0"}'
    grown = {name: after[f"vllm:{name}{label}"] - before[f"vllm:{name}{label}"] for name in (
        "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    )}  # fmt: skip
    assert list(grown.values()) == [3, 9, 1, 8, 1]
    assert after["rooftrace:handed_over_lag_seconds_count"] - before["rooftrace:handed_over_lag_seconds_count"] == 9
    assert after["rooftrace:lag_bound_seconds"] == 0.02


def test_a_session_is_a_results_folder_and_its_arrivals_give_the_same_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with serving("replicas=2", "router=least_outstanding", speed=20.0) as at:

        def one(i: int) -> None:
            words = ["alpha"] * int(rng.integers(0, 300)) + [f"w{i}"] * int(rng.integers(1, 300))
            events(at, "/v1/completions", prompt=" ".join(words), max_tokens=int(rng.integers(1, 60)))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
            time.sleep(0.005)
        with (
            httpx.Client(timeout=30) as client,
            client.stream(
                "POST", f"{at.url}/v1/completions", json={"prompt": "x", "max_tokens": 120_000, "stream": True}
            ) as gone,
        ):
            next(gone.iter_lines())
        until(lambda: at.endpoint.gone == 1)
        for thread in threads:
            thread.join()
        # Whoever has gone runs no longer.
        until(lambda: not any(load.running or load.waiting for load in at.session.run.loads()))
    served = at.results(tmp_path / "served")
    assert served.summary["requests"]["finished"] == 16
    again = simulate(Scenario.load(tmp_path / "served" / "replay.yaml"))
    for name, column in again.columns.requests.items():
        assert np.array_equal(column, served.columns.requests[name]), name
    assert again.columns.requests["status"].tolist().count(3) == 1
    assert again.columns.requests["prefix_hit_tokens"].sum() > 0


def test_a_client_that_stops_reading_holds_up_nobody_else() -> None:
    name = "m" * 20_000  # so that every event is long
    with serving(speed=200.0, limits=Limits(stall_s=0.4), names=(name,)) as at:
        host, port = at.url.removeprefix("http://").split(":")
        body = json.dumps({"model": name, "prompt": "a", "max_tokens": 2000, "stream": True}).encode()
        with socket.create_connection((host, int(port))) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert post(at, prompt="a", max_tokens=5).status_code == 200
            until(lambda: at.endpoint.gone == 1)
            assert post(at, prompt="a", max_tokens=5).status_code == 200
            assert not at.session.open


@pytest.mark.slow(reason="waits until the server has waited long enough")
def test_connections_without_a_request_and_heads_without_an_end_are_closed() -> None:
    with serving(limits=Limits(head_s=0.2, head_bytes=20_000)) as at:
        host, port = at.url.removeprefix("http://").split(":")

        def answered(there: socket.socket) -> socket.socket:
            there.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if not there.recv(1000).startswith(b"HTTP/1.1 200"):
                raise ConnectionError
            return there

        def closed(there: socket.socket) -> bool:
            there.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while there.recv(1000):
                    pass
            return True

        with socket.create_connection((host, int(port))) as idle:
            assert closed(idle)
        with patiently(lambda: answered(socket.create_connection((host, int(port))))) as endless:
            # The first request came in time, and its head was short.
            time.sleep(0.3)
            with contextlib.suppress(ConnectionError):
                endless.sendall(b"GET /health HTTP/1.1\r\n")
                for i in range(40):
                    endless.sendall(b"X-%d: " % i + b"x" * 1000 + b"\r\n")
                    time.sleep(0.002)
            assert closed(endless)
        body = json.dumps({"prompt": "a " * 20_000, "max_tokens": 2}).encode()
        assert patiently(lambda: httpx.post(f"{at.url}/v1/completions", content=body)).status_code == 200


def test_contents_have_names_by_block() -> None:
    tokens = list(range(40))
    assert len(digests(tokens, 16)) == 2
    assert len(digests(tokens[:32], 16)) == 2
    assert len(digests(tokens[:31], 16)) == 1
    assert digests(tokens[16:32], 16) == digests(tokens, 16)[1:]
    assert len(set(digests(tokens, 16))) == 2
    assert all(0 <= name < 2**63 for name in digests(list(range(2**32 - 4096, 2**32)), 16))


def test_the_longest_answer_that_a_model_takes_is_served(at: Serving) -> None:
    asked = asked_of({"prompt": "a", "max_tokens": 90}, chat=False)
    assert at.endpoint._lengths(asked, 10, 100) == (90, 90)
    with pytest.raises(Refusal, match="100 tokens; 11 are in the prompt and 90 are asked for"):
        at.endpoint._lengths(asked, 11, 100)
    both = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "max_completion_tokens": 7}
    assert asked_of(both, chat=True).max_tokens == 7


def test_bodies_are_bounded_together_and_in_time() -> None:
    with serving(limits=Limits(bodies_bytes=1000, body_s=0.3)) as at:
        refused = post(at, prompt="a " * 2000, max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        until(lambda: post(at, prompt="a", max_tokens=1).status_code == 200)
        host, port = at.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.settimeout(60)
            slow.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"prompt": ')
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        until(lambda: at.endpoint.bytes_of_bodies == 0 and at.endpoint.busy == 0)


def test_usage_may_come_with_every_event(at: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    said = events(at, "/v1/completions", prompt="a b c", max_tokens=4, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in said] == [1, 2, 3, 4, 4]
    assert [event["usage"]["total_tokens"] for event in said] == [4, 5, 6, 7, 7]


def test_conversations_are_told_apart() -> None:
    with serving(speed=50.0) as at:
        for name in ("x", "y", "x", None):
            httpx.post(
                f"{at.url}/v1/completions", json={"prompt": "a", "max_tokens": 1},
                headers={} if name is None else {"X-Session-Id": name}, timeout=30,
            )  # fmt: skip
        session = at.session.run.trace().session
    assert session is not None
    assert session.tolist() == [0, 1, 0, -1]


def test_counts_are_those_of_the_results(tmp_path: Path) -> None:
    session = Session(set_up(Scenario.default().with_set("memory.kv_blocks=40")), speed=1e-6, bound_s=1e9, warn=print)
    for i in range(9):
        session.ask(prompt_tokens=121, output_tokens=150, max_tokens=150, digests=[1, 2, 3, 4, 5, 6, i], model=0)
    session.run.advance(10**12)
    assert not session.open
    counted = samples("\n".join(session.counted.lines(session.run)))
    requests = session.write(tmp_path, facts={}).columns.requests
    label = '{model_name="llama-3.1-8b",engine="0"}'
    assert counted[f"vllm:num_preemptions_total{label}"] == requests["preemptions"].sum() > 0
    assert counted[f"vllm:prefix_cache_hits_total{label}"] == requests["prefix_hit_tokens"].sum() > 0
    assert counted[f"vllm:generation_tokens_total{label}"] == requests["output_tokens"].sum()
    for name, begin, end in (
        ("request_queue_time", "arrival_ns", "scheduled_ns"),
        ("request_prefill_time", "scheduled_ns", "first_token_ns"),
        ("request_decode_time", "first_token_ns", "finish_ns"),
        ("time_to_first_token", "arrival_ns", "first_token_ns"),
        ("e2e_request_latency", "arrival_ns", "finish_ns"),
    ):
        total_s = (requests[end] - requests[begin]).sum() * 1e-9
        assert counted[f"vllm:{name}_seconds_sum{label}"] == pytest.approx(total_s), name
        bucket = f'vllm:{name}_seconds_bucket{{model_name="llama-3.1-8b",engine="0",le="+Inf"}}'
        assert counted[bucket] == counted[f"vllm:{name}_seconds_count{label}"] == 9


@patches_the_engine
def test_who_waits_when_the_simulation_breaks_is_told() -> None:
    def breaks(_to_ns: int) -> None:
        raise RuntimeError("broken")

    def told() -> bytes:
        with serving(speed=1.0) as at:
            host, port = at.url.removeprefix("http://").split(":")
            body = json.dumps({"prompt": "a", "max_tokens": 500}).encode()
            with socket.create_connection((host, int(port))) as there:
                there.settimeout(60)
                there.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                until(lambda: at.session.open)
                at.session.run.advance = breaks  # type: ignore[method-assign]
                answers.append(there.recv(100))
        return answers[0]

    answers: list[bytes] = []
    with pytest.raises(RuntimeError, match="broken"):
        told()
    assert answers[0].startswith(b"HTTP/1.1 503")


def test_faults_are_of_their_time_and_model() -> None:
    script = Script((Fault(from_s=10, to_s=20, status=503, every=2), Fault(cut_after=3, model="b")))
    found = [script.fault_of(at_s, "a") for at_s in (9.9, 10, 15, 19.9, 20)]
    assert [0 if fault is None else fault.status for fault in found] == [0, 503, 0, 503, 0]
    cut = script.fault_of(5, "b")
    assert cut is not None
    assert cut.cut_after == 3


def test_lag_beyond_the_bound_is_warned_of() -> None:
    with serving(speed=1.0, bound_s=1e-9) as at:
        post(at, prompt="a", max_tokens=2)
        post(at, prompt="a", max_tokens=2)
    # Once in ten seconds at most.
    assert len(at.warnings) == 1
    assert "behind simulated time" in at.warnings[0]
    assert at.session.pacer.handed.late == 2


def test_lengths_may_be_the_workload_s() -> None:
    with serving("workload={trace: conversation, requests: 50}", speed=100.0, outputs="workload") as at:
        lengths = at.session.setup.lengths
        got = [post(at, prompt="a", max_tokens=100).json() for _ in range(5)]
        asked = post(at, prompt="a", max_tokens=11, ignore_eos=True).json()
    assert [each["usage"]["completion_tokens"] for each in got] == np.minimum(lengths[:5], 100).tolist()
    reasons = ["length" if n >= 100 else "stop" for n in lengths[:5].tolist()]
    assert [each["choices"][0]["finish_reason"] for each in got] == reasons
    assert asked["usage"]["completion_tokens"] == 11


def test_a_script_fails_requests_and_cuts_streams() -> None:
    script = Script((Fault(status=503, every=2, to_s=1e6), Fault(cut_after=3)))
    with serving(speed=10.0, script=script) as at:
        assert post(at, prompt="a", max_tokens=5).status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            events(at, "/v1/completions", prompt="a", max_tokens=50)
        assert post(at, prompt="a", max_tokens=5).status_code == 503
        until(lambda: not at.session.open)
        assert httpx.get(f"{at.url}/health").status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        "a: 1",
        "[1]",
        "[{status: 200}]",
        "[{from_s: -1, status: 503}]",
        "[{stauts: 503}]",
        "[{from_s: 3}]",
        "[{status: 503, every: 0}]",
    ],
)
def test_scripts_are_checked(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.yaml").write_text(text)
    with pytest.raises(RooftraceError, match="--script"):
        read_script(tmp_path / "script.yaml")


def test_many_models_are_behind_one_port(tmp_path: Path) -> None:
    scenario = Scenario.load(Path(__file__).parents[2] / "examples" / "pools.yaml")
    with serving(speed=20.0, scenario=scenario) as at:
        names = [card["id"] for card in httpx.get(f"{at.url}/v1/models").json()["data"]]
        assert len(names) == 2
        times = [post(at, model=name, prompt="a b c", max_tokens=5) for name in names]
        assert [answer.status_code for answer in times] == [200, 200]
        assert {answer.json()["model"] for answer in times} == set(names)
        engines = {line.partition("{")[2].partition(" ")[0] for line in httpx.get(f"{at.url}/metrics").text.splitlines()
                   if line.startswith("vllm:num_requests_running")}  # fmt: skip
        assert {name for name in names if any(name in engine for engine in engines)} == set(names)
    served = at.results(tmp_path / "served")
    again = simulate(Scenario.load(tmp_path / "served" / "replay.yaml"))
    for name, column in again.columns.requests.items():
        assert np.array_equal(column, served.columns.requests[name]), name
    assert again.columns.requests["model_index"].tolist() == [0, 1]


FAILS = "failures={times: [{machine: 0, at_s: 0.7, for_s: 20}], in_flight: %s}"


def begun_together(at: Serving, asked: Sequence[Callable[[], Any]], speed: float) -> list[Any]:
    """The answers to requests that have all come before simulated time runs on at *speed*."""
    with ThreadPoolExecutor(len(asked)) as pool:
        found = [pool.submit(ask) for ask in asked]
        until(lambda: len(at.session.open) == len(asked))
        at.run_on(speed)
        return [each.result() for each in found]


@pytest.mark.slow(reason="a server in real time")
@pytest.mark.parametrize("in_flight", ["resume", "retry"])
def test_a_stream_goes_on_when_its_machine_fails(tmp_path: Path, in_flight: str) -> None:
    with serving("replicas=2", "router=round_robin", FAILS % in_flight, speed=HELD) as at:
        ask = {"prompt": "a b c", "max_tokens": 160, "stream_options": {"include_usage": True}}
        (said,) = begun_together(at, [lambda: events(at, "/v1/completions", **ask)], speed=1.0)
        assert at.session.run.replica(0) == 1
    text = "".join(event["choices"][0]["text"] for event in said[:-1])
    assert text.split() == [WORDS[i % len(WORDS)] for i in range(160)]
    assert said[-1]["usage"]["completion_tokens"] == 160
    served = at.results(tmp_path / "served")
    assert served.columns.requests["failures"].tolist() == [1]
    fleet = served.columns.meta["fleet"]
    assert (fleet["resumed"], fleet["retried"]) == ((1, 0) if in_flight == "resume" else (0, 1))
    # Who begins anew has all tokens emitted again, and its client is given those alone that it does not have.
    assert (fleet["discarded_tokens"] > 10) == (in_flight == "retry")
    times = at.session.run
    assert (times.first_token_ns(0) > 700_000_000) == (in_flight == "retry")
    again = simulate(Scenario.load(tmp_path / "served" / "replay.yaml"))
    for name, column in again.columns.requests.items():
        assert np.array_equal(column, served.columns.requests[name]), name


@pytest.mark.slow(reason="a server in real time")
def test_who_is_lost_with_a_machine_is_told_to_come_again() -> None:
    with serving("replicas=2", "router=round_robin", FAILS % "lose", speed=HELD) as at:
        (answer,) = begun_together(at, [lambda: post(at, prompt="a", max_tokens=2000)], speed=1.0)
        # The stream was on the other machine.
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "its machine failed"
        assert post(at, prompt="a", max_tokens=3).status_code == 200
        assert (
            metrics(at)['vllm:request_success_total{model_name="llama-3.1-8b",engine="0",finished_reason="error"}'] == 1
        )


@pytest.mark.slow(reason="a server in real time")
def test_a_machine_is_started_when_requests_wait() -> None:
    policy = "{policy: target_tracking, measure: concurrency, target: 2}"
    scale = f"autoscale={{policy: {policy}, min: 1, max: 3, interval_s: 1, start: {{boot: 2}}}}"
    with serving("router=least_outstanding", scale, speed=HELD) as at:
        assert len(at.session.run.loads()) == 3
        assert sum(name.startswith("vllm:num_requests_running") for name in metrics(at)) == 1
        found = begun_together(at, [lambda: post(at, prompt="a", max_tokens=1500)] * 12, speed=20.0)
        assert {answer.status_code for answer in found} == {200}
        fleet = at.session.run._fleet
        assert fleet is not None
        assert sum(state == READY for state in fleet.states) > 1
        assert sum(name.startswith("vllm:num_requests_running") for name in metrics(at)) > 1


def test_what_cannot_be_served_is_said_before() -> None:
    for setting, said in (
        ("workload.predictor={}", "workload.predictor: nobody guesses"),
        ("classes={a: {share: 1}}", "classes: a request that a client sends says no class"),
        ("autoscale={policy: {policy: perfect}, min: 1, max: 2}", "autoscale.policy: perfect knows when requests come"),
    ):
        settings = [setting, "router=least_outstanding"] if "autoscale" in setting else [setting]
        with pytest.raises(RooftraceError, match=said):
            set_up(Scenario.default().with_set(*settings))
    late = set_up(Scenario.default().with_set("replicas=2", "router={policy: llm_d, event_delay_s: 0.1}"))
    assert "may route otherwise" in late.built.manifest["notes"][-1]


def test_a_prompt_that_only_machines_that_decode_cannot_hold_is_refused() -> None:
    pools = "pools={first: {role: prefill}, second: {role: decode, memory: {kv_blocks: 50}}}"
    with serving(pools, "links={net: {bandwidth_gb_per_s: 50}}", "handover={like: vllm}", speed=20.0) as at:
        refused = post(at, prompt="word " * 2000, max_tokens=10)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")
        assert len(events(at, "/v1/completions", prompt="a b c", max_tokens=9)) == 9


def test_a_session_on_measured_steps_is_replayed_from_the_same_file(tmp_path: Path) -> None:
    rows = [f"{batch},1,{cached},{5 + batch / 10 + cached / 1e4}" for batch in (1, 64) for cached in (10, 9000)]
    rows += [f"1,{tokens},0,{5 + tokens / 50}" for tokens in (100, 4000)]
    (tmp_path / "steps.csv").write_text("\n".join(["batch_size,new_tokens,cached_tokens,latency_ms", *rows]))
    steps = f"hardware={{steps: {os.path.relpath(tmp_path / 'steps.csv')}, device: h100-sxm}}"
    with serving(steps, "workload={trace: conversation, limit: 50}", speed=50.0) as at:
        for _ in range(3):
            post(at, prompt="a " * 300, max_tokens=5)
    served = at.results(tmp_path / "served")

    again = Scenario.load(tmp_path / "served" / "replay.yaml")
    assert again.settings()["hardware"]["steps"] == str((tmp_path / "steps.csv").resolve())
    assert not any("replay.yaml" in note for note in served.manifest["notes"])
    assert simulate(again).summary["ttft_s"] == served.summary["ttft_s"]


def test_what_was_chosen_for_a_session_stays_in_its_replay(tmp_path: Path) -> None:
    auto = "scheduler={policy: sarathi, token_budget: auto}"
    with serving(auto, "workload={trace: conversation, limit: 50}", speed=50.0) as at:
        for _ in range(3):
            post(at, prompt="a " * 900, max_tokens=5)
    served = at.results(tmp_path / "served")
    again = Scenario.load(tmp_path / "served" / "replay.yaml")
    chosen = at.session.setup.chosen["scheduler.token_budget"]
    assert again.scheduler.settings["token_budget"] == chosen
    assert not any("replay.yaml" in note for note in served.manifest["notes"])
    longer = (
        "workload={arrivals: {process: poisson, rate_per_s: 1}, prompt_tokens: 3000, output_tokens: 10, requests: 5}"
    )
    other = at.session.setup.scenario.with_set(longer)
    assert set_up(other).chosen["scheduler.token_budget"] != chosen


def test_a_replay_that_plans_otherwise_is_told_of(tmp_path: Path) -> None:
    scenario = Scenario.load(Path(__file__).parents[2] / "examples" / "speculative-adaptive.yaml")
    with serving(speed=50.0, scenario=scenario) as at:
        post(at, prompt="a " * 3000, max_tokens=5)
    served = at.results(tmp_path / "served")
    assert "differs in replicas" in served.manifest["notes"][-1]


def test_all_that_is_worked_out_once_is_worked_out_before_anybody_comes() -> None:
    setup = set_up(Scenario.default())
    session = Session(setup, speed=1.0, bound_s=1.0, warn=print)
    # The longest of four does not fit where the model takes less.
    assert session.warm_up() == 4
    assert len(session.run) == 0


def test_a_request_has_come_when_its_bytes_have() -> None:
    counted_ns: list[int] = []

    class Slow(Approximate):
        def of(self, text: str, /) -> Any:
            counted_ns.append(at.session.pacer.present_ns())
            time.sleep(0.05)
            return super().of(text)

    # Slowed down, so that the front end of the simulated server takes 0.3 s of the wall clock.
    with serving(speed=0.05, tokens=Slow(), bound_s=60.0) as at:
        answer = post(at, prompt="a", max_tokens=1)
    assert float(answer.headers["x-rooftrace-arrival-seconds"]) * 1e9 <= counted_ns[0]


@pytest.mark.parametrize(("rule", "pieces"), [("tokens", [1, 3, 3, 1]), ("iterations", [1, 2, 3, 2])])
def test_tokens_come_in_the_groups_of_the_server(rule: Any, pieces: list[int]) -> None:
    with serving(speed=20.0) as at:
        at.session._stream = Stream(interval=3, rule=rule)
        said = events(at, "/v1/completions", prompt="a b", max_tokens=8)
    assert [len(event["choices"][0]["text"].split()) for event in said] == pieces


def test_a_port_in_use_is_one_sentence() -> None:
    from sim.serve.server import listen

    taken = listen("127.0.0.1", 0)
    with taken, pytest.raises(RooftraceError, match="cannot listen at 127"):
        listen("127.0.0.1", taken.getsockname()[1])
