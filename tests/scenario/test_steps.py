"""Measured times of whole steps in the place of a device: what a run makes of them, and what is refused or said."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

from hwmodels.totals import Totals
from sim import Result, Scenario, ScenarioError, simulate, sweep
from sim.scenario.assembly import build, resolve

BATCHES, CONTEXTS = (1, 8, 9, 32, 64), (127, 1023, 8191)
PROMPTS, CACHED = (64, 512, 4096), (0, 4096)


def decode_ms(batch: float, context: float) -> float:
    return 4.0 + 0.03 * batch + 2e-6 * batch * context + (1.0 if batch > 8 else 0.0)


def prompt_ms(tokens: float, keys: float) -> float:
    return 6.0 + 0.01 * tokens + 1e-7 * tokens * keys


def write(file: Path, factor: float = 1.0) -> Path:
    """A plain table of a made-up device, with a step where the graphs of small batches end."""
    lines = ["batch_size,new_tokens,cached_tokens,latency_ms"]
    lines += [f"{b},1,{c},{factor * decode_ms(b, c + 1)}" for b, c in product(BATCHES, CONTEXTS)]
    lines += [f"1,{n},{c},{factor * prompt_ms(n, c + (n + 1) / 2)}" for n, c in product(PROMPTS, CACHED)]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return write(tmp_path / "steps.csv")


WORK = {
    "arrivals": {"process": "poisson", "rate_per_s": 20.0},
    "prompt_tokens": {"distribution": "lognormal", "mean": 700, "median": 450},
    "output_tokens": 40,
    "requests": 40,
}


def scenario(steps: Path, **given: Any) -> Scenario:
    hardware = {"steps": str(steps), "device": "h100-sxm", **given.pop("hardware", {})}
    return Scenario(**{"hardware": hardware, "serving_stack": "ideal", "workload": WORK, **given})


def spans_of(result: Result) -> np.ndarray:
    return np.concatenate([replica.spans[:] for replica in result.columns.replicas])


class SecondModel:
    """A step's time by scipy's interpolation of the decodes, the law of the prompts, and the rule for steps with both."""

    def __init__(self) -> None:
        contexts = [each + 1 for each in CONTEXTS]
        self.least_context, self.least_ms = contexts[0], decode_ms(BATCHES[0], contexts[0])
        values = [[decode_ms(batch, context) for context in contexts] for batch in BATCHES]
        self.decodes_ms = RegularGridInterpolator((BATCHES, contexts), values)

    def decode_ms(self, seqs: float, context: float) -> float:
        return self.decodes_ms([max(seqs, BATCHES[0]), max(context, self.least_context)]).item()

    def prompt_ms(self, tokens: float, keys: float) -> float:
        """Below the smallest prompt on a straight line to a decode."""
        if tokens >= PROMPTS[0]:
            return prompt_ms(tokens, keys)
        one, smallest = self.decode_ms(1, keys), prompt_ms(PROMPTS[0], keys)
        return one + (smallest - one) * (tokens - 1) / (PROMPTS[0] - 1)

    def step_s(self, tokens: float, pairs: float, seqs: float, kv: float) -> float:
        decoding = self.decode_ms(seqs, kv / seqs) if seqs else 0.0
        if not tokens:
            return decoding * 1e-3
        return (self.prompt_ms(tokens, pairs / tokens) + (decoding - self.least_ms if seqs else 0.0)) * 1e-3


@pytest.mark.parametrize("scheduler", ["vllm", "sglang", "trtllm", "vllm-v0", "orca", "sarathi", "static"])
def test_every_iteration_takes_what_a_second_model_composes(steps: Path, scheduler: str) -> None:
    result = simulate(scenario(steps, scheduler=scheduler))

    spans = spans_of(result)
    mixed = 0
    second = SecondModel()
    for row in spans[:: max(1, len(spans) // 100)]:
        prompt, pairs, seqs, kv = (
            float(row[name]) for name in ("prefill_rows", "prefill_pairs", "decode_seqs", "decode_kv_tokens")
        )
        # The smallest keys of the table are 32.5: shorter prompts take what those take.
        pairs = max(pairs, prompt * 32.5)
        mixed += bool(prompt and seqs)
        assert row["first_ticks"] / (1 << 20) * 1e-9 == pytest.approx(second.step_s(prompt, pairs, seqs, kv), rel=0.005)
    assert result.summary["requests"]["finished"] == 40
    assert mixed or scheduler in ("sglang", "vllm-v0", "static")


def test_a_decode_span_takes_what_its_iterations_take_one_by_one(steps: Path) -> None:
    together, singly = (simulate(scenario(steps), fast_forward=fast) for fast in (True, False))

    assert together.summary["e2el_s"] == singly.summary["e2el_s"]


def test_host_time_is_added_to_each_step(steps: Path) -> None:
    plain, more = (
        spans_of(simulate(scenario(steps, workload={**WORK, "requests": 1}, hardware={"host_s": host_s})))
        for host_s in (0.0, 2e-3)
    )

    assert (more["first_ticks"] - plain["first_ticks"]) / (1 << 20) * 1e-9 == pytest.approx(2e-3)


def test_a_prefix_cache_saves_what_the_table_says_of_cached_prompts(steps: Path) -> None:
    workload = {
        "shared_prefix": {
            "groups": 2,
            "prompts_per_group": 10,
            "system_prompt_tokens": 2000,
            "question_tokens": 100,
            "output_tokens": 10,
            "stages": [{"rate_per_s": 5.0, "duration_s": 4.0}],
        }
    }
    on, off = (
        simulate(scenario(steps, workload=workload, memory={"prefix_caching": caching})).summary["ttft_s"]["mean"]
        for caching in (True, False)
    )

    assert on < 0.7 * off


def test_a_step_of_ranks_takes_as_long_as_its_slowest(steps: Path) -> None:
    model = {"model": "deepseek-v3", "precision": "fp8", "hardware": {"device": "h200"}}
    workload = {**WORK, "requests": 16}
    ranks = simulate(scenario(steps, **model, parallel={"data": 8, "tensor": 1}, workload=workload))

    ticks: dict[int, set[int]] = {}
    rows: dict[int, list[np.void]] = {}
    for row in spans_of(ranks):
        ticks.setdefault(int(row["start_ns"]), set()).add(int(row["first_ticks"]))
        rows.setdefault(int(row["start_ns"]), []).append(row)
    second = SecondModel()
    for start, of_step in list(rows.items())[::10]:
        (lasts,) = ticks[start]
        slowest = max(
            second.step_s(
                float(row["prefill_rows"]), max(row["prefill_pairs"], 32.5 * row["prefill_rows"]),
                float(row["decode_seqs"]), float(row["decode_kv_tokens"]),
            )
            for row in of_step
        )  # fmt: skip
        assert lasts / (1 << 20) * 1e-9 == pytest.approx(slowest, rel=0.005)


def test_pools_have_tables_of_their_own_and_transfers_are_the_devices(steps: Path, tmp_path: Path) -> None:
    fast = write(tmp_path / "fast.csv", 0.5)
    pools = {
        "a": {"role": "prefill", "hardware": {"steps": str(fast), "device": "h100-sxm"}},
        "b": {"role": "decode"},
    }
    result = simulate(scenario(steps, pools=pools, links={"net": {}}))
    other = simulate(scenario(steps, pools={**pools, "a": {"role": "prefill"}}, links={"net": {}}))

    assert result.summary["ttft_s"]["mean"] < 0.75 * other.summary["ttft_s"]["mean"]
    assert result.summary["requests"]["finished"] == 40


def test_the_content_of_the_file_is_the_scenarios(steps: Path, tmp_path: Path) -> None:
    before, tpot_s = scenario(steps).hash, simulate(scenario(steps)).summary["tpot_s"]["mean"]
    assert scenario(write(tmp_path / "same.csv")).hash == before

    write(steps, 2.0)
    assert scenario(steps).hash != before
    assert simulate(scenario(steps)).summary["tpot_s"]["mean"] > 1.5 * tpot_s


def test_a_sweep_goes_over_tables(steps: Path, tmp_path: Path) -> None:
    slow = write(tmp_path / "slow.csv", 2.0)

    table = sweep(scenario(steps), axes={"hardware.steps": [str(steps), str(slow)]}, jobs=1).table
    assert table["tpot_s.mean"].is_monotonic_increasing


def test_steps_may_be_set_over_a_device(steps: Path) -> None:
    given = Scenario(hardware="h200").with_set(f"hardware.steps={steps}")
    assert given.settings()["hardware"] == {"device": "h200", "steps": str(steps)}

    pool = Scenario(hardware="h200", pools={"a": {}}).with_set(f"pools.a.hardware.steps={steps}")
    assert pool.settings()["pools"]["a"]["hardware"] == {"device": "h200", "steps": str(steps)}


def test_a_settings_file_round_trips(steps: Path) -> None:
    given = scenario(steps)

    assert Scenario.from_yaml(given.to_yaml()).hash == given.hash
    assert Scenario.from_mapping(given.resolved()).hash == given.hash


def test_the_file_names_the_device_where_nobody_else_does(tmp_path: Path) -> None:
    lines = write(tmp_path / "steps.csv").read_text().splitlines()
    file = tmp_path / "named.csv"
    file.write_text("\n".join([f"system,tp,{lines[0]}", *(f"h200_sxm,1,{line}" for line in lines[1:])]))

    built = resolve(Scenario(hardware={"steps": str(file)}, workload=WORK))
    assert built.manifest["hardware"]["name"] == "h200"
    with pytest.raises(ScenarioError, match=r"measured with tp 1, and parallel\.tensor is 2; give \{tensor: 1\}"):
        resolve(Scenario(hardware={"steps": str(file)}, workload=WORK, parallel={"tensor": 2}))


def test_how_far_steps_lie_outside_the_table_is_said_when_the_run_has_ended(steps: Path) -> None:
    inside = {**WORK, "prompt_tokens": 1000, "output_tokens": 5, "requests": 3}
    within = simulate(scenario(steps, workload=inside, scheduler={"policy": "vllm", "max_num_batched_tokens": 8192}))
    assert not [note for note in within.manifest["notes"] if note.startswith("Outside")]

    beyond = {"arrivals": {"process": "deterministic", "rate_per_s": 1e4}, "prompt_tokens": 100, "output_tokens": 9}
    result = simulate(scenario(steps, workload={**beyond, "requests": 100}))
    (note,) = [note for note in result.manifest["notes"] if note.startswith("Outside")]
    spans = spans_of(result)
    decodes = spans["n"][
        (spans["decode_seqs"] > 64)
        | ((spans["decode_seqs"] > 0) & (spans["decode_kv_tokens"] < 128 * spans["decode_seqs"]))
    ]
    steps_with_decodes = spans["n"][spans["decode_seqs"] > 0].sum()
    assert f"{decodes.sum():,} of {steps_with_decodes:,} decode steps" in note
    assert f"to {spans['decode_seqs'].max():,} sequences (measured 1 to 64)" in note


def test_the_interval_is_what_a_held_out_half_shows(steps: Path) -> None:
    result = simulate(scenario(steps))

    intervals = result.summary["intervals"]
    mean = result.summary["tpot_s"]["mean"]
    assert intervals["figures"]["tpot_s.mean"]["low"] <= mean <= intervals["figures"]["tpot_s.mean"]["high"]
    assert "half of the steps in steps.csv, from the other half" in intervals["basis"]
    assert result.summary["trust"]["tier"] == "steps as measured"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cost_model": "roofline"}, "cost_model roofline changes no time that .*steps.csv has measured"),
        ({"cuda_graphs": {"largest": 8}}, "cuda_graphs changes no time"),
        ({"parallel": {"pipeline": 2}}, "do not say how long each stage of a pipeline takes"),
        (
            {"decoding": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"alpha": 0.5}}},
            "neither those of a draft nor of verifying several; leave decoding out",
        ),
        ({"hardware": {"device": "h1000"}}, "unknown hardware 'h1000'"),
        ({"hardware": {"steps": "nowhere.csv"}}, "hardware: steps: nowhere.csv does not exist"),
        ({"hardware": {"where": {"tp": 1}}}, "has no column tp that says whose rows they are"),
        ({"hardware": {"stepz": 1}}, "hardware.stepz is not a setting; did you mean steps"),
        ({"hardware": {"host_s": -1.0}}, "hardware.host_s is a number at least 0"),
    ],
)
def test_what_a_table_cannot_price_is_refused_in_a_sentence(steps: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        resolve(scenario(steps, **given))


def test_a_table_that_does_not_say_its_device_asks_for_one(steps: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"does not say its device; give hardware\.device, for its memory and links"
    ):
        resolve(Scenario(hardware={"steps": str(steps)}, workload=WORK))


def test_the_example_gives_back_the_steps_that_were_measured() -> None:
    example = Scenario.load(Path(__file__).parents[2] / "examples" / "vera-rubin.yaml")
    cost = build(example).replicas[0].cost

    def decode_s(batch: int, cached: int) -> float:
        return cost.iteration_s(Totals(batch, 0, 0, 0, 0, batch, batch * (cached + 1), batch))

    # Rows of the file, and half a millisecond of host time.
    assert decode_s(8, 1024) == pytest.approx(8.75e-3 + 0.5e-3, rel=1e-6)
    assert decode_s(32, 32768) == pytest.approx(12.9684e-3 + 0.5e-3, rel=1e-6)
    pairs = 16384 * 16384 + 16384 * 16385 // 2
    assert cost.iteration_s(Totals(16384, 16384, 1, pairs, 32768, 0, 0, 1)) == pytest.approx(441.4783e-3, rel=1e-6)


def test_the_manifest_says_what_was_measured_and_what_a_held_out_half_shows(steps: Path) -> None:
    facts = resolve(scenario(steps)).manifest["hardware"]["steps"]

    assert facts["file"] == "steps.csv"
    assert facts["reach"]["decodes"] == {"tokens": [1.0, 64.0], "keys": [128.0, 8192.0]}
    low, high = facts["held_out_factors"]
    assert low <= 1.0 <= high


def test_prompts_outside_the_table_are_counted_one_by_one(steps: Path) -> None:
    work = {"arrivals": {"process": "deterministic", "rate_per_s": 0.1}, "prompt_tokens": 5000, "output_tokens": 1}
    scheduler = {"policy": "vllm", "max_num_batched_tokens": 5000}
    result = simulate(scenario(steps, scheduler=scheduler, workload={**work, "requests": 7}))

    (note,) = [note for note in result.manifest["notes"] if note.startswith("Outside")]
    assert "7 of 7 prompt steps, of 5,000 to 5,000 tokens (measured 64 to 4,096)" in note
    within = simulate(scenario(steps, workload={**work, "prompt_tokens": 4096, "requests": 7}, scheduler=scheduler))
    assert not [note for note in within.manifest["notes"] if note.startswith("Outside")]


def test_a_table_that_does_not_say_its_parallelism_is_taken_with_a_note(steps: Path) -> None:
    assert any("does not say on how many devices" in note for note in resolve(scenario(steps)).manifest["notes"])


def test_a_sweep_says_once_that_steps_lay_outside(steps: Path) -> None:
    work = {**WORK, "output_tokens": 9, "requests": 5}
    result = sweep(scenario(steps, workload=work), axes={"workload.prompt_tokens": [5000, 6000]}, jobs=1)

    (noted,) = [each for each in result.notes if "outside the measured" in each.note]
    assert "a single run says how many" in noted.note


def test_a_context_that_grows_beyond_the_table_is_outside_from_there_on(steps: Path) -> None:
    work = {"arrivals": {"process": "deterministic", "rate_per_s": 0.1}, "prompt_tokens": 8150, "output_tokens": 100}
    scheduler = {"policy": "vllm", "max_num_batched_tokens": 8192}
    result = simulate(scenario(steps, scheduler=scheduler, workload={**work, "requests": 2}))

    (note,) = [note for note in result.manifest["notes"] if note.startswith("Outside")]
    decodes = result.iterations[result.iterations["decode_tokens"] > 0]
    beyond = int((decodes["kv_tokens"] / decodes["decode_tokens"] > 8192).sum())
    assert 0 < beyond < len(decodes)
    assert (
        f"{beyond} of {len(decodes)} decode steps, of {decodes['kv_tokens'].min():,} to {decodes['kv_tokens'].max():,}"
        in note
    )
