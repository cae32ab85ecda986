import pickle
import typing
from random import Random

import pytest

from hwmodels.graphs import GraphSettings
from hwmodels.precision import PRECISIONS
from sim.errors import ScenarioError
from sim.scenario import Scenario, named
from sim.scenario.assembly import resolve
from sim.scenario.keys import KvPrecision
from sim.scenario.yaml import parse_yaml
from sim.study.points import Sweep, read_axis
from tests.scenario.random_scenarios import draw


def message(text):
    with pytest.raises(ScenarioError) as error:
        Scenario.from_yaml(text, source="my.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_empty_mapping_is_all_defaults():
    scenario = Scenario.from_yaml("{}")
    assert scenario.model == "llama-3.1-8b"
    assert scenario.memory.preemption == "recompute"
    assert scenario.settings() == {}


def test_every_key_of_a_full_file_is_kept():
    text = """
model: llama-3.1-8b
hardware: h100-sxm
precision: bf16
kv_precision: fp8
parallel: {tensor: 2, pipeline: 1}
replicas: 3
router: random
scheduler: {policy: sarathi, token_budget: 256, max_sequences: 64}
memory: {gpu_memory_utilization: 0.8, reserve_bytes: 1e9, block_tokens: 32, preemption: recompute}
workload: {trace: x.csv, rate_scale: 2, limit: 50}
slo: {ttft_s: 1.0, tpot_s: 0.05}
seed: 4
"""
    scenario = Scenario.from_yaml(text)
    assert scenario.router.policy == "random"
    assert scenario.scheduler.settings == {"token_budget": 256, "max_sequences": 64}
    assert scenario.memory.reserve_bytes == 1e9
    assert scenario.workload.rate_scale == 2.0
    assert Scenario.from_mapping(scenario.resolved()).resolved() == scenario.resolved()
    assert Scenario.from_yaml(scenario.to_yaml()).hash == scenario.hash


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replikas: 3", "my.yaml: replikas is not a setting; did you mean replicas?"),
        (
            "memory: {gpu_memory_utilisation: 1}",
            "my.yaml: memory.gpu_memory_utilisation is not a setting; did you mean gpu_memory_utilization?",
        ),
        ("memory: {release: 0.19}", "my.yaml: memory.release is text; got 0.19, a number: write '0.19' (in a shell"),
        ("memory: {kv_blocks: 0}", "my.yaml: memory.kv_blocks is a number at least 1; got 0"),
        ("tensor: 4", "my.yaml: tensor is not a setting; did you mean parallel.tensor?"),
        ("xyzzy: 4", "my.yaml: xyzzy is not a setting; valid here: model, hardware, precision"),
        ("scheduler.token_budget: 3", "write it nested: 'scheduler: {token_budget: ...}'"),
        ("seed: -1", "my.yaml: seed is a number at least 0; got -1"),
        ("seed: 1.5", "my.yaml: seed is a whole number; got 1.5"),
        ("seed: .nan", "my.yaml: seed is a whole number; got nan"),
        ("seed: true", "my.yaml: seed is a whole number; got True"),
        ("replicas: two", "my.yaml: replicas is a whole number; got 'two'"),
        ("replicas: 0", "my.yaml: replicas is a number at least 1; got 0"),
        (
            "memory: {gpu_memory_utilization: .nan}",
            "my.yaml: memory.gpu_memory_utilization is a finite number; got nan",
        ),
        (
            "memory: {gpu_memory_utilization: 1.2}",
            "my.yaml: memory.gpu_memory_utilization is a number at most 1; got 1.2",
        ),
        ("memory: {reserve_bytes: -1}", "my.yaml: memory.reserve_bytes is a number at least 0; got -1"),
        ("memory: {block_tokens: '16'}", "my.yaml: memory.block_tokens is a whole number; got '16'"),
        ("memory: {preemption: swapp}", "my.yaml: memory.preemption is one of recompute, swap, none; got 'swapp'"),
        ("workload: {trace: x, rate_scale: .inf}", "my.yaml: workload.rate_scale is a finite number; got inf"),
        ("workload: {trace: x, limit: 0}", "my.yaml: workload.limit is a number at least 1; got 0"),
        ("slo: {ttft_s: 0}", "my.yaml: slo.ttft_s is a number above 0; got 0"),
        ("precision: fb8", "got 'fb8'; did you mean fp8?"),
        (
            "parallel: 3",
            "my.yaml: parallel is a mapping of settings (tensor, pipeline, data, expert, decode_context, prefill_context, "
            "kv_interleave); got 3",
        ),
        ("scheduler: {token_budget: 3}", "my.yaml: scheduler.policy is missing"),
        ("model: [a]", "my.yaml: model is text; got ['a']"),
        ("model: ' '", "my.yaml: model: expected a name or a path"),
        ("[1, 2]", "my.yaml: a scenario is a mapping of settings"),
        ("1: 2", "my.yaml: 1 is not a setting; keys are words"),
        ("a: [", "my.yaml, line 2: not valid YAML"),
        ("seed: 1\nseed: 2", "my.yaml, line 2: not valid YAML: seed is given twice"),
        (
            "workload: {}",
            "my.yaml: workload: give a trace, sessions, or a generator: shared_prefix, conversations, servegen",
        ),
        ("workload: {requests: 5}", "a generated workload also needs arrivals, prompt_tokens, output_tokens"),
        (
            "workload: {trace: x, prompt_tokens: 5}",
            "a trace says what is sent when, and limit shortens it, so prompt_tokens cannot be given too",
        ),
        (
            "workload: {format: plain, requests: 1, prompt_tokens: 1, output_tokens: 1, arrivals: {process: poisson}}",
            "format is about reading a trace",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(text, expected):
    assert expected in message(text)


def test_several_slips_are_counted_and_unknown_keys_come_first():
    assert message("seed: -1\nreplikas: 3").endswith("did you mean replicas? (1 more setting is wrong)")


def test_keyword_arguments_are_checked_alike():
    assert Scenario(replicas=2).replicas == 2
    with pytest.raises(ScenarioError, match="replikas is not a setting"):
        Scenario(replikas=2)


def test_numbers_with_exponents_need_no_dot():
    assert Scenario.from_yaml("memory: {reserve_bytes: 2e9}").memory.reserve_bytes == 2e9


def test_set_changes_one_setting_and_leaves_the_original():
    before = Scenario.default()
    after = before.with_set("workload.rate_scale=2")
    assert (before.workload.rate_scale, after.workload.rate_scale) == (1.0, 2.0)
    assert after.workload.trace == before.workload.trace


def test_set_with_a_mapping_replaces_the_section():
    scenario = Scenario.from_yaml("scheduler: {policy: sarathi, token_budget: 9}")
    assert scenario.with_set("scheduler={policy: vllm-v0}").scheduler.settings == {}


@pytest.mark.parametrize("assignment", ["scheduler=orca", "scheduler.policy=orca", "scheduler={policy: orca}"])
def test_a_policy_can_be_set_in_three_ways(assignment):
    assert Scenario.default().with_set(assignment).scheduler.policy == "orca"


def test_set_below_a_default_keeps_the_rest_of_it():
    scenario = Scenario()
    assert scenario.with_set("scheduler.max_num_seqs=64").scheduler.policy == "vllm"
    assert scenario.with_set("serving_stack=sglang", "scheduler.chunked_prefill_size=64").scheduler.policy == "sglang"
    assert scenario.with_set("workload.limit=5").workload.trace == "conversation"
    assert Scenario.from_yaml("router: random").with_set("router.x=1").router.settings == {"x": 1}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("replicas", "expected key.path=VALUE"),
        ("=3", "expected key.path=VALUE"),
        ("model.x=3", "model has no settings of its own"),
        ("seed=[", "--set seed, line 2: not valid YAML"),
        ("replikas=3", "default scenario: replikas is not a setting; did you mean replicas?"),
    ],
)
def test_a_wrong_set_is_refused(assignment, expected):
    with pytest.raises(ScenarioError) as error:
        Scenario.default().with_set(assignment)
    assert expected in str(error.value)


