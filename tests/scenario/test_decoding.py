"""The decoding section: what it refuses, what it builds, and what a run with it leaves."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.memory import stack_memory
from hwmodels.totals import Totals
from policies.acceptance import BetaAlpha, FromDistributions, Iid, MeanLength, PerPosition, Recorded, Tree, TwoState
from sim import simulate
from sim.cli import build_app
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.study.points import Sweep
from tests.sample import few

WORKLOAD = {
    "arrivals": {"process": "poisson", "rate_per_s": 20.0},
    "prompt_tokens": 100,
    "output_tokens": 60,
    "requests": 40,
}


def scenario(decoding=None, **settings):
    made = {"workload": WORKLOAD, **settings}
    if decoding is not None:
        made["decoding"] = decoding
    return Scenario.from_mapping(made, source="my.yaml")


def drafted(**settings):
    """A decoding section that works, with some keys changed."""
    return {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "acceptance": {"alpha": 0.8},
        "draft": {"cost_ratio": 0.05},
        **settings,
    }


def refusal(decoding, **settings):
    with pytest.raises(ScenarioError) as error:
        resolve(scenario(decoding, **settings))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("my.yaml: ")
    return str(error.value)


def built(acceptance, **settings):
    return resolve(scenario(drafted(acceptance=acceptance, **settings))).experiment.replicas[0].decoding


def test_without_a_section_decoding_is_autoregressive():
    experiment = resolve(scenario()).experiment
    assert experiment.replicas[0].decoding is None
    assert resolve(scenario({"method": "autoregressive"})).experiment.replicas[0].decoding is None


@pytest.mark.parametrize(
    ("decoding", "expected"),
    [
        (drafted(acceptance={"alpha": 1.2}), "decoding.acceptance.alpha is a number at most 1; got 1.2"),
        (drafted(acceptance={"alpha": -0.1}), "decoding.acceptance.alpha is a number at least 0; got -0.1"),
        (
            drafted(acceptance={"per_position": [0.5, 0.6, 0.4, 0.3], "kind": "unconditional"}),
            "unconditional rates cannot rise with the position",
        ),
        (drafted(acceptance={"per_position": [0.5] * 4}), "per_position needs kind: conditional"),
        (
            drafted(acceptance={"per_position": [0.5], "kind": "conditional"}),
            "decoding.num_speculative_tokens drafts 4 tokens a round, and decoding.acceptance.per_position says nothing beyond the "
            "first 1; draft at most 1",
        ),
        (
            drafted(
                num_speculative_tokens=[[1, 4, 1], [5, None, 3]],
                acceptance={"per_position": [0.5, 0.5], "kind": "conditional"},
            ),
            "drafts 3 tokens a round, and decoding.acceptance.per_position says nothing beyond the first 2",
        ),
        (drafted(acceptance={"mean_length": 5.5}), "lies in [1, k + 1] = [1, 5]; got 5.5"),
        (drafted(acceptance={"mean_length": 0.9}), "lies in [1, k + 1] = [1, 5]; got 0.9"),
        (drafted(acceptance={}), "give exactly one of alpha, per_position, mean_length"),
        (drafted(acceptance={"alpha": 0.5, "mean_length": 2.0}), "exactly one of"),
        (drafted(acceptance={"alpha": 0.5, "kind": "conditional"}), "kind belongs to per_position"),
        (
            drafted(acceptance={"recorded": "nowhere.csv"}),
            "my.yaml: decoding.acceptance.recorded: nowhere.csv does not exist",
        ),
        (drafted(acceptance={"two_state": {"alpha_good": 0.9, "alpha_bad": 0.5}}), "needs stay_good and stay_bad"),
        (drafted(num_speculative_tokens=-1), "num_speculative_tokens is 0 or more; got -1"),
        (drafted(num_speculative_tokens=1025), "num_speculative_tokens is at most 1024; got 1025"),
        (drafted(num_speculative_tokens=[[1, None, 2000]]), "num_speculative_tokens is at most 1024; got 2000"),
        (drafted(num_speculative_tokens=2.5), "num_speculative_tokens: expected a whole number"),
        (drafted(num_speculative_tokens=[[2, None, 3]]), "starts at batch 2; expected 1"),
        (drafted(num_speculative_tokens=[[1, 8, 3]]), "ends at a batch of 8, but up to 40 sequences may run"),
        (drafted(num_speculative_tokens=[[1, 8, 3], [9, None, -2]]), "a k of 0 or more"),
        (drafted(max_speculative_tokens=3), "max_speculative_tokens is for num_speculative_tokens: adaptive"),
        (drafted(method="lookahead"), "decoding.method is one of autoregressive, draft_model"),
        (drafted(metod="eagle"), "decoding.metod is not a setting; did you mean method?"),
        (drafted(draft={"cost_ratio": 0.1, "step_s": 0.1}), "give exactly one of model, cost_ratio, step_s"),
        (drafted(draft={"step_s": -0.1}), "decoding.draft.step_s is a number at least 0"),
        (drafted(draft={"step_s": 0.1, "tensor": 2}), "tensor belongs to a draft model"),
        (drafted(draft={"model": "llama-9"}), "decoding.draft.model: "),
        (drafted(draft={"model": "gpt2"}), "gpt2 has a vocabulary of 50,257 tokens and llama-3.1-8b one of 128,256"),
        (drafted(draft={"model": "llama-3.2-1b", "tensor": 2}), "decoding.draft.tensor is 2, but the target's first"),
        (drafted(draft=None), "method draft_model needs draft"),
        (drafted(method="ngram"), "n-gram look-up runs no model, so draft means nothing"),
        (drafted(method="medusa"), "Medusa's heads run inside the target's own step"),
        (drafted(rule="naive_match"), "what rule naive_match accepts follows from the two distributions"),
        (drafted(rule="lenient"), "rule lenient needs b > 0"),
        (drafted(b=0.5), "b belongs to rule lenient"),
        (drafted(overhead_s=-1.0), "decoding.overhead_s is a number at least 0"),
        (
            drafted(acceptance={"distributions": {"target": [0.5, 0.6], "draft": [0.5, 0.5]}}),
            "decoding.acceptance.distributions: target must sum to 1",
        ),
        (
            drafted(num_speculative_tokens=1, acceptance={"tree": {"accuracies": [[0.6]], "nodes": 1}}),
            "method draft_model drafts a chain",
        ),
        ({"method": "autoregressive", "num_speculative_tokens": 3}, "method autoregressive drafts nothing"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "method eagle needs acceptance"),
        ({"method": "ngram", "acceptance": {"alpha": 0.3}}, "method ngram needs num_speculative_tokens"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused_in_one_sentence(decoding, expected):
    assert expected in refusal(decoding)


def test_a_draft_larger_than_the_memory_left_is_refused():
    text = refusal(drafted(draft={"model": "llama-3.1-70b"}), scheduler="sarathi")
    assert "llama-3.1-70b takes 141.1 GB on each of its 1 GPUs, but only 60.6 GB is left" in text
    assert "take a smaller draft" in text


def test_another_vocabulary_is_accepted_when_the_user_insists():
    section = drafted(draft={"model": "gpt2", "allow_vocabulary_mismatch": True})
    assert resolve(scenario(section)).manifest["decoding"]["draft"]["model"] == "gpt2"


@pytest.mark.parametrize(
    ("scheduler", "most"),
    [
        ({"policy": "vllm", "max_num_seqs": 8}, 8),
        ({"policy": "trtllm", "max_batch_size": 8}, 8),
        ({"policy": "sglang", "max_running_requests": 8}, 8),
        ({"policy": "cap", "max_sequences": 8, "inner": "vllm"}, 8),
        ({"policy": "vllm", "max_num_seqs": 9}, 9),
    ],
)
def test_the_largest_batch_is_by_the_limit_of_any_scheduler(scheduler: dict[str, object], most: int) -> None:
    section = drafted(num_speculative_tokens=[[1, 8, 3]])
    if most == 8:
        resolve(scenario(section, scheduler=scheduler))
    else:
        assert f"up to {most} sequences may run" in refusal(section, scheduler=scheduler)


def test_a_recording_with_too_few_rounds_is_refused_before_the_run(tmp_path):
    file = tmp_path / "acceptance.csv"
    file.write_text("request,round,accepted\n" + "".join(f"0,{r},2\n" for r in range(19)))
    # 19 rounds of 3 tokens and the first token: 58 of 60.
    text = refusal(drafted(acceptance={"recorded": str(file)}))
    assert "request 0 needs 59 tokens from rounds, but row 0 of the recording ends after 19 rounds with 57" in text
    file.write_text("request,round,accepted\n" + "".join(f"0,{r},2\n" for r in range(20)))
    summary = simulate(scenario(drafted(acceptance={"recorded": str(file)}))).summary
    assert summary["speculation"]["mean_acceptance_length"] == 3.0


def test_the_content_of_a_recording_is_part_of_the_hash(tmp_path):
    file = tmp_path / "acceptance.csv"
    hashes = set()
    for accepted in (1, 2):
        file.write_text("request,round,accepted\n" + f"0,0,{accepted}\n")
        hashes.add(scenario(drafted(acceptance={"recorded": str(file)})).hash)
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ({"alpha": 0.8}, Iid(alpha=0.8)),
        ({"mean_length": 2.8}, MeanLength(mean=2.8, at_k=4)),
        ({"mean_length": 2.8, "at_k": 7}, MeanLength(mean=2.8, at_k=7)),
        (
            {"per_position": [0.8, 0.7, 0.6, 0.5], "kind": "conditional"},
            PerPosition(rates=(0.8, 0.7, 0.6, 0.5), kind="conditional"),
        ),
        ({"beta": {"mean": 0.7, "sd": 0.1}}, BetaAlpha(mean=0.7, sd=0.1)),
        (
            {"two_state": {"alpha_good": 0.9, "alpha_bad": 0.4, "stay_good": 0.8, "stay_bad": 0.6}},
            TwoState(alpha_good=0.9, alpha_bad=0.4, stay_good=0.8, stay_bad=0.6),
        ),
        (
            {"two_state": {"alpha_good": 0.9, "alpha_bad": 0.4, "lag1": 0.1}},
            TwoState.from_autocorrelation(alpha_good=0.9, alpha_bad=0.4, lag1=0.1, at_k=4),
        ),
        (
            {"distributions": {"target": [0.7, 0.3], "draft": [0.4, 0.6]}},
            FromDistributions(target=[0.7, 0.3], draft=[0.4, 0.6]),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else type(value).__name__,
)
def test_every_kind_of_acceptance_reaches_the_policy(acceptance, expected):
    assert built(acceptance).acceptance == expected


def test_rules_change_what_distributions_accept():
    given = {"distributions": {"target": [0.7, 0.3], "draft": [0.4, 0.6]}}
    assert built(given).acceptance.alpha == pytest.approx(0.7)
    assert built(given, rule="naive_match").acceptance.alpha == pytest.approx(0.46)
    assert built(given, rule="lenient", b=0.5).acceptance.alpha == pytest.approx(1.0)


def test_a_recording_is_read_beside_the_scenario(tmp_path):
    (tmp_path / "acceptance.csv").write_text("request,round,accepted\n" + "".join(f"5,{r},4\n" for r in range(12)))
    (tmp_path / "my.yaml").write_text(scenario(drafted(acceptance={"recorded": "acceptance.csv"})).to_yaml())
    decoding = resolve(Scenario.load(tmp_path / "my.yaml")).experiment.replicas[0].decoding
    assert decoding.acceptance == Recorded(rows=((4,) * 12,), recorded_k=4)


def test_a_draft_model_takes_memory_time_and_prompt_time():
    plain, drafting = (resolve(scenario(d)) for d in (None, drafted(draft={"model": "llama-3.2-1b"})))
    before, after = (b.experiment.replicas[0].kv_blocks for b in (plain, drafting))
    draft = drafting.manifest["decoding"]["draft"]
    target_kv = 2 * 32 * 8 * 128 * 2
    assert draft["kv_bytes_per_token_per_device"] == 2 * 16 * 8 * 64 * 2
    left = plain.manifest["memory"]["kv_bytes"]
    graphs = 16 * stack_memory("vllm").graph_bytes_per_layer
    # One block is the null block, with a draft and without.
    assert before == int(left / (16 * target_kv)) - 1
    both = 16 * (target_kv + draft["kv_bytes_per_token_per_device"])
    assert after == int((left - draft["weight_bytes_per_device"] - graphs) / both) - 1
    free = drafted(draft={"step_s": 0.0})
    slow, fast = (
        simulate(scenario(d)).summary["ttft_s"]["mean"] for d in (drafted(draft={"model": "llama-3.2-1b"}), free)
    )
    assert slow > fast


def test_a_draft_takes_as_many_gpus_as_the_target_unless_told_otherwise():
    def tensor(**draft):
        section = drafted(draft={"model": "llama-3.2-1b", **draft})
        return resolve(scenario(section, parallel={"tensor": 4})).manifest["decoding"]["draft"]["tensor"]

    assert tensor() == 4
    assert tensor(tensor=1) == 1


def test_with_pipeline_stages_the_draft_lies_on_the_first():
    section = drafted(draft={"model": "llama-3.2-1b"})
    with_draft, without = (
        resolve(scenario(d, parallel={"pipeline": 2})).experiment.replicas[0].kv_blocks for d in (section, None)
    )
    assert with_draft < without
    assert simulate(scenario(section, parallel={"pipeline": 2})).summary["requests"]["finished"] == 40


def test_cost_ratio_is_of_the_targets_plain_step_at_the_same_batch():
    spec = resolve(scenario(drafted(draft={"cost_ratio": 0.25}))).experiment.replicas[0]
    for batch, kv in ((1, 500), (64, 40_000)):
        totals = Totals(batch, 0, 0, 0, 0, batch, kv, batch)
        assert spec.draft_cost.iteration_s(totals) == 0.25 * spec.cost.iteration_s(totals)


def test_cost_ratio_is_of_all_stages_of_a_pipeline():
    section = drafted(draft={"cost_ratio": 0.25})
    spec = resolve(scenario(section, parallel={"pipeline": 2})).experiment.replicas[0]
    totals = Totals(4, 0, 0, 0, 0, 4, 2000, 4)
    both = spec.cost.iteration_s(totals, 0) + spec.cost.iteration_s(totals, 1) + spec.cost.handover_s(4)
    assert spec.draft_cost.iteration_s(totals) == pytest.approx(0.25 * both, rel=1e-12)


def test_the_drafts_prompt_is_part_of_the_time_to_the_first_token():
    alone = {**WORKLOAD, "arrivals": {"process": "closed_loop", "concurrency": 1}, "requests": 1}

    def first_token_s(draft):
        made = resolve(scenario(drafted(draft=draft), workload=alone)).experiment
        return simulate(made).summary["ttft_s"]["mean"], made.replicas[0].draft_cost

    (with_model, cost), (free, _) = first_token_s({"model": "llama-3.2-1b"}), first_token_s({"step_s": 0.0})
    prompt_s = cost.iteration_s(Totals(100, 100, 1, 5050, 100))
    # vLLM takes the other three passes of a round in the same iteration, on lines a little beside the cost model.
    others_s = 3 * cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, 100, 1))
    assert min(prompt_s, others_s) > 0.0
    assert with_model - free == pytest.approx(prompt_s + others_s, rel=1e-5)


def test_an_iteration_with_prompts_and_decodes_takes_all_passes_of_the_draft_and_the_overhead():
    both = {**WORKLOAD, "arrivals": {"process": "poisson", "rate_per_s": 1e6}, "requests": 2}
    chunked = {"policy": "sarathi", "token_budget": 150}

    def mixed_s(step_s, overhead_s):
        section = drafted(draft={"step_s": step_s}, overhead_s=overhead_s)
        made = scenario(section, workload=both, scheduler=chunked)
        iterations = simulate(made).columns.iterations()
        mixed = (iterations["prefill_tokens"] > 0) & (iterations["decode_tokens"] > 0)
        return iterations["duration_ns"][mixed][0] * 1e-9

    # One pass over the prompt chunk and four for the decode.
    assert mixed_s(0.002, 0.001) - mixed_s(0.0, 0.0) == pytest.approx(5 * 0.002 + 0.001, abs=2e-9)


def test_a_sequence_holds_slots_for_the_tokens_it_drafts():
    alone = {**WORKLOAD, "arrivals": {"process": "closed_loop", "concurrency": 1}, "requests": 1, "prompt_tokens": 30}

    def most_blocks(**settings):
        made = scenario(
            drafted(acceptance={"alpha": 0.0}, **settings), workload={**alone, "output_tokens": 12}, scheduler="sarathi"
        )
        return simulate(made).columns.iterations()["kv_blocks_used"].max()

    # 40 tokens are cached before the last of eleven rounds, which submits K + 1 more: 48 slots are three blocks of 16.
    assert most_blocks(num_speculative_tokens=7) == 3
    assert most_blocks(num_speculative_tokens=8) == 4


def test_adaptive_stays_within_what_the_acceptance_describes_and_says_so(tmp_path):
    file = tmp_path / "acceptance.csv"
    file.write_text("request,round,accepted\n" + "".join(f"0,{r},3\n" for r in range(59)))
    target, free = [[0.5, 0.5]] * 3, {"draft": {"step_s": 0.0}}
    for k, method, acceptance, settings in (
        (2, "medusa", {"tree": {"accuracies": [[0.9], [0.9]], "nodes": 2}}, {}),
        (3, "eagle", {"per_position": [0.9, 0.9, 0.9], "kind": "conditional"}, free),
        (3, "eagle", {"recorded": str(file), "recorded_k": 3}, free),
        (3, "eagle", {"distributions": {"target": target, "draft": target}}, free),
        (1, "eagle", {"published": "deepseek-v3"}, free),
        (8, "eagle", {"published": "kimi-k2.5-eagle3"}, free),
        (8, "eagle", {"alpha": 0.9}, free),
    ):
        section = {"method": method, "num_speculative_tokens": "adaptive", "acceptance": acceptance, **settings}
        made = resolve(scenario(section))
        assert max(k for _, _, k in made.experiment.replicas[0].decoding.table) <= k
        said = [note for note in made.manifest["notes"] if f"adaptive chooses at most {k} drafted token" in note]
        assert [f"decoding.acceptance.{next(iter(acceptance))}" in note for note in said] == ([True] if k < 8 else [])
        section["max_speculative_tokens"] = k
        assert not [note for note in resolve(scenario(section)).manifest["notes"] if "adaptive chooses" in note]


def test_adaptive_counts_the_overhead_of_a_speculative_step():
    def table(overhead_s):
        return built({"alpha": 0.8}, num_speculative_tokens="adaptive", overhead_s=overhead_s).table

    assert max(k for _, _, k in table(0.0)) > 0
    assert table(1.0) == ((1, None, 0),)


def test_alone_on_a_replica_a_request_is_as_fast_as_theorem_3_8_says():
    # alpha 1 leaves no chance: 61 tokens are one from the prompt and 12 rounds of 5.
    alone = {**WORKLOAD, "arrivals": {"process": "closed_loop", "concurrency": 1}, "output_tokens": 61}
    sections = (
        drafted(acceptance={"alpha": 1.0}, draft={"step_s": 0.0}),
        drafted(acceptance={"alpha": 1.0}, draft={"step_s": 0.002}, overhead_s=0.001),
    )
    free, costly = (simulate(scenario(d, workload=alone)).summary["tpot_s"]["mean"] for d in sections)
    assert costly - free == pytest.approx((4 * 0.002 + 0.001) / 5, rel=1e-6)


def test_adaptive_drafts_less_as_the_batch_grows():
    section = drafted(
        method="eagle", num_speculative_tokens="adaptive", max_speculative_tokens=6, acceptance={"alpha": 0.6}
    )
    experiment = resolve(
        scenario(
            section, scheduler={"policy": "sarathi", "max_sequences": 512}, workload={**WORKLOAD, "requests": 2000}
        )
    )
    decoding = experiment.experiment.replicas[0].decoding
    ks = [k for _, _, k in decoding.table]
    assert ks == sorted(ks, reverse=True)
    assert ks[0] > ks[-1]
    assert experiment.manifest["decoding"]["adaptive"]["context_tokens"] == 130


def test_adaptive_with_a_dear_draft_drafts_nothing():
    section = drafted(num_speculative_tokens="adaptive", draft={"cost_ratio": 0.9})
    assert built({"alpha": 0.5}, num_speculative_tokens="adaptive", draft={"cost_ratio": 0.9}).table == ((1, None, 0),)
    speculation = simulate(scenario(section | {"acceptance": {"alpha": 0.5}})).summary["speculation"]
    assert speculation["num_drafts"] == 0
    assert speculation["alpha"] is None


def test_a_tree_verifies_its_nodes_and_accepts_the_sum_of_path_products():
    tree = {"accuracies": [[0.6, 0.2], [0.5, 0.2]], "branching": [2, 2]}
    section = {"method": "medusa", "acceptance": {"tree": tree}}
    made = scenario(section, workload={**WORKLOAD, "requests": 400})
    decoding = resolve(made).experiment.replicas[0].decoding
    assert isinstance(decoding.acceptance, Tree)
    assert decoding.query_tokens(1) == 7
    found = simulate(made).summary["speculation"]
    expected = 1 + (0.6 + 0.2) + (0.6 + 0.2) * (0.5 + 0.2)
    # 10,000 rounds of a standard deviation of 0.85: five standard errors.
    assert found["num_drafts"] > 10_000
    assert found["mean_acceptance_length"] == pytest.approx(expected, abs=0.043)
    assert found["num_draft_tokens"] == 6 * found["num_drafts"]


@pytest.mark.parametrize("policy", ["static", "orca", "orca_paged", "trtllm", "vllm-v0", "vllm", "sarathi"])
@pytest.mark.parametrize("k", few([4, [[1, 4, 5], [5, 16, 2], [17, None, 0]]], reason="long runs, much alike"))
def test_speculation_works_with_every_scheduler_router_and_memory_limit(policy, k):
    made = scenario(
        drafted(num_speculative_tokens=k),
        scheduler={"policy": policy},
        replicas=2,
        router="least_outstanding",
        memory={"kv_blocks": 95},
        workload={**WORKLOAD, "arrivals": {"process": "poisson", "rate_per_s": 2000.0}},
    )
    stepped, spanned = simulate(made, fast_forward=False), simulate(made)
    assert spanned.summary["requests"]["finished"] == 40
    assert spanned.summary["preemptions"] > 0 or policy in ("static", "orca", "trtllm")
    for name, column in spanned.columns.requests.items():
        np.testing.assert_array_equal(column, stepped.columns.requests[name], err_msg=name)
    assert spanned.summary["speculation"] == stepped.summary["speculation"]


def test_luck_does_not_depend_on_the_scheduler():
    rounds = [
        simulate(scenario(drafted(), scheduler={"policy": policy})).summary["speculation"]
        for policy in ("orca", "sarathi", "vllm-v0", "vllm")
    ]
    assert rounds[0] == rounds[1] == rounds[2]


def test_four_acceptance_rates_are_kept_apart():
    workload = {**WORKLOAD, "requests": 2000, "arrivals": {"process": "poisson", "rate_per_s": 200.0}}
    found = simulate(scenario(drafted(), workload=workload)).summary["speculation"]
    n = found["num_drafts"]
    # Five standard errors of shares over 35,000 rounds are 0.014.
    assert found["alpha"] == pytest.approx(0.8, abs=0.014)
    assert found["acceptance_rate_per_pos"] == pytest.approx([0.8, 0.64, 0.512, 0.4096], abs=0.014)
    assert found["mean_acceptance_length"] == pytest.approx(3.3616, abs=0.04)
    assert found["draft_acceptance_rate"] == pytest.approx(2.3616 / 4, abs=0.01)
    assert found["num_draft_tokens"] == 4 * n
    assert sum(found["num_accepted_tokens_per_pos"]) == found["num_accepted_tokens"]
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_tokens"] / n


def test_summary_table_and_manifest_say_what_was_speculated(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(scenario(drafted()).to_yaml())
    answer = CliRunner().invoke(
        build_app(), ["run", str(file), "--out", str(tmp_path / "out"), "--no-plots"], catch_exceptions=False
    )
    assert answer.exit_code == 0
    assert "tokens a round" in answer.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert summary["speculation"]["num_drafts"] > 0
    assert manifest["speculation"] == summary["speculation"]
    assert manifest["decoding"]["num_speculative_tokens"] == [[1, None, 4]]
    assert manifest["decoding"]["acceptance"] == "Iid(alpha=0.8)"


def test_work_of_the_draft_counts():
    def work(draft):
        return simulate(scenario(drafted(draft=draft))).columns.meta

    alone, with_draft = work({"step_s": 0.0}), work({"model": "llama-3.2-1b"})
    assert with_draft["flops"] > 1.05 * alone["flops"]
    assert with_draft["peak_flops_per_s"] == alone["peak_flops_per_s"]


MTP = {"method": "mtp", "acceptance": {"published": "deepseek-v3"}}
DEEPSEEK = {"model": "deepseek-v3", "hardware": "b200", "parallel": {"tensor": 8}, "serving_stack": "sglang"}


def test_the_targets_own_layers_draft_where_nothing_else_is_said():
    made = resolve(scenario(MTP, **DEEPSEEK))
    spec = made.experiment.replicas[0]
    plain = resolve(scenario(**DEEPSEEK)).experiment.replicas[0]
    assert spec.decoding.k(1) == 1
    assert spec.lookahead_tokens == 1
    assert spec.kv_blocks < plain.kv_blocks
    facts = made.manifest["decoding"]
    assert facts["draft"]["own_layers"] == 1
    assert "2412.19437" in facts["acceptance_source"]
    assert not any("left out" in note for note in made.manifest["notes"])
    assert any(
        "multi-token-prediction layers of deepseek-v3 (1) are left out" in n
        for n in resolve(scenario(**DEEPSEEK)).manifest["notes"]
    )


@pytest.mark.parametrize("name", ["deepseek_mtp", "NEXTN", "MTP", "qwen3_next_mtp"])
def test_other_names_of_the_method_are_understood(name):
    assert scenario({**MTP, "method": name}, **DEEPSEEK).decoding.method == "mtp"


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        (
            {},
            {"model": "llama-3.1-8b", "hardware": "h100-sxm"},
            "llama-3.1-8b has no layers for multi-token prediction",
        ),
        ({"num_speculative_tokens": 2}, DEEPSEEK, "acceptance.published: deepseek-v3 says nothing beyond the first 1"),
        (
            {"acceptance": {"published": "deepseek-v4"}},
            DEEPSEEK,
            "not a published acceptance; did you mean deepseek-v3?",
        ),
        (
            {"num_nextn_predict_layers": 1},
            DEEPSEEK,
            "TensorRT-LLM's num_nextn_predict_layers is num_speculative_tokens here",
        ),
        ({"speculative_num_steps": 1}, DEEPSEEK, "SGLang's speculative_num_steps is num_speculative_tokens here"),
        (
            {"method": "eagle", "num_speculative_tokens": 1},
            DEEPSEEK,
            "SGLang's EAGLE on a model with layers of its own",
        ),
    ],
)
def test_what_own_layers_cannot_do_is_refused_in_one_sentence(change, settings, expected):
    assert expected in refusal({**MTP, **change}, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "vllm", "serving_stack": "vllm"},
        {"scheduler": "trtllm", "serving_stack": "trtllm"},
        {"scheduler": "sglang"},
        {"scheduler": "sarathi"},
        {"parallel": {"data": 8, "expert": 8}},
        {"parallel": {"tensor": 4, "pipeline": 2}},
    ],
    ids=str,
)
def test_own_layers_draft_under_every_scheduler_and_layout(settings):
    workload = {**WORKLOAD, "requests": 8}
    summary = simulate(scenario(MTP, **{**DEEPSEEK, **settings, "workload": workload})).summary
    assert summary["requests"]["finished"] == 8
    assert 1.7 < summary["speculation"]["mean_acceptance_length"] < 2.0


OWN = """
from dataclasses import dataclass
import numpy as np
from policies.acceptance import Chain

