"""Where the time of tokens goes: parts that add up, hand counts, what bounds a deployment, and what more of a resource does."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from hwmodels.device import load_device
from hwmodels.layerwise import LayerwiseCost
from hwmodels.model import load_model
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.cli import build_app
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.errors import RooftraceError
from sim.plots.shares import looks_of
from sim.run import run_built
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.study.explain import CAUSES, Explained, NotExplained, explained
from sim.study.what_if import bound, effects
from tests.engine.costs import Linear
from tests.sample import ALL, few
from tests.scenario.random_scenarios import draw, write_files
from workloads import Trace

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = {"workload": {"trace": "conversation", "limit": 40, "rate_scale": 0.001}}


def busy(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """200 requests, 40 a second."""
    arrivals = {"process": "poisson", "rate_per_s": 40.0}
    return {"requests": 200, "arrivals": arrivals, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}


Whole = tuple[Explained, Columns, Experiment, dict[str, Any]]


def of(scenario: Scenario) -> Whole:
    built = resolve(scenario)
    result = run_built(built)
    return explained(built.experiment, result.columns), result.columns, built.experiment, result.summary


def of_scenario(settings: dict[str, Any]) -> Whole:
    return of(Scenario.from_mapping(settings))


@functools.cache
def of_example(name: str) -> Whole:
    return of(Scenario.load(EXAMPLES / f"{name}.yaml"))


def served(cost: Any, arrival_ns: list[int], prompts: list[int], outputs: list[int], **spec: Any) -> Experiment:
    trace = Trace.from_arrays(
        arrival_ns=np.array(arrival_ns), prompt_tokens=np.array(prompts), output_tokens=np.array(outputs)
    )
    replica = ReplicaSpec(cost=cost, scheduler=OrcaPaged(max_sequences=8), **{"kv_blocks": 10_000, **spec})
    return Experiment(workload=trace, replicas=(replica,), router=RoundRobin())


def roofline() -> LayerwiseCost:
    return Roofline(load_model("llama-3.2-1b"), load_device("h100-sxm"))


@pytest.mark.parametrize(
    "name",
    few(
        ["disaggregated", "pipeline", "tight-memory", "speculative", "pools", "images", "ranks"],
        5,
        reason="long runs, much alike",
    ),
)
def test_the_causes_of_an_example_add_up_to_its_means(name: str) -> None:
    found, columns, _, summary = of_example(name)
    everyone = np.ones(len(columns.requests["arrival_ns"]), bool)
    for measure in ("tpot_s", "ttft_s"):
        means = found.mean(measure, everyone)
        assert means.keys() <= CAUSES.keys()
        assert sum(means.values()) == pytest.approx(summary[measure]["mean"], rel=1e-9)
        assert abs(means.get("other", 0.0)) <= 1e-6 * summary[measure]["mean"]
        assert min(means.values()) > -1e-9


def test_a_request_alone_spends_what_a_hand_counts() -> None:
    cost = roofline()
    experiment = served(cost, [0], [100], [12])
    found = explained(experiment, run(experiment))
    # 16 layers of hidden 2048, 8 KV heads of 64, MLPs of 8192, a vocabulary of 128256; eleven steps that read 101 to 111 tokens.
    weights = 2 * (16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 2048 * 128256)
    kv = 16 * 2 * 8 * 64 * 2 * np.arange(101, 112).mean()
    means = found.mean("tpot_s", np.ones(1, bool))
    assert {cause for cause, value in means.items() if value > 1e-9} == {"weights", "kv"}  # instants are whole ns
    assert means["weights"] == pytest.approx(weights / cost.peak_bytes_per_s, rel=1e-5)
    assert means["kv"] == pytest.approx(kv / cost.peak_bytes_per_s, rel=1e-4)
    first = found.mean("ttft_s", np.ones(1, bool))
    assert first.get("queue", 0.0) == 0.0
    assert sum(first.values()) == pytest.approx(
        float(cost.iteration_s(Totals(100, 100, 1, 5050, 100, 0, 0, 1))), rel=1e-5
    )


def test_a_prompt_in_between_is_what_it_adds_to_the_step_of_another_request() -> None:
    cost = roofline()
    experiment = served(cost, [0, 5_000_000], [100, 3000], [40, 1])
    columns = run(experiment)
    found = explained(experiment, columns)
    table = columns.iterations()
    both = np.flatnonzero((table["prefill_tokens"] > 0) & (table["decode_tokens"] > 0))
    assert len(both) == 1
    kv = int(table["kv_tokens"][both[0]])
    alone_s = float(cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, kv, 1)))
    added_s = table["duration_ns"][both[0]] * 1e-9 - alone_s
    assert found.tpot_s["prompts"][0] == pytest.approx(added_s / 39, rel=1e-4)
    # It waited for the step that was running, and then its own step had one decode in it.
    queued_s = (columns.requests["scheduled_ns"][1] - 5_000_000) * 1e-9
    assert found.ttft_s["queue"][1] == pytest.approx(queued_s)
    assert found.ttft_s["decodes"][1] > 0


def test_a_handover_is_from_the_end_of_the_prompt_until_its_kv_has_landed() -> None:
    found, columns, _, _ = of_example("disaggregated")
    requests = columns.requests
    expected = (requests["landed_ns"] - requests["prefilled_ns"]) * 1e-9
    some = np.isfinite(found.ttft_s["transfer"]) & (requests["prefill_replica"] >= 0)
    np.testing.assert_allclose(found.ttft_s["transfer"][some], expected[some], atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (ALONE, "Memory bandwidth bounds it: of the time that its machines are busy, "),
        (
            {"cost_model": "roofline", "serving_stack": "ideal", "workload": busy(500, 1)},
            "Arithmetic bounds it: ",
        ),
        (
            {
                "memory": {"kv_blocks": 600},
                "workload": busy(3700, 200),
            },
            "KV memory bounds it: for ",
        ),
        ({"serving_stack": "eager", **ALONE}, "Host bounds it: "),
        (
            {"workload": busy(4000, 1)},
            "Arithmetic bounds it: ",
        ),
        (
            {
                "memory": {"kv_blocks": 600},
                "workload": busy(600, 300),
            },
            "KV memory bounds it: for ",
        ),
    ],
)
def test_the_bound_is_the_one_that_is_known(settings: dict[str, Any], sentence: str) -> None:
    found, _, _, _ = of_scenario(settings)
    assert bound(found).startswith(sentence), bound(found)


def test_a_resource_that_takes_nearly_as_long_is_named_beside_the_first() -> None:
    found, _, _, _ = of_scenario(ALONE)
    none = dict.fromkeys(found.busy_s, 0.0)
    tie = replace(found, busy_s={**none, "weights": 5.0, "arithmetic": 4.5, "collectives": 0.5})
    assert bound(tie) == (
        "Memory bandwidth bounds it, and arithmetic nearly as much: of the time that its machines are busy, 50% goes to reading "
        "weights; 45% goes to the products of many rows."
    )
    clear = replace(found, busy_s={**none, "weights": 6.0, "arithmetic": 3.5, "collectives": 0.5})
    assert (
        bound(clear)
        == "Memory bandwidth bounds it: of the time that its machines are busy, 60% goes to reading weights."
    )


def test_more_of_a_resource_helps_what_it_bounds() -> None:
    found, _, experiment, summary = of_scenario(ALONE)
    changes = {each.name: each for each in effects(experiment, summary)}
    tpot = {name: each.tpot for name, each in changes.items()}
    # A tenth more bandwidth takes an eleventh of what is spent on reading.
    means = found.mean("tpot_s", np.ones(40, bool))
    reading = (means["weights"] + means["kv"]) / sum(means.values())
    assert reading > 0.7
    assert tpot["a tenth more memory bandwidth"] == pytest.approx((1 / 1.1 - 1) * reading, abs=0.01)
    assert tpot["links a tenth faster"] == tpot["a tenth more KV memory"] == 0.0
    arithmetic = changes["a tenth more arithmetic"]
    assert arithmetic.ttft is not None
    assert arithmetic.ttft < -0.01


def test_the_front_end_is_what_the_stack_takes_of_each_prompt() -> None:
    found, columns, experiment, _ = of_scenario({"serving_stack": "sglang", **ALONE})
    expected = (
        experiment.admission_s
        + experiment.admission_serial_s
        + experiment.admission_s_per_token * columns.requests["prompt_tokens"]
    )
    assert experiment.admission_s > 0
    np.testing.assert_allclose(found.ttft_s["front_end"], expected, rtol=1e-6)


def test_what_a_step_lacks_is_the_drafters_with_speculation_and_waiting_in_a_pipeline() -> None:
    for name, spent, other in (
        ("speculative", "drafting", "waiting_inside"),
        ("pipeline", "waiting_inside", "drafting"),
    ):
        found, _, _, _ = of_example(name)
        assert found.busy_s[spent] > 0.01 * sum(found.busy_s.values())
        assert found.busy_s[other] == 0.0


ADAPTERS = {"count": 12, "rank": [8, 16], "max_loras": 3, "max_cpu_loras": 6, "popularity": {"zipf": 0.5}}
IMAGES = {"width": 800, "height": 600, "distinct": 20}


@pytest.mark.parametrize(
    ("settings", "spent"),
    [
        ({"adapters": ADAPTERS}, {"adapters", "adapter_loads"}),
        ({"structured_output": {"share": 0.5, "grammars": 3, "overlapped": False}}, {"masks"}),
        ({"model": "qwen3-vl-8b", "encode": {"at": "engine"}, "workload": {"images": IMAGES}}, {"images"}),
        (
            {"adapters": ADAPTERS, "structured_output": {"share": 0.5, "grammars": 3, "overlapped": False}},
            {"adapters", "adapter_loads", "masks"},
        ),
    ],
    ids=["adapters", "grammars", "images", "adapters and grammars"],
)
def test_what_a_step_takes_beside_the_model_has_a_part_of_its_own(settings: dict[str, Any], spent: set[str]) -> None:
    workload = {**busy(100, 40), "requests": 60, **settings.get("workload", {})}
    found, _, _, summary = of_scenario({"model": "llama-3.1-8b", **settings, "workload": workload})
    beside = {"adapters", "adapter_loads", "images", "masks", "waiting_inside"}
    busy_s = sum(found.busy_s.values())
    assert {name for name in beside if found.busy_s[name] > 1e-5 * busy_s} == spent  # prices are lines between points
    everyone = np.ones(60, bool)
    for measure in ("tpot_s", "ttft_s"):
        means = found.mean(measure, everyone)
        assert sum(means.values()) == pytest.approx(summary[measure]["mean"], rel=1e-9)
        assert spent <= means.keys() | ({"images"} if measure == "tpot_s" else set())
        assert abs(means.get("other", 0.0)) <= 1e-6 * summary[measure]["mean"]
    if "adapters" in spent:
        loads = summary["adapters"]
        assert found.busy_s["adapter_loads"] == pytest.approx(loads["slot_load_s"] + loads["disk_load_s"], rel=1e-6)


ONE_REQUEST = {
    "requests": 1, "arrivals": {"process": "poisson", "rate_per_s": 1}, "prompt_tokens": 50, "output_tokens": 20,
}  # fmt: skip
"""The workload of one request."""


def test_adapters_and_masks_of_a_request_alone_are_what_they_cost() -> None:
    one = {"model": "llama-3.1-8b", "workload": ONE_REQUEST, "adapters": {"count": 1}}
    for overlapped in (False, True):
        found, _, experiment, _ = of_scenario(
            {**one, "structured_output": {"share": 1.0, "grammars": 1, "overlapped": overlapped}}
        )
        (spec,) = experiment.machines[0].hosted
        assert spec.adapters is not None
        assert spec.grammars is not None
        host_s = 0.0 if overlapped else spec.grammars.step_s + spec.grammars.mask_s
        means = found.mean("tpot_s", np.ones(1, bool))
        assert means["adapters"] == pytest.approx(spec.adapters.step_s(1, [16]), rel=1e-4)
        assert means["masks"] == pytest.approx(host_s + spec.grammars.apply_s, rel=2e-3)  # ticks of a price are rounded
        assert means.get("waiting_inside", 0.0) < 1e-4 * sum(means.values())


def test_masks_that_take_longer_than_the_step_are_what_the_device_waits_for() -> None:
    slow = {"share": 1.0, "grammars": 1, "mask_s": 0.03}
    _, _, _, without = of_scenario({"model": "llama-3.1-8b", "workload": ONE_REQUEST})
    found, _, _, summary = of_scenario({"model": "llama-3.1-8b", "workload": ONE_REQUEST, "structured_output": slow})
    longer_s = summary["tpot_s"]["mean"] - without["tpot_s"]["mean"]
    assert longer_s > 0.01
    assert found.mean("tpot_s", np.ones(1, bool))["masks"] == pytest.approx(longer_s, rel=1e-4)


def test_no_two_causes_look_alike_in_the_picture() -> None:
    looks = looks_of(CAUSES)
    assert len(set(looks.values())) == len(looks) == len(CAUSES)
    assert looks_of(["adapters", "weights", "adapters"]).keys() == {"adapters", "weights"}


def test_slots_bound_a_server_whose_requests_wait_for_them_and_no_other() -> None:
    few, _, _, summary = of_scenario({"model": "llama-3.1-8b", "adapters": ADAPTERS, "workload": busy(100, 100)})
    assert "Adapter slots bound it" in bound(few)
    assert few.waiting_for_slot == pytest.approx(summary["adapters"]["waiting_for_slot_mean"], rel=0.02)
    enough = {**ADAPTERS, "max_loras": 12, "max_cpu_loras": 12}
    found, _, _, _ = of_scenario({"model": "llama-3.1-8b", "adapters": enough, "workload": busy(100, 100)})
    assert found.waiting_for_slot == 0.0
    assert "Adapter slots" not in bound(found)


def test_more_kv_memory_helps_where_requests_wait_for_it() -> None:
    _, _, experiment, summary = of_scenario({"memory": {"kv_blocks": 600}, "workload": busy(600, 300)})
    ttft = {each.name: each.ttft for each in effects(experiment, summary)}["a tenth more KV memory"]
    assert ttft is not None
    assert ttft < -0.02


def test_a_cost_model_without_parts_is_refused() -> None:
    experiment = served(Linear(), [0], [10], [5])
    with pytest.raises(NotExplained, match="Linear gives the time of an iteration and not what it is spent on"):
        explained(experiment, run(experiment))


def assert_explained(seeds: range, folder: Path) -> None:
    for seed in seeds:
        try:
            found, _, _, _ = of_scenario_in(draw(Random(seed)), folder)
        except (RooftraceError, ValueError):
            continue
        for parts in (found.tpot_s, found.ttft_s):
            whole = np.sum(list(parts.values()), axis=0)
            some = np.isfinite(whole)
            for cause, each in parts.items():
                assert (each[some] >= -1e-9 - 1e-6 * whole[some]).all(), (seed, cause)


def of_scenario_in(settings: dict[str, Any], folder: Path) -> Whole:
    return of(Scenario.from_mapping(settings, source="drawn", folder=folder))


@pytest.mark.slow(reason="several searches or whole runs")
@pytest.mark.parametrize("first", range(0, 200 if ALL else 100, 25))
def test_no_cause_of_a_random_scenario_is_negative(first: int, tmp_path: Path) -> None:
    write_files(tmp_path)
    assert_explained(range(first, first + 25), tmp_path)


def rooftrace(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments)


def test_the_command_explains_a_scenario_and_the_folder_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("--set", "workload.limit=60")
    assert rooftrace("run", *settings, "--no-plots", "--out", "results").exit_code == 0
    of_folder = json.loads(rooftrace("explain", "results", "--no-effects", "--json").stdout)
    alone = rooftrace("explain", *settings, "--no-effects", "--json", "--picture", "shares.png")
    assert json.loads(alone.stdout)["tpot_s"] == of_folder["tpot_s"]
    assert (tmp_path / "shares.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert of_folder["ttft_s"]["mean"]["s"] == pytest.approx(summary["ttft_s"]["mean"], rel=1e-9)
    out = rooftrace("explain", *settings).stdout
    assert "Memory bandwidth bounds it" in out
    assert "a tenth more memory bandwidth" in out
    other = {**summary, "tpot_s": {**summary["tpot_s"], "mean": 1}}
    (tmp_path / "results" / "summary.json").write_text(json.dumps(other))
    assert "its mean TPOT came out otherwise" in rooftrace("explain", "results", "--no-effects").stderr