def test_the_hash_follows_settings_and_file_contents_but_not_spelling(tmp_path):
    def scenario(text):
        return Scenario.from_yaml(text, folder=tmp_path)

    (tmp_path / "a.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    (tmp_path / "b.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    first = scenario("workload: {trace: a.csv}")
    assert first.hash == scenario("seed: 0\nworkload: {trace: b.csv, rate_scale: 1}").hash
    assert first.hash != scenario("seed: 1\nworkload: {trace: a.csv}").hash
    (tmp_path / "b.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,2\n")
    assert first.hash != scenario("workload: {trace: b.csv}").hash


def test_a_scenario_can_be_pickled_and_printed():
    scenario = Scenario.default().with_set("replicas=2")
    assert pickle.loads(pickle.dumps(scenario)) == scenario
    assert eval(str(scenario)).settings() == scenario.settings()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.yaml", None, "does not exist"),
        ("binary.yaml", b"\xff\xfe\x00", "is not text"),
        ("folder", "folder", "is a folder"),
    ],
)
def test_a_scenario_file_that_cannot_be_read_is_named(tmp_path, name, content, expected):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ScenarioError, match=expected):
        Scenario.load(path)


def test_formats_of_the_kv_cache_are_formats():
    assert set(typing.get_args(KvPrecision)) <= set(PRECISIONS)


