"""A fleet that runs, as the page watches it: what it reads, and what the policy of the scenario would do."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from sim import Scenario
from sim.errors import RooftraceError
from sim.explore.watching import Endpoints, Prometheus, Watched, source_of


class Fleet:
    """Servers of vLLM's names that serve at a known rate, and the clock that they share."""

    def __init__(self, servers: int = 2) -> None:
        self.now_s = 1_800_000_000.0
        self.urls = [f"http://host{i}:8000/metrics" for i in range(servers)]
        self.finished = dict.fromkeys(self.urls, 100.0)
        self.running, self.waiting = 3, 1
        self.gone: set[str] = set()

    def read(self, url: str) -> str:
        if url in self.gone:
            raise RooftraceError(f"{url} does not answer: it is gone")
        labels = '{model_name="m"}'
        return (
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {self.running}\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}\nvllm:kv_cache_usage_perc{labels} 0.25\n"
            f'vllm:request_success_total{{finished_reason="stop",model_name="m"}} {self.finished[url]}\n'
            f"vllm:generation_tokens_total{labels} {10 * self.finished[url]}\nprocess_open_fds 7\n"
        )

    def serves(self, watched: Watched, seconds: int, per_s: float) -> dict[str, Any]:
        """The last of the looks while each server ends so many requests a second."""
        found = watched.look()
        for _ in range(int(seconds / watched.every_s)):
            self.now_s += watched.every_s
            for url in self.urls:
                self.finished[url] += per_s * watched.every_s
            found = watched.look()
        return found

    def watched(self, scenario: Scenario) -> Watched:
        return Watched(Endpoints(self.urls, self.read), scenario, lambda: self.now_s)


TRAFFIC = {
    "arrivals": {"process": "poisson", "rate_per_s": 1.0},
    "prompt_tokens": 100,
    "output_tokens": 10,
    "requests": 10,
}


def a_scenario(policy: dict[str, Any] | None = None, **autoscale: Any) -> Scenario:
    found: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "h100-sxm", "workload": dict(TRAFFIC)}
    if policy is not None:
        found["autoscale"] = {
            "policy": policy,
            "min": 1,
            "max": 8,
            "start": {"weights": 30.0},
            "interval_s": 10,
            **autoscale,
        }
    return Scenario.from_mapping(found)


KALMAN = {"policy": "kalman", "rate_per_s": 1.0, "step_s": 20.0}


def test_the_first_look_has_no_rates_and_says_so() -> None:
    found = Fleet().watched(a_scenario(KALMAN)).look()
    assert found["waits"] == "There is one look so far; rates need two, 5 s apart."
    assert "figures" not in found


def test_the_fleet_now_is_the_sum_of_its_servers() -> None:
    fleet = Fleet()
    found = fleet.serves(fleet.watched(a_scenario()), 60, 0.6)
    assert {name: each["value"] for name, each in found["figures"].items()} == pytest.approx(
        {"machines": 2, "running": 6, "waiting": 2, "kv_used_share": 0.25, "arrivals_per_s": 1.2}
    )
    assert found["history"]["rate_per_s"] == pytest.approx([1.2] * len(found["history"]["rate_per_s"]), abs=0.1)
    assert "policy" not in found


def test_a_forecast_says_how_many_machines_it_needs_and_why() -> None:
    fleet = Fleet()
    fleet.waiting = 0
    found = fleet.serves(fleet.watched(a_scenario({**KALMAN, "headroom": 0.5})), 120, 1.0)["policy"]
    # 2 a second, half as many again, at 1 a second each.
    assert (found["asks"], found["goes_to"]) == (3, 3)
    assert found["does"] == "It would start 1 machine."
    assert found["why"] == [
        "6 requests ran and 0 waited on 2 machines, and 2 a second came in the last interval.",
        "Until a machine that starts now would serve, 2 requests a second at most are forecast, 50% of headroom: at 1 a second "
        "each, 3 machines.",
    ]
    assert found["forecast"]["rate_per_s"] == pytest.approx([2.0] * len(found["forecast"]["rate_per_s"]))
    # A machine starts in 30 s, and the next look is 10 s later.
    assert found["forecast"]["time_s"][-1] >= found["looks_again_s"] + 30.0


def test_a_policy_of_the_present_load_says_what_it_saw() -> None:
    fleet = Fleet()
    found = fleet.serves(fleet.watched(a_scenario({"policy": "target_tracking", "target": 2.0})), 60, 1.0)["policy"]
    assert (found["asks"], found["does"]) == (4, "It would start 2 machines.")
    assert found["why"] == [
        "6 requests ran and 2 waited on 2 machines, and 2 a second came in the last interval: target_tracking asks for 4 machines."
    ]
    assert "forecast" not in found


def test_what_holds_the_policy_back_is_said() -> None:
    fleet = Fleet()
    few = fleet.serves(fleet.watched(a_scenario({"policy": "target_tracking", "target": 0.5}, max=4)), 60, 1.0)[
        "policy"
    ]
    assert few["goes_to"] == 4
    assert few["why"][-1] == "The scenario's max 4 holds it at 4 machines."
    fleet = Fleet()
    watched = fleet.watched(a_scenario({**KALMAN, "policy": "last_value"}, down_window_s=300.0))
    fleet.waiting = 0
    assert fleet.serves(watched, 60, 1.0)["policy"]["goes_to"] == 2
    fleet.running = 0
    later = fleet.serves(watched, 100, 0.0)["policy"]
    assert (later["asks"], later["goes_to"]) == (0, 2)
    assert later["why"][-1] == "2 machines stay, as many as were asked for within 300 s."


