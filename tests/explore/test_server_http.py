"""The page's server: who may ask, what it takes, one question at a time of a client, and that nothing is left when it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from sim.explore.app import App, standalone
from sim.explore.server import hosts_of, is_local, token_for
from sim.explore.session import Limits, Session
from sim.explore.workers import Event
from tests.explore.serving import SMALL

HOST = "127.0.0.1:8010"
COMMAND = [sys.executable, "-c", "from sim.cli import main; main()", "explore"]


class Answers:
    """Stands for the workers: every job says the same."""

    async def events(self, lane: str, job: Any, *, most_s: float) -> Any:
        yield Event("exact", {"key": "k", "series": {}, "took_s": 1.0, "requests": 120, "figures": {"a": "</script>"}})


def client(tmp_path: Path, *, token: str | None = None, host: str = HOST, **how: Any) -> TestClient:
    workers: Any = Answers()
    session = Session(SMALL, tmp_path / "points", workers, **how)
    hosts = hosts_of("127.0.0.1", 8010) if token is None else frozenset({host})
    return TestClient(App(session, hosts=hosts, token=token), base_url=f"http://{host}")


def events(text: str) -> list[tuple[str, Any]]:
    return [(name, json.loads(data)) for name, data in re.findall(r"event: (.*)\ndata: (.*)\n\n", text)]


def test_the_page_has_its_first_answer_inside(tmp_path):
    text = client(tmp_path).get("/").text
    found = re.search(r"window\.ROOFTRACE = (.*);</script>", text)
    assert found is not None
    start = json.loads(found[1])
    assert start["answer"]["figures"] == {"a": "</script>"}
    assert start["scenario"] == SMALL.settings()
    assert "Model" in [group["name"] for group in start["controls"]["groups"]]


def test_a_question_is_answered_by_events(tmp_path):
    response = client(tmp_path).post("/api/run", json={"set": {"replicas": 2}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response.text)[-1][0] == "exact"


def test_a_refusal_is_an_event_with_its_key(tmp_path):
    (event,) = events(client(tmp_path).post("/api/run", json={"set": {"replicas": 0}}).text)
    sentence = "default scenario: replicas is a number at least 1; got 0"
    assert event == ("refused", {"sentence": sentence, "key": "replicas"})


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1:9999"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8888"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_page_cannot_drive_the_server(tmp_path, headers):
    response = client(tmp_path).post("/api/run", json={"set": {}}, headers=headers)
    assert response.status_code == 403
    assert set(response.json()) == {"sentence"}


@pytest.mark.parametrize("host", ["localhost:8010", "127.0.0.1:8010", "[::1]:8010", "LOCALHOST:8010"])
def test_this_machine_may_be_called_by_all_its_names(tmp_path, host):
    assert client(tmp_path).get("/api/controls", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


def test_a_notebook_may_show_the_page_in_a_frame(tmp_path):
    assert client(tmp_path).get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_server_that_others_reach_needs_its_token(tmp_path):
    asked = client(tmp_path, token="secret", host="sim.example:8010")
    assert asked.get("/").status_code == 403
    assert asked.get("/?token=wrong").status_code == 403
    assert asked.get("/api/controls", headers={"x-token": "s\u00e9cret".encode()}).status_code == 403
    assert asked.get("/api/controls", headers={"x-token": "secret"}).status_code == 200
    assert asked.get("/?token=secret").status_code == 200
    assert asked.get("/api/controls").status_code == 200  # by the cookie that the page set


def test_only_loopback_goes_without_a_token():
    assert [is_local(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [True] * 4
    assert [is_local(host) for host in ("0.0.0.0", "::", "10.0.0.1", "sim.example")] == [False] * 4
    assert token_for("127.0.0.1") is None
    assert len({token_for("0.0.0.0"), token_for("0.0.0.0")}) == 2


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "../../../etc/passwd", "no.js", "", ".", "a\\b"]
)
def test_nothing_but_the_page_is_handed_out(tmp_path, name):
    assert client(tmp_path).get(f"/page/{name}").status_code in (404, 405)


def test_a_large_body_is_refused(tmp_path):
    asked = client(tmp_path, limits=Limits(body_bytes=1000))
    assert asked.post("/api/run", content=b" " * 1001).status_code == 413


@pytest.mark.parametrize("body", [b"{", b"[]", b'"a"', b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_state_is_refused(tmp_path, body):
    response = client(tmp_path).post("/api/run", content=body)
    assert response.status_code == 400
    assert response.json()["sentence"]


@pytest.mark.parametrize("given", [[], "replicas=2", {"": 1}, 3])
def test_settings_are_a_mapping(tmp_path, given):
    (event,) = events(client(tmp_path).post("/api/run", json={"set": given}).text)
    assert event[1]["sentence"].startswith("set is a mapping from dotted settings to values; got")


def test_too_many_questions_at_once_are_refused(tmp_path):
    response = client(tmp_path, limits=Limits(streams=0)).post("/api/run", json={})
    assert (response.status_code, "as many questions" in response.json()["sentence"]) == (400, True)


def test_controls_are_those_of_the_state(tmp_path):
    def keys(state: dict[str, Any]) -> set[str]:
        groups = client(tmp_path).post("/api/controls", json={"set": state}).json()["groups"]
        return {control["key"] for group in groups for control in group["controls"]}

    drawn = "{arrivals: {process: poisson, rate_per_s: 5}, prompt_tokens: 1000, output_tokens: 200, requests: 2500}"
    assert "workload.prompt_tokens.tokens" in keys({"workload": drawn}) - keys({})
    drafted = "{method: ngram, num_speculative_tokens: 4, acceptance: {alpha: 0.5}}"
    assert keys({"decoding": drafted}) - keys({}) == {"decoding.num_speculative_tokens", "decoding.acceptance.alpha"}


def test_every_choice_of_a_control_is_a_setting(tmp_path):
    """Each is refused for what it lacks at most, never for how it is written."""
    tried = 0
    for group in client(tmp_path).get("/api/controls").json()["groups"]:
        for control in group["controls"]:
            for value in control.get("choices", ())[:12]:
                SMALL.with_set(f"{control['key']}={value if isinstance(value, str) else json.dumps(value)}")
                tried += 1
    assert tried > 50


def test_controls_have_the_words_of_the_schema(tmp_path):
    from sim.scenario.schema import json_schema

    groups = client(tmp_path).get("/api/controls").json()["groups"]
    found = {control["key"]: control for group in groups for control in group["controls"]}
    assert found["parallel.tensor"]["help"] == json_schema()["$defs"]["Parallel"]["properties"]["tensor"]["description"]
    assert (found["replicas"]["minimum"], found["replicas"]["value"]) == (1, 1)
    assert found["precision"]["choices"] == list(json_schema()["properties"]["precision"]["anyOf"][0]["enum"])


def test_an_export_is_one_file_that_loads_nothing():
    text = standalone({"answer": {"figures": {}}, "events": {}})
    assert '"frozen": true' in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert not re.search(r'"/page/', text)


def processes_of(parent: int) -> set[int]:
    """All descendants of a process."""
    found: set[int] = set()
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    below = {parent}
    while below:
        below = {pid for pid, ppid in pairs if ppid in below}
        found |= below
    return found


def running(pids: set[int]) -> set[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,stat="], capture_output=True, text=True, check=True).stdout
    alive = {int(line.split()[0]) for line in listed.splitlines() if not line.split()[1].startswith("Z")}
    return pids & alive


@contextlib.contextmanager
def started(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the address that it prints."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--out", str(tmp_path), "--set", "workload.limit=120", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=;)", process.stdout.readline())
        assert found is not None
        yield process, found[0]
    finally:
        process.terminate()
        process.wait(30)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.slow(reason="a server and processes of its own")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None])
def test_no_process_is_left_when_it_ends(tmp_path, how):
    with started(tmp_path, *(["--until-stdin-ends"] if how is None else [])) as (process, url):
        with urllib.request.urlopen(url, timeout=60) as response:
            assert b"ROOFTRACE" in response.read()
        below = processes_of(process.pid)
        assert len(below) >= 3
        if how is None:
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(how)
        assert process.wait(30) == (-signal.SIGKILL if how is signal.SIGKILL else 0)
        assert any_ended(below, of=len(below))


def any_ended(pids: set[int], *, of: int = 1) -> bool:
    """Whether so many of *pids* are no more, half a minute from now at most."""
    for _ in range(600):
        if len(pids - running(pids)) >= of:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow(reason="a server and processes of its own")
@pytest.mark.parametrize("superseded", [True, False])
def test_a_question_that_is_given_up_ends_its_process(tmp_path, superseded):
    long = "{arrivals: {process: poisson, rate_per_s: 5}, prompt_tokens: 1000, output_tokens: 500, requests: 200000}"

    with started(tmp_path, "--most-requests", "200000") as (process, url):

        def ask(settings: dict[str, Any]) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=120)
            connection.request("POST", "/api/run", json.dumps({"set": settings}), {"X-Client": "a"})
            assert connection.getresponse().readline().startswith(b"event: e")
            return connection

        with urllib.request.urlopen(url, timeout=60) as response:
            response.read()
        first = ask({"workload": long})
        before = processes_of(process.pid)
        assert running(before) == before
        (ask({"replicas": 2}) if superseded else first).close()
        assert any_ended(before)
        first.close()
        last = ask({"workload": long})
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        last.close()


@pytest.mark.slow(reason="a server and processes of its own")
def test_a_port_that_is_taken_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--port", str(port), "--out", str(tmp_path)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == f"Error: cannot listen at 127.0.0.1:{port}: Address already in use; give another --port or --host\n"
    )


@pytest.mark.slow(reason="a server and processes of its own")
def test_the_page_of_a_notebook_ends_with_it(tmp_path, monkeypatch):
    import rooftrace
    import sim

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(Path(sim.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    )
    page = sim.explore(SMALL.with_set("replicas=2"))
    assert rooftrace.explore is not None
    with urllib.request.urlopen(page.url, timeout=60) as response:
        assert b'"replicas": 2' in response.read()
    assert page.url in page._repr_html_()
    page.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(page.url, timeout=5)


@pytest.mark.slow(reason="a server and processes of its own")
def test_a_notebook_is_told_why_there_is_no_page(tmp_path):
    from sim.errors import RooftraceError
    from sim.explore.notebook import explore

    with pytest.raises(RooftraceError, match=r"missing\.yaml"):
        explore(tmp_path / "missing.yaml")


@pytest.mark.slow(reason="a server and processes of its own")
def test_an_export_of_the_command_has_all_that_the_page_would_ask(tmp_path):
    file = tmp_path / "page.html"
    process = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "out"), "--set", "workload.limit=60", "--set", "slo=null", "--export", str(file)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stderr == ""
    found = re.search(r"window\.ROOFTRACE = (.*);</script>", file.read_text(encoding="utf-8"))
    assert found is not None
    told = json.loads(found[1])
    assert set(told["events"]) == {"/api/run", "/api/curve", "/api/candidates", "/api/explain", "/api/theory"}
    assert all(each[-1][0] != "refused" for each in told["events"].values() if isinstance(each, list))