@dataclass(frozen=True, kw_only=True)
class Always(Chain):
    n: int
    def accepted(self, request_id, round_start, n_rounds, k, seed):
        return np.full(n_rounds, self.n)
    def per_position(self, k):
        return np.arange(k) < self.n

@dataclass(frozen=True, kw_only=True)
class Answering(Always):
    n: int = 1
    per: object = None
    mean: object = 2.0
    wide: object = 5
    def per_position(self, k):
        return self.per
    def mean_length(self, k):
        return self.mean
    def width(self, k):
        return self.wide

class Alone:
    def accepted(self, request_id, round_start, n_rounds, k, seed): ...
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "drafts_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **settings: {"policy": "drafts_of_mine:Always", **settings}


def test_an_acceptance_process_of_ones_own_decides_what_rounds_accept(own):
    result = simulate(scenario(drafted(acceptance=own(n=3))))
    facts = result.summary["speculation"]
    assert facts["num_accepted_tokens"] == 3 * facts["num_drafts"] > 0
    assert "Always(n=3)" in result.manifest["decoding"]["acceptance"]


def test_settings_of_a_process_of_ones_own_are_changed_like_any_other(own):
    made = scenario(drafted(acceptance=own(n=1)))
    changed = made.with_set("decoding.acceptance.n=2")
    assert resolve(changed).experiment.replicas[0].decoding.acceptance.process.n == 2
    assert Scenario.from_yaml(changed.to_yaml()).hash == changed.hash != made.hash