def test_a_server_that_answers_no_more_is_a_machine_less() -> None:
    fleet = Fleet()
    watched = fleet.watched(a_scenario())
    fleet.serves(watched, 60, 1.0)
    fleet.gone = {fleet.urls[0]}
    assert fleet.serves(watched, 60, 1.0)["figures"]["machines"]["value"] == 1
    fleet.gone = set(fleet.urls)
    with pytest.raises(RooftraceError, match="host0:8000/metrics does not answer"):
        watched.look()


def test_what_is_older_than_an_hour_or_than_the_policy_remembers_is_forgotten() -> None:
    fleet = Fleet(1)
    read: list[tuple[str, float]] = []
    source = Endpoints(fleet.urls, fleet.read)
    for now_s in (0.0, 100.0, 200.0):
        read += [(each.metric, float(at)) for each in source.series(now_s, now_s - 150.0) for at in each.at_s]
    assert [at for metric, at in read if metric == "vllm:num_requests_running"] == [0.0, 0.0, 100.0, 100.0, 200.0]
    assert "process_open_fds" not in {metric for metric, _ in read}
    asked: list[float] = []
    for policy, remembers_s in ((KALMAN, 86_400.0 + 2 * 20.0 + 2 * 10.0), (None, 3600.0)):
        watched = fleet.watched(a_scenario(policy))
        watched._source = SinceOnly(asked)
        watched.look()
        assert fleet.now_s - asked.pop() == remembers_s


class SinceOnly:
    where = "nowhere"

    def __init__(self, asked: list[float]) -> None:
        self._asked = asked

    def series(self, now_s: float, since_s: float) -> list[Any]:
        self._asked.append(since_s)
        return []


def test_a_prometheus_server_is_asked_only_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def ranges(_url: str, *, since_s: float, until_s: float, **_: Any) -> list[Any]:
        asked.append((since_s, until_s))
        return []

    monkeypatch.setattr("sim.explore.watching.query_range", ranges)
    source = Prometheus("http://prometheus:9090")
    for now_s in (1000.0, 1005.0, 1030.0, 1060.0):
        source.series(now_s, now_s - 600.0)
    assert asked == [(400.0, 1000.0), (1015.0, 1030.0), (1045.0, 1060.0)]


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        (["localhost:8000"], "expected an address such as http://localhost:8000/metrics"),
        (
            ["http://a/metrics", "http://b:9090"],
            "several addresses that end in /metrics, or that of one Prometheus server",
        ),
    ],
)
def test_addresses_that_cannot_be_are_refused(urls: list[str], sentence: str) -> None:
    with pytest.raises(RooftraceError, match=re.escape(sentence)):
        source_of(urls)


def test_addresses_say_what_they_are() -> None:
    assert isinstance(source_of(["http://a:1/metrics", "http://b:1/metrics"]), Endpoints)
    assert isinstance(source_of(["http://a:9090"]), Prometheus)


def test_a_policy_that_knows_the_future_cannot_watch() -> None:
    with pytest.raises(
        RooftraceError, match="perfect knows when requests come, which nobody does of a fleet that runs"
    ):
        Fleet().watched(a_scenario({"policy": "perfect", "rate_per_s": 1.0}))


def test_pages_get_the_same_looks_and_a_sentence_where_nothing_answers(serving: Any, tmp_path: Any) -> None:
    fleet = Fleet()
    watched = fleet.watched(a_scenario())
    watched.every_s = 0.0
    session = serving.session(tmp_path, watched=watched)

    async def first(n: int) -> list[tuple[str, Any]]:
        found = []
        async with contextlib.aclosing(session.watch("page", {})) as events:
            async for event in events:
                found.append((event.name, event.data))
                fleet.now_s += 20.0
                if len(found) == n:
                    break
        return found

    found = serving.run(first(3))
    assert [name for name, _ in found] == ["fleet"] * 3
    assert "waits" in found[0][1]
    assert found[2][1]["figures"]["machines"]["value"] == 2
    watched.every_s = 3600.0
    assert serving.run(first(1))[0][1] is found[2][1]
    watched.every_s = 0.0
    fleet.gone = set(fleet.urls)
    assert serving.run(first(1)) == [("unread", {"sentence": f"{fleet.urls[0]} does not answer: it is gone"})]


def test_a_page_that_watches_nothing_says_how_to(serving: Any, tmp_path: Any) -> None:
    with pytest.raises(RooftraceError, match="no fleet is watched here; start the page with --watch ADDRESS"):
        serving.ask(serving.session(tmp_path).watch("page", {}))


def test_what_can_be_done_about_two_deployments_is_said() -> None:
    fleet = Fleet()
    texts = iter(("m", "n") * 2)
    watched = Watched(
        Endpoints(fleet.urls, lambda url: fleet.read(url).replace('"m"', f'"{next(texts)}"')),
        a_scenario(),
        lambda: fleet.now_s,
    )
    watched.look()
    fleet.now_s += watched.every_s
    with pytest.raises(RooftraceError, match="it serves m, n; explore watches one deployment and has no --match: give"):
        watched.look()


def test_engines_that_one_server_tells_apart_are_machines_each() -> None:
    fleet = Fleet(servers=1)

    def ranks(url: str) -> str:
        """Two engines behind the server."""
        return "\n".join(
            fleet.read(url).replace('model_name="m"', f'model_name="m",engine="{rank}"') for rank in range(2)
        )

    found = fleet.serves(Watched(Endpoints(fleet.urls, ranks), a_scenario(), lambda: fleet.now_s), 90, 1.0)
    assert found["figures"]["machines"]["value"] == 2
