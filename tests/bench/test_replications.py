"""A run is replayed under several seeds exactly where another seed gives other figures."""

from typing import Any

import numpy as np
import pytest

from sim.bench.load import load_of
from sim.bench.measured import BenchRun, Lengths, Offered, RequestRows
from sim.bench.replay import replay
from sim.scenario import Scenario
from sim.scenario.named import ROUTERS

N = 24
SMALL = {
    "model": "llama-3.2-1b",
    "hardware": "h100-sxm",
    "scheduler": {"policy": "vllm"},
    "workload": {"trace": "conversation"},
}
RANKED = {
    **SMALL,
    "model": "qwen3-30b-a3b",
    "parallel": {"data": 2, "expert": 2},
    "experts": {"popularity": "even"},
    "cost_model": "roofline",
}
NOT_OF_RANKS = ("session", "dynamo")
"""They ask for more than a router inside a machine is told, and are refused there."""
WRAPPERS = {"reserve": {"machines": 1, "priority": 5}, "shed": {"max_waiting": 1000}}


def recorded() -> BenchRun:
    """Requests at known instants with known lengths: nothing of the load is drawn."""
    at = np.arange(N)
    rows = RequestRows(
        sent_s=0.01 * (at // 3),
        ttft_s=np.full(N, 0.1),
        e2el_s=np.full(N, 1.0),
        prompt_tokens=300 + 170 * (at % 7),
        output_tokens=20 + 9 * (at % 5),
        failed=np.zeros(N, bool),
    )
    offered = Offered(
        requests=N,
        prompt=Lengths(each_tokens=tuple(rows.prompt_tokens.tolist())),
        output=Lengths(each_tokens=tuple(rows.output_tokens.tolist())),
    )
    return BenchRun(name="log", file="log.csv", format="requests", offered=offered, rows=rows)


def lengths(tokens: int) -> Lengths:
    return Lengths(mean_tokens=tokens, min_tokens=tokens, max_tokens=tokens)


def drawn_of(settings: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the recorded run is replayed more than once, and whether its figures differ under other seeds."""
    scenario, run = Scenario.from_mapping(settings), recorded()
    figures = [dict(replay(scenario, run, seeds=[seed]).predicted) for seed in (0, 1, 2)]
    found = replay(scenario, run)
    several = found.replications > 1
    assert found.replications in (1, 3)
    assert any(found.spread.values()) is several
    return several, figures[0] != figures[1] or figures[0] != figures[2]


def of_policy(name: str) -> dict[str, Any]:
    inner = {"inner": "power_of_two"} if name in WRAPPERS else {}
    return {"policy": name, **WRAPPERS.get(name, {}), **inner}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_that_draws_is_replayed_several_times(router):
    adapters = {"adapters": {"count": 3}} if router == "adapter" else {}
    several, differ = drawn_of({**SMALL, **adapters, "replicas": 3, "router": of_policy(router)})
    assert several is differ
    if router in ("random", "power_of_two"):
        assert several
    if router == "round_robin":
        assert not several


@pytest.mark.parametrize("router", [name for name in ROUTERS if name not in NOT_OF_RANKS])
def test_so_is_one_of_ranks(router):
    several, differ = drawn_of({**RANKED, "rank_router": of_policy(router)})
    assert several is differ
    if router == "random":
        assert several


@pytest.mark.parametrize(
    "decoding",
    [
        {"method": "autoregressive"},
        {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 0.6}},
        {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"alpha": 1.0}},
        {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"beta": {"mean": 0.5, "sd": 0.2}}},
        {
            "method": "medusa",
            "acceptance": {"tree": {"accuracies": [[0.7, 0.1], [0.5, 0.1]], "nodes": 4}},
        },
        {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "acceptance": {"per_position": [0.8, 0.6, 0.3], "kind": "conditional"},
            "draft": {"cost_ratio": 0.1},
        },
    ],
    ids=["none", "alpha", "certain", "beta", "tree", "draft"],
)
def test_drafted_tokens_are_replayed_several_times(decoding):
    several, differ = drawn_of({**SMALL, "decoding": decoding})
    assert several is differ
    certain = decoding["method"] == "autoregressive" or decoding["acceptance"].get("alpha") == 1.0
    assert several is not certain


def test_failures_by_draw_are_replayed_several_times_and_those_at_known_times_once():
    drawn = {"mean_up_s": 0.1, "mean_down_s": 0.05}
    assert drawn_of({**SMALL, "replicas": 3, "failures": drawn}) == (True, True)
    at = {"times": [{"machine": 0, "at_s": 0.05, "for_s": 0.1}]}
    assert drawn_of({**SMALL, "replicas": 3, "failures": at}) == (False, False)


def test_a_load_that_is_drawn_is_replayed_several_times_and_another_once():
    scenario = Scenario.from_mapping(SMALL)
    by_clients = Offered(requests=8, concurrency=4, prompt=lengths(200), output=lengths(20))
    run = BenchRun(name="a", file="a", format="f", offered=by_clients)
    assert load_of(run, 0).in_flight is None
    assert replay(scenario, run).replications == 1
    by_rate = Offered(requests=8, rate_per_s=4.0, prompt=lengths(200), output=lengths(20))
    assert replay(scenario, BenchRun(name="a", file="a", format="f", offered=by_rate)).replications == 3