@pytest.mark.parametrize(
    "table", [named.SCHEDULERS, named.ROUTERS, named.EVICTIONS, named.CONTROLS, named.PROCESSES, named.DISTRIBUTIONS]
)
def test_every_short_name_leads_to_something_with_settings_of_its_own(table):
    for paths in table.values():
        for path in paths.split("|"):
            assert callable(named.load(path))
            named.parameters(named.load(path))


def test_several_settings_are_checked_together():
    start = Scenario.default()
    both = start.with_set("slo.e2el_s=9", "scheduler.policy=vllm-v0", "scheduler.max_num_batched_tokens=64")
    assert both.resolved()["scheduler"]["max_num_batched_tokens"] == 64
    half_way = start.with_set(
        "decoding.method=ngram", "decoding.num_speculative_tokens=3", "decoding.acceptance.alpha=0.5"
    )
    assert half_way.decoding is not None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 10**9), ("2.5e3", 2500), ("1_0e2", 1000), ("-1E3", -1000), ("1e17", 10**17), ("1e30", 1e30),
        ("1e400", float("inf")),
        ("1e-3", 1e-3), ("2.5e0", 2.5), ("1.0", 1.0), ("2.5", 2.5),
        (".5", 0.5), ("1_000", 1000), ("0x10", 16), ("-3", -3), ("0", 0), (".inf", float("inf")),
        ("4:16", "4:16"), ("010", "010"), ("1:30:00", "1:30:00"), ("1.2.3", "1.2.3"), ("true", True), ("null", None),
    ],
)  # fmt: skip
def test_yaml_numbers_are_those_that_people_read(text, value):
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("number", ["1e3", "1_000", "1000", "0.1e4"])
def test_a_whole_number_may_be_written_with_an_exponent_or_in_groups(number, tmp_path):
    """Wherever a setting is written: in a file, behind --set, on an axis, in a row of points; a setting or one of a policy."""
    keys = ("workload.requests", "scheduler.max_num_seqs", "workload.arrivals.rate_per_s")
    file = tmp_path / "scenario.yaml"
    file.write_text(
        f"workload: {{requests: {number}, arrivals: {{process: poisson, rate_per_s: {number}}}, "
        "prompt_tokens: 9, output_tokens: 9}\n"
        f"scheduler: {{policy: vllm, max_num_seqs: {number}}}\n"
    )
    made = Scenario.load(file)
    (tmp_path / "points.csv").write_text(f"{','.join(keys)}\n{','.join([number] * 3)}\n")
    (point,) = Sweep(base=made, points=tmp_path / "points.csv")
    for each in (made, made.with_set(*(f"{key}={number}" for key in keys)), made.with_values(point.settings)):
        built = resolve(each).experiment
        assert len(built.workload) == 1000
        assert built.replicas[0].scheduler.max_num_seqs == 1000
        assert each.hash == made.hash
    for key in keys:
        assert read_axis(f"{key}={number},2e3") == (key, [1000, 2000])


def test_what_is_not_whole_is_no_whole_number():
    for text in ("1.5", "15e-1", "1.00005e3"):
        with pytest.raises(ScenarioError, match=r"^[^\n]*workload.requests is a whole number; got [\d.]+$"):
            Scenario.default().with_set(f"workload.requests={text}")


def test_a_protocol_stands_in_the_place_of_arrivals_and_requests():
    from sim.scenario.workload import workload_of

    asked = {"protocol": "inferencex", "concurrency": 4, "prompt_tokens": 100, "output_tokens": 50}
    made = workload_of(Scenario(workload=asked))
    assert (made.concurrency, len(made)) == (4, 40)
    assert made.prompt_tokens.min() >= 80
    short = {**asked, "protocol": {"like": "inferencex", "requests_per_client": 2}}
    assert len(workload_of(Scenario(workload=short))) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 5}, "a protocol says who sends what when, so requests cannot be given too"),
        ({"concurrency": None}, "a protocol also needs concurrency"),
        (
            {"prompt_tokens": {"distribution": "uniform", "min_tokens": 1, "max_tokens": 2}},
            "is a number, the nominal length",
        ),
        ({"protocol": None}, "concurrency is the clients of a protocol"),
    ],
)
def test_what_a_protocol_does_not_go_with_is_said(change, message):
    asked = {"protocol": "inferencex", "concurrency": 4, "prompt_tokens": 100, "output_tokens": 50, **change}
    with pytest.raises(ScenarioError, match=message):
        Scenario(workload=asked)


