"""A deployment observed from end to end: our own endpoint in simulated time, with settings that the observer is not told."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.overheads import serving_stack
from hwmodels.stack_files import dump_stack_file
from sim import Scenario
from sim.bench.formats.prometheus import text_sample
from sim.cli import build_app
from sim.errors import RooftraceError
from sim.observe import drift, observed, observed_traffic
from sim.observe.dashboard import dashboard, exposition, predicted_name
from sim.observe.names import makers
from sim.observe.observation import How, Observation, Source, observe, traffic_of
from sim.observe.query import instant_of, query_range
from sim.observe.replay import QUANTITIES, beside, hours, replay
from sim.observe.samples import Matching
from sim.observe.serving import Served, server_of
from sim.observe.what_if import alternative, counterfactual, room
from tests.observe.deployed import BEGAN_S, Deployed
from tests.observe.observing import answering, run

LENGTHS = (
    "prompt_tokens: {distribution: lognormal, mean: 500, median: 400}, "
    "output_tokens: {distribution: lognormal, mean: 60, median: 45}"
)


def told(replicas: int = 3, rate: float = 10, seconds: float = 24) -> Scenario:
    """The deployment as the observer knows it, which begins with the traffic that it serves."""
    arrivals = f"arrivals: {{process: poisson, rate_per_s: {rate}}}, duration_s: {seconds}"
    return Scenario.default().with_set(
        f"replicas={replicas}", "router=least_outstanding", f"workload={{{arrivals}, {LENGTHS}}}"
    )


@contextlib.contextmanager
def prometheus(deployed: Deployed, began_s: float = BEGAN_S) -> Iterator[str]:
    """A server that answers range queries as Prometheus does, over the scrapes of a deployment; it gives the latest sample."""
    scrapes = [
        (at_s, [sample for line in text.splitlines() if not line.startswith("#") and (sample := text_sample(line))])
        for at_s, text in deployed.scrapes
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            start, end, step = (float(form[name][0]) for name in ("start", "end", "step"))
            wanted = set(form["query"][0].partition('=~"')[2].partition('"')[0].split("|"))
            found: dict[Any, list[Any]] = {}
            for at_s in np.arange(start, end + 1e-6, step):
                latest = [samples for when_s, samples in scrapes if at_s - 300 < when_s <= at_s][-1:]
                for sample in (each for samples in latest for each in samples if each.name in wanted):
                    key = (sample.name, *sorted(sample.labels.items()))
                    found.setdefault(key, []).append([float(at_s), repr(sample.value)])
            result = [
                {"metric": {"__name__": key[0], **dict(key[1:])}, "values": values} for key, values in found.items()
            ]
            body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


@pytest.fixture(scope="module")
def sound() -> Deployed:
    return Deployed(told(), scrape_s=1.0)


@pytest.fixture(scope="module")
def logged(sound: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "access.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sound.log))
    return path


def test_rates_and_lengths_over_http_are_those_of_the_deployment(sound: Deployed) -> None:
    end_s = sound.scrapes[-1][0]
    with prometheus(sound) as url:
        series = query_range(url, since_s=BEGAN_S, until_s=end_s, step_s=1.0, matching=Matching(labels={}))
    seen = observed(series, url)
    assert seen.instances == ("0", "1", "2")
    traffic = observed_traffic(seen)
    assert traffic.requests == pytest.approx(len(sound.log), rel=0.02)
    trace = traffic.workload(0)
    for name in ("prompt_tokens", "output_tokens"):
        assert getattr(trace, name).mean() == pytest.approx(np.mean([row[name] for row in sound.log]), rel=0.03)


def test_a_log_alone_is_replayed_request_by_request(sound: Deployed, logged: Path) -> None:
    seen, rows = Source(files=(logged,)).read()
    traffic = traffic_of(Source(), seen, rows)
    assert len(traffic.workload(0)) == len(sound.log)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    both = beside(seen, edges_s, replay(told(), traffic, edges_s, seeds=[0]))
    for name, bound in (("requests_per_s", 0.001), ("ttft_s", 0.02), ("itl_s", 0.02), ("in_flight", 0.05)):
        whole = both.whole(name)
        assert whole is not None
        assert whole[1] == pytest.approx(whole[0], rel=bound), name


def test_what_nobody_counts_is_no_row_of_the_comparison(logged: Path) -> None:
    seen, rows = Source(files=(logged,)).read()
    traffic = traffic_of(Source(), seen, rows)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    assert beside(seen, edges_s, replay(told(), traffic, edges_s, seeds=[0])).whole("kv_used") is None


def causes_of(change: str | None, tmp_path: Path) -> list[tuple[str, str]]:
    scenario = told(rate=12, seconds=60)
    deployed = Deployed(scenario if change is None else scenario.with_set(change), scrape_s=1.0)
    seen = observed(deployed.series(tmp_path), "x")
    traffic = observed_traffic(seen)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    replayed = replay(scenario, traffic, edges_s, seeds=[0])
    return [(each.kind, each.instance) for each in drift.causes(seen, edges_s, replayed)]


@pytest.mark.slow(reason="many random runs")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, []),
        ("failures={slow: [{machine: 1, factor: 1.3}]}", [("slow machine", "1")]),
        ("router=random", [("router that does not see load", "")]),
    ],
    ids=["sound", "slow machine", "router"],
)
def test_faults_are_named_and_nothing_is_named_without_one(
    change: str | None, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert causes_of(change, tmp_path) == expected


def test_a_change_is_found_where_it_began() -> None:
    rng = np.random.default_rng(7)
    changed = rng.normal(0, 0.03, 48) + np.where(np.arange(48) >= 30, 0.12, 0.0)
    assert drift.change_in(changed, drift.scatter(changed, 0.02)) in (29, 30, 31)


def test_without_a_change_an_alarm_is_as_rare_as_is_said() -> None:
    """At 1 % of 500 observations, more than 13 have a probability of 0.1 %; scatter is estimated as well."""
    rng = np.random.default_rng(11)
    draws = rng.normal(size=(500, 24))
    assert sum(drift.change_in(values, drift.scatter(values, 0.0)) is not None for values in draws) <= 13


def test_the_dashboard_has_both_curves_of_each_quantity_that_is_observed() -> None:
    found = dashboard(["vLLM"], {"namespace": "prod"})
    assert [panel["title"] for panel in found["panels"]][:3] == ["Requests finished", "Output tokens", "TTFT, mean"]
    assert len(found["panels"]) == 7
    for panel in found["panels"]:
        assert [target["legendFormat"] for target in panel["targets"]] == ["observed", "predicted"]
    assert found["panels"][0]["targets"][0]["expr"] == (
        'sum(rate(vllm:request_success_total{namespace="prod"}[$__rate_interval]))'
    )
    json.dumps(found)


def test_every_quantity_that_a_maker_is_said_to_have_is_read(tmp_path: Path) -> None:
    """For each maker a scrape with all of its names, twice as much in the second."""
    for maker in makers().values():
        if maker.key == "table":
            continue
        texts = {at: "\n".join(lines_of(maker, at)) for at in (1, 2)}
        folder = tmp_path / maker.key
        folder.mkdir()
        files = []
        for at, text in texts.items():
            files.append(folder / f"{1_700_000_000 + 60 * at}.prom")
            files[-1].write_text(text)
        seen, _ = Source(files=tuple(files)).read()
        assert seen.makers == (maker.title,)
        assert set(maker.counter) == set(seen.counters)
        assert set(maker.histogram) | set(maker.pair) == set(seen.histograms)
        assert set(maker.gauge) - {"kv_tokens", "kv_blocks", "kv_block_tokens"} == set(seen.gauges)


def lines_of(maker: Any, at: int) -> Iterator[str]:
    for names in (*maker.counter.values(), *maker.gauge.values(), *maker.pair.values()):
        where = f'{{{names[0].label}="{names[0].value}"}}' if names[0].label else ""
        yield f"{names[0].metric}{where} {0.25 * at}"
    for names in maker.histogram.values():
        yield f'{names[0].metric}_bucket{{le="+Inf"}} {10 * at}'
        yield f"{names[0].metric}_count {10 * at}"
        yield f"{names[0].metric}_sum {30 * at}"


def test_spans_of_opentelemetry_are_requests(tmp_path: Path) -> None:
    def attribute(key: str, value: Any) -> dict[str, Any]:
        kind = {int: "intValue", float: "doubleValue", str: "stringValue"}[type(value)]
        return {"key": key, "value": {kind: value}}

    spans = [
        {
            "name": "llm_request",
            "startTimeUnixNano": str((BEGAN_S + at) * 1_000_000_000),
            "endTimeUnixNano": str((BEGAN_S + at + 2) * 1_000_000_000),
            "attributes": [
                attribute("gen_ai.usage.input_tokens", 300),
                attribute("gen_ai.usage.output_tokens", 11),
                attribute("gen_ai.latency.time_to_first_token", 0.5),
                attribute("gen_ai.conversation.id", f"c{at % 2}"),
            ],
        }
        for at in range(4)
    ]
    server = {"attributes": [attribute("service.instance.id", "pod-a")]}
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps({"resourceSpans": [{"resource": server, "scopeSpans": [{"spans": spans}]}]}) + "\n")
    seen, rows = Source(files=(path,)).read()
    assert rows is not None
    assert rows.instance == ("pod-a",) * 4
    assert rows.session is not None
    assert rows.session.tolist() == [0, 1, 0, 1]
    assert rows.ttft_s is not None
    assert rows.ttft_s.tolist() == [0.5] * 4
    assert rows.e2el_s is not None
    assert rows.e2el_s.tolist() == [2.0] * 4
    assert seen.instances == ("pod-a",)


def test_requests_are_rerouted_one_by_one_from_where_the_log_says_they_went(logged: Path) -> None:
    seen, rows = Source(files=(logged,)).read()
    traffic = traffic_of(Source(), seen, rows)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    same = counterfactual(told(), traffic, edges_s)
    other = counterfactual(told().with_set("router=round_robin"), traffic, edges_s)
    assert same.moved < 0.05
    assert 0.4 < other.moved < 0.9
    assert rows is not None
    assert [each["went_to"] for each in other.rows()] == list(rows.instance or ())
    with pytest.raises(RooftraceError, match="names 3 instances and the scenario has 2 machines"):
        counterfactual(told(replicas=2), traffic, edges_s)


def test_instants_are_dates_numbers_or_so_long_ago() -> None:
    assert instant_of("90m", "--since", now_s=10_000) == 4_600
    assert instant_of("1700000000", "--since") == 1_700_000_000
    assert (
        instant_of("2023-11-14T22:13:20", "--since") == instant_of("2023-11-14T22:13:20Z", "--since") == 1_700_000_000
    )
    with pytest.raises(RooftraceError, match="--since 'yesterday'"):
        instant_of("yesterday", "--since")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(told().to_yaml())
    return path


@pytest.mark.slow(reason="many random runs")
def test_the_command_lays_alternatives_beside_what_was_observed(logged: Path, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        logged, "--scenario", scenario, "--no-fit", "--replications", 2, "--what-if", "replicas=2",
        "--what-if", "router=round_robin; replicas=3", "--out", out, "--export-dashboard", tmp_path / "d.json", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    fewer, other = found["what_if"]
    by_metric = {each["metric"]: each for each in fewer["differences"]}
    assert by_metric["tpot_s.p50"]["change"] > 0
    assert by_metric["costs.usd"]["change"] == pytest.approx(-1 / 3, rel=0.05)
    assert other["set"] == ["router=round_robin", "replicas=3"]
    assert found["rerouted"]["set"] == ["router=round_robin", "replicas=3"]
    assert found["rerouted"]["requests"] == found["traffic"]["requests"]
    with (out / "rerouted.csv").open() as file:
        assert len(list(csv.DictReader(file))) == found["rerouted"]["requests"]
    again = CliRunner().invoke(
        build_app(), ["run", str(out / "observed.yaml"), "--json", "--out", str(tmp_path / "run")]
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["requests"]["total"] == found["traffic"]["requests"]


def test_the_command_without_a_scenario_writes_the_traffic(sound: Deployed, tmp_path: Path) -> None:
    done = run(*sound.files(tmp_path), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "requests.csv").is_file()
    assert "Traffic" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--what-if", "replicas=2"], "need a deployment to simulate"),
        ([], "give files of metrics or logs, or --prometheus URL"),
        (["--prometheus", "http://127.0.0.1:9"], "--prometheus needs --since"),
        (["--prometheus", "127.0.0.1:9", "--since", "1h"], "expected an address such as http"),
    ],
)
def test_what_cannot_be_observed_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_predicted_figures_are_served_and_read_as_metrics(sound: Deployed, tmp_path: Path) -> None:
    seen = observed(sound.series(tmp_path), "x")
    found = observe(told(), seen, observed_traffic(seen), out=tmp_path, how=How(fits=False, replications=1))
    server = server_of(Served(exposition(found), None, 1.0, print), "127.0.0.1", 0)
    with answering(server) as url:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            samples = [text_sample(line) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/", timeout=30)
    names = {each.name for each in samples if each is not None}
    assert names >= {predicted_name(quantity) for quantity in QUANTITIES}
    (error,) = [s.value for s in samples if s is not None and s.labels.get("quantity") == "inter_token_latency_seconds"]
    assert abs(error) < 0.05


def stack_of(folder: Path) -> Path:
    """A fitted stack: 2 ms of host work a step and 30 ms before the scheduler."""
    own = serving_stack("vllm")
    stack = replace(own, overheads=replace(own.overheads, step_s=2e-3, admission_s=0.03))
    errors = {"repeat": {"tpot_s": 0.02, "ttft_s": 0.06}, "model": {"tpot_s": 0.03, "ttft_s": 0.1}}
    text = dump_stack_file(
        stack=stack, release=None, kv_factor=1.0, fit={"of": "a test"},
        errors={**errors, "unseen": errors["model"], "scale": 1.0, "source": "none"},
        posterior={"names": [], "own": [], "at": [], "widths": [], "covariance": []},
    )  # fmt: skip
    (folder / "hidden.toml").write_text(text)
    return folder / "hidden.toml"


def hidden(folder: Path) -> Scenario:
    """A deployment with that stack and 2,000 KV blocks."""
    return waves().with_set(f"serving_stack={stack_of(folder)}", "memory={kv_blocks: 2000}")


def until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def waves() -> Scenario:
    arrivals = "{process: sinusoidal, rate_per_s: 6, amplitude: 0.9, period_s: 200}"
    return told(replicas=2).with_set(f"workload={{arrivals: {arrivals}, duration_s: 250, {LENGTHS}}}")


@pytest.mark.slow(reason="enough samples for narrow statistics")
def test_settings_that_the_observer_is_not_told_are_found_within_their_intervals(tmp_path: Path) -> None:
    deployed = Deployed(hidden(tmp_path), scrape_s=2.0)
    with prometheus(deployed) as url:
        source = Source(url=url, since_s=BEGAN_S, until_s=deployed.scrapes[-1][0], step_s=2.0)
        seen, _ = source.read()
    out = tmp_path / "out"
    out.mkdir()
    found = observe(waves(), seen, observed_traffic(seen), out=out, how=How(replications=1))
    assert found.fit is not None
    for name, true in (("step_s", 2e-3), ("admission_s", 0.03)):
        low, high = found.fit.posterior.interval(name, 1.96)
        assert low <= true <= high
        assert found.fit.posterior.told(name) > 0.5
    assert found.kv is not None
    assert found.kv.low <= 2000 <= found.kv.high
    assert found.kv.high / found.kv.low < 1.6
    for name, bound in (("requests_per_s", 0.02), ("itl_s", 0.03), ("ttft_s", 0.06)):
        whole = found.beside.whole(name)
        assert whole is not None
        assert whole[1] == pytest.approx(whole[0], rel=bound), name
    assert found.changes == found.causes == ()
    assert Scenario.load(out / "observed.yaml").serving_stack == "stack.toml"


@pytest.mark.slow(reason="many random runs")
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"
)
def test_a_real_prometheus_that_scraped_the_deployment_gives_its_traffic(sound: Deployed, tmp_path: Path) -> None:
    """It scrapes every 200 ms what the deployment answered second by second: counts are the same, however long it took."""
    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(len(asked))
            body = (sound.scrapes[min(asked[-1], len(sound.scrapes) - 1)][1] + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    target = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=target.serve_forever, daemon=True).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    config = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{target.server_address[1]}"]}]}
    (tmp_path / "p.yml").write_text(json.dumps({"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
                                                "scrape_configs": [config]}))  # fmt: skip
    began_s = time.time()
    flags = (
        f"--config.file={tmp_path / 'p.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={url}",
    )
    server = subprocess.Popen(["prometheus", *flags], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(asked) > len(sound.scrapes) + 5)
        series = query_range(
            f"http://{url}", since_s=began_s, until_s=time.time(), step_s=0.2, matching=Matching(labels={})
        )
    finally:
        server.terminate()
        server.wait()
        target.shutdown()
        target.server_close()
    seen = observed(series, url)
    assert len(seen.instances) == 3
    traffic = observed_traffic(seen)
    assert traffic.requests == pytest.approx(len(sound.log), rel=0.02)
    trace = traffic.workload(0)
    for name in ("prompt_tokens", "output_tokens"):
        assert getattr(trace, name).mean() == pytest.approx(np.mean([row[name] for row in sound.log]), rel=0.03)


@pytest.fixture(scope="module")
def observation(sound: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Observation:
    """The sound deployment, of which it is known that it has 4,000 KV blocks, with a stack that was fitted."""
    folder = tmp_path_factory.mktemp("observed")
    seen = replace(observed(sound.series(folder), "x"), kv_blocks={"0": 4000.0})
    found = observe(told(), seen, observed_traffic(seen), out=folder, how=How(fits=False, replications=1))
    return replace(found, present=found.present.with_value("serving_stack", str(stack_of(folder))))


def test_a_scenario_of_another_number_of_machines_is_noted(observation: Observation, tmp_path: Path) -> None:
    found = observe(
        told(replicas=2), observation.seen, observation.traffic, out=tmp_path, how=How(fits=False, replications=1)
    )
    assert any("of 3 instances, and the scenario has 2 machines" in each for each in found.notes)
    assert observation.notes == ()


def test_another_device_has_as_large_a_share_of_its_room_for_kv_blocks(observation: Observation) -> None:
    other = alternative(observation, ["hardware=h200-sxm"], seeds=[0])
    rooms = [room(told().with_set(f"hardware={name}"), observation.traffic) for name in ("h100-sxm", "h200-sxm")]
    assert other.replayed.runs[0].columns.meta["kv_blocks_total"][0] == pytest.approx(4000 * rooms[1] / rooms[0], abs=2)
    router = alternative(observation, ["router=random"], seeds=[0])
    assert router.replayed.runs[0].columns.meta["kv_blocks_total"][0] == pytest.approx(4000, abs=1)


def test_another_release_is_compared_with_the_present_one_without_its_fit(observation: Observation) -> None:
    other = alternative(observation, ["serving_release='0.11'"], seeds=[0])
    (itl_s,) = [each.a for each in other.differences if each.metric == "tpot_s.p50"]
    assert itl_s == observation.replayed.runs[0].result.summary["tpot_s"]["p50"]
    assert "both without what was fitted" in other.how