def test_a_process_without_settings_goes_by_its_name_alone(own):
    refused = refusal(drafted(acceptance="drafts_of_mine:Always"))
    assert "decoding.acceptance.n is missing" in refused


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ({"n": 1, "m": 2}, "decoding.acceptance.m is not a setting of drafts_of_mine:Always"),
        ({"n": 1, "policy": "drafts_of_mine:Alone"}, "decoding.acceptance.n is not a setting"),
        ({"policy": "drafts_of_mine:Alone"}, "has no per_position; a subclass of policies.acceptance.Chain"),
        ({"policy": "drafts_of_mine:Missing"}, "drafts_of_mine has no 'Missing'"),
        ({"policy": "drafts_of_mine:np"}, "a policy is a class with the method accepted"),
        ({"policy": "alpha"}, "decoding.acceptance: 'alpha' is not a policy"),
    ],
)
def test_what_is_no_acceptance_process_is_refused_in_one_sentence(own, acceptance, expected):
    assert expected in refusal(drafted(acceptance=own(**acceptance)))


@pytest.mark.parametrize("n", [5, -1])
def test_counts_that_no_round_can_accept_end_the_run_in_one_sentence(own, n):
    with pytest.raises(
        ScenarioError,
        match=r"^decoding.acceptance: drafts_of_mine:Always answered accepted\(.*; expected \d+ whole numbers from 0 to 4",
    ):
        simulate(scenario(drafted(acceptance=own(n=n))))


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ("mean_length", {"mean": 0.5}),
        ("mean_length", {"mean": [2.0, 3.0]}),
        ("mean_length", {"mean": "many"}),
        ("width", {"wide": 0}),
        ("width", {"wide": 4.5}),
        ("per_position", {"per": "all"}),
        ("per_position", {"per": [0.5] * 3}),
        ("per_position", {"per": [1.5] * 4}),
    ],
)
def test_answers_of_a_process_of_ones_own_that_cannot_be_are_refused_in_one_sentence(own, asked, settings):
    made = scenario(drafted(acceptance=own(policy="drafts_of_mine:Answering", **settings)))

    def ask():
        getattr(resolve(made).experiment.replicas[0].decoding.acceptance, asked)(4)

    with pytest.raises(
        ScenarioError,
        match=rf"^(my.yaml: )?decoding.acceptance: drafts_of_mine:Answering answered {asked}\(4\) with .*; expected ",
    ):
        ask()


def test_settings_of_a_process_of_ones_own_stand_on_axes(own):
    plan = Sweep(base=scenario(drafted(acceptance=own(n=1))), axes={"decoding.acceptance.policy.n": [0, 2]})
    runs = [run for point in plan for run in plan.runs(point)]
    assert [resolve(run.scenario).experiment.replicas[0].decoding.acceptance.process.n for run in runs] == [0, 2]