def test_an_unknown_protocol_is_answered_with_the_nearest():
    from sim.scenario.workload import workload_of

    asked = {"protocol": "inferencx", "concurrency": 4, "prompt_tokens": 100, "output_tokens": 50}
    with pytest.raises(ScenarioError, match="did you mean inferencex"):
        workload_of(Scenario(workload=asked))


def test_scenarios_without_a_protocol_or_a_release_keep_their_names():
    assert Scenario().hash == Scenario(serving_release=None).hash
    assert Scenario(serving_release="0.12").hash != Scenario().hash


@pytest.mark.parametrize(
    ("stack", "scheduler"), [("vllm", "vllm"), ("sglang", "sglang"), ("trtllm", "trtllm"), ("ideal", "vllm")]
)
def test_a_scenario_without_a_scheduler_has_that_of_its_serving_stack(stack, scheduler):
    left_out, named = Scenario(serving_stack=stack), Scenario(serving_stack=stack, scheduler=scheduler)
    assert left_out.scheduler == named.scheduler
    assert left_out.hash == named.hash
    assert "scheduler" not in left_out.settings()
    # It follows the stack as long as nobody names another.
    assert Scenario().with_set(f"serving_stack={stack}").scheduler.policy == scheduler


def test_with_and_without_a_file_the_scheduler_is_the_same():
    assert Scenario.from_yaml("{}").scheduler == Scenario.default().scheduler


@pytest.mark.parametrize("section", ["slo", "memory", "window", "parallel", "decoding"])
def test_a_section_that_is_null_is_as_left_out(section):
    assert Scenario.from_mapping({section: None}) == Scenario()
    assert Scenario.default().with_set(f"{section}=null").settings().get(section) is None


PREFIX = {"groups": 1, "prompts_per_group": 1, "system_prompt_tokens": 4, "question_tokens": 3, "output_tokens": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graphs": {"siez": [8]}}, "cuda_graphs.siez is not a setting; did you mean sizes?"),
        ({"cuda_graphs": {"sizes": [8, 0]}}, "cuda_graphs.sizes.1 is a number at least 1; got 0"),
        ({"cuda_graphs": {"eager": True, "largest": 8}}, "cuda_graphs: a server without graphs (eager) has no sizes"),
        ({"experts": {"popularity": {"zipf": -1}}}, "experts.popularity.zipf is a number at least 0; got -1"),
        (
            {"failures": {"times": [{"machine": 0, "at": 1}]}},
            "failures.times.0.at is not a setting; did you mean at_s?",
        ),
        ({"prompt_balance": 3}, "prompt_balance is a mapping of settings (timeout_iters, batching_wait_iters); got 3"),
        (
            {"workload": {"shared_prefix": {**PREFIX, "stages": [{"rate_per_s": 1, "duration_s": 0.1}]}}},
            "workload.shared_prefix.stages.0: a stage sends at least one request; got 1/s for 0.1 s",
        ),
        (
            {"workload": {"servegen": {"arrivals": 3, "lengths": "b", "model": "c"}}},
            "workload.servegen.arrivals is text; got 3, a number: write '3'",
        ),
    ],
)
def test_mistakes_in_sections_that_rooms_define_are_told_like_those_in_others(settings, message):
    with pytest.raises(ScenarioError) as caught:
        Scenario.from_mapping(settings, source="my.yaml")
    assert str(caught.value).startswith(f"my.yaml: {message}")


def test_a_section_that_a_room_defines_is_its_object_and_is_written_as_it_was_given():
    scenario = Scenario(cuda_graphs={"sizes": [8, 16]})
    assert scenario.cuda_graphs == GraphSettings(sizes=(8, 16))
    assert scenario.settings() == {"cuda_graphs": {"sizes": [8, 16]}}
    assert scenario.resolved()["cuda_graphs"] == {
        "largest": None,
        "sizes": [8, 16],
        "eager": False,
        "decode_only": False,
    }
    assert Scenario.from_yaml(scenario.to_yaml()) == scenario
    assert scenario.with_set("cuda_graphs={eager: true}").cuda_graphs == GraphSettings(eager=True)


def test_random_scenarios_are_written_and_read_back_as_they_are():
    for seed in range(50):
        scenario = Scenario.from_mapping(draw(Random(seed)))
        assert Scenario.from_yaml(scenario.to_yaml()) == scenario
        for name in scenario.pools or ():
            scenario.pool(name)
