"""`workload.rollout` in a scenario: what runs, what a summary says of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim import Result, Scenario, ScenarioError, simulate
from sim.results.words import fact_rows
from sim.scenario.assembly import build
from sim.scenario.workload import workload_of
from workloads.rollout import RolloutRequests

LENGTHS = "prompt_tokens: 100, output_tokens: {distribution: uniform, min_tokens: 5, max_tokens: 60}"


def scenario(rollout: str, more: str = LENGTHS) -> Scenario:
    return Scenario.from_yaml(f"scheduler: vllm\nworkload: {{rollout: {rollout}, {more}}}", source="my.yaml")


def test_the_answers_of_one_prompt_find_it_in_the_prefix_cache_and_the_next_step_waits_for_the_update() -> None:
    result = simulate(scenario("{prompts: 3, samples: 4, steps: 2, update_s: 3}"))

    first, second = result.summary["rollout"]["steps"]
    assert second["begin_s"] == pytest.approx(first["begin_s"] + first["step_s"] + 3)
    # Of 100 tokens 96 are in full blocks; all four answers of a prompt are sent at once, and the first computes it.
    assert result.summary["prefix_cache"]["hits"] == 2 * 3 * 3 * 96
    assert dict(fact_rows(result.summary))["Answers"] == "24 kept"


@pytest.mark.parametrize(
    ("model", "drawn"),
    [
        ("qwen3-vl-8b", "images: {width: 800, height: {distribution: uniform, min_tokens: 500, max_tokens: 800}}"),
        ("qwen2.5-omni-7b", "audio: {milliseconds: {distribution: uniform, min_tokens: 2000, max_tokens: 9000}}"),
    ],
)
def test_the_answers_of_one_prompt_share_its_images_and_clips(model: str, drawn: str) -> None:
    many = "{prompts: 4, samples: 4, steps: 2}"
    shown = scenario(many, f"{LENGTHS}, {drawn}").with_values({"encode": {"at": "engine"}, "model": model})

    result = simulate(shown)

    # Each step has prompts of its own.
    assert result.summary["images"]["encoded"] == 2 * 4
    per_prompt = result.columns.requests["prompt_tokens"].reshape(-1, 4)
    assert (per_prompt == per_prompt[:, :1]).all()
    assert len({*per_prompt[:, 0].tolist()}) > 1
    # All four are sent at once, and the first computes whole blocks of 16 tokens for the others, whose last token is their own.
    assert result.summary["prefix_cache"]["hits"] == 3 * ((per_prompt[:, 0] - 1) // 16 * 16).sum()


def test_a_saved_rollout_has_the_same_steps(tmp_path: Path) -> None:
    result = simulate(scenario("{prompts: 4, samples: 2, steps: 3, informative: 0.5, wanted: 4}"))
    result.save(tmp_path / "out")

    again = Result.load(tmp_path / "out").summary["rollout"]
    assert again == result.summary["rollout"]
    assert again["answers"]["kept"] == 3 * 4 * 2
    assert again["answers"]["dropped"] > 0


def test_another_seed_draws_other_lengths_and_other_informative_groups() -> None:
    base = scenario("{prompts: 50, informative: 0.5, wanted: 10}")
    one, other = (workload_of(base.with_set(f"seed={seed}")) for seed in (0, 1))
    assert one.output_tokens.tolist() != other.output_tokens.tolist()
    assert isinstance(one, RolloutRequests)
    assert isinstance(other, RolloutRequests)
    assert one.groups.informative.tolist() != other.groups.informative.tolist()


def test_nothing_is_said_of_idle_time_where_requests_change_machines() -> None:
    apart = scenario("{prompts: 3, samples: 2}").with_set(
        "links={pd: {sender: p, receiver: d, bandwidth_gb_per_s: 50}}", "pools={p: {role: prefill}, d: {role: decode}}"
    )
    rollout = simulate(apart).summary["rollout"]
    assert (rollout["idle_share"], rollout["steps"][0]["idle_s"]) == (None, None)
    assert rollout["answers"]["kept"] == 6


@pytest.mark.parametrize(
    ("rollout", "more", "says"),
    [
        ("{prompts: 4}", "prompt_tokens: 5", "a rollout also needs output_tokens"),
        ("{prompts: 4}", f"{LENGTHS}, requests: 5", "a rollout already says what is sent, so requests cannot be given too"),
        ("{prompts: 4}", f"{LENGTHS}, rate_scale: 2", "have none; change a setting of the rollout instead"),
        ("{prompts: 4, wanted: 5}", LENGTHS, "wanted is at most prompts, 4; got 5"),
        ("{prompts: 4, informative: 1.5}", LENGTHS, "informative is a share above 0, at most 1; got 1.5"),
        ("{prompts: 4, informative: 0.5, leftover: continue}", LENGTHS, "leftover: continue is for groups that all count"),
        ("{prompts: 1, informative: 1e-9}", LENGTHS, "step 0 has 0 informative groups after 1,000 batches of 1, and 1 are"),
        ("{prompts: 4, sample: 2}", LENGTHS, "did you mean samples?"),
        ("{prompts: 4, redistribute: 1}", LENGTHS, "redistribute is a share above 0, below 1; got 1"),
        ("{prompts: 4, informative: 0.5, leftover: recompute}", LENGTHS, "leftover: recompute is for groups that all count"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_a_sentence(rollout: str, more: str, says: str) -> None:
    with pytest.raises(ScenarioError) as error:
        workload_of(scenario(rollout, more))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rollout", "settings", "says"),
    [
        (
            "{prompts: 4, pause_s: 1, leftover: continue}",
            "failures={mean_up_s: 1800, mean_down_s: 60}",
            "rollout.pause_s has machines stop what runs",
        ),
        (
            "{prompts: 4, leftover: recompute}",
            "memory.tiers=[{kind: host, gib: 4}]",
            "with memory.tiers; leave one of the two out",
        ),
        (
            "{prompts: 4, redistribute: 0.5}",
            "encode={token_s: 0, encoder_tokens: 5, bandwidth_gb_per_s: 1}",
            "(--set workload.rollout.redistribute=null)",
        ),
    ],
)
def test_what_is_not_modelled_where_machines_stand_still_is_one_sentence(
    rollout: str, settings: str, says: str
) -> None:
    with pytest.raises(ScenarioError) as error:
        build(scenario(rollout).with_set(settings))
    assert says in str(error.value)


def test_answers_that_are_computed_again_are_told_and_moved() -> None:
    kept, dropped = (
        simulate(
            scenario(f"{{prompts: 6, samples: 4, wanted: 3, steps: 4, pause_s: 0.5, leftover: {each}}}").with_set(
                "replicas=2"
            )
        )
        for each in ("continue", "recompute")
    )
    assert kept.summary["rollout"]["recomputed_tokens"] == 0 < dropped.summary["rollout"]["recomputed_tokens"]
    assert "computed again" in dict(fact_rows(dropped.summary))["Answers"]
    assert dropped.summary["rollout"]["idle_share"] is None
    for result in (kept, dropped):
        first, second = result.summary["rollout"]["steps"][:2]
        assert second["begin_s"] == pytest.approx(first["begin_s"] + first["step_s"])
