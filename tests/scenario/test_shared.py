"""Workloads whose prompts share beginnings, and routers that ask for them, in scenarios."""

from __future__ import annotations

import pytest

from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.scenario.workload import workload_of

LOAD = (
    "{groups: 2, prompts_per_group: 2, system_prompt_tokens: 64, question_tokens: 32, output_tokens: 4, "
    "stages: [{rate_per_s: 5, duration_s: 2}, {rate_per_s: 10, duration_s: 1}]}"
)
TALK = "{sessions: 5, turns: 3, user_tokens: 20, answer_tokens: {distribution: uniform, min_tokens: 5, max_tokens: 9}}"


def scenario(text: str) -> Scenario:
    return Scenario.from_yaml(text, source="my.yaml")


def refused(text: str) -> str:
    with pytest.raises(ScenarioError) as error:
        workload_of(scenario(text))
    assert "\n" not in str(error.value)
    return str(error.value)


def notes(router: str, workload: str, rest: str = "replicas: 2") -> list[str]:
    made = resolve(scenario(f"router: {router}\nworkload: {workload}\n{rest}"))
    return [note for note in made.manifest["notes"] if note.startswith("The router")]


def test_a_load_of_groups_has_the_requests_of_its_stages() -> None:
    trace = workload_of(scenario(f"workload: {{shared_prefix: {LOAD}}}"))
    assert len(trace) == 20
    assert set(trace.prompt_tokens.tolist()) == {96}


def test_conversations_start_as_arrivals_say() -> None:
    trace = workload_of(
        scenario(f"workload: {{conversations: {TALK}, arrivals: {{process: deterministic, rate_per_s: 1}}}}")
    )
    assert len(trace) == 15
    assert trace.follows is not None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (
            f"{{shared_prefix: {LOAD}, requests: 5}}",
            "shared_prefix already says what is sent, so requests cannot be given too",
        ),
        (f"{{shared_prefix: {LOAD}, rate_scale: 2}}", "rate_scale does not reach stages"),
        (f"{{conversations: {TALK}}}", "say in arrivals when conversations start"),
        (f"{{conversations: {TALK}, shared_prefix: {LOAD}}}", "shared_prefix already says what is sent"),
        ("{shared_prefix: {groups: 2}}", "prompts_per_group"),
        (
            "{shared_prefix: {groups: 2, prompts_per_group: 2, system_prompt_tokens: 64, question_tokens: 32, output_tokens: 4, "
            "stages: []}}",
            "workload.shared_prefix.stages is a list of at least 1; got []",
        ),
        (
            f"{{conversations: {TALK}, arrivals: {{process: closed_loop, concurrency: 2}}}}",
            "workload.arrivals says when sessions start",
        ),
        (f"{{shared_prefix: {LOAD.replace('rate_per_s: 5', 'rate_per_s: 0.1')}}}", "at least one request"),
    ],
)
def test_what_does_not_go_together_is_refused(workload: str, says: str) -> None:
    assert says in refused(f"workload: {workload}")


def test_a_router_says_what_it_asks_in_vain() -> None:
    load = f"{{shared_prefix: {LOAD}}}"
    assert notes("prefix", load) == []
    assert (
        "does not say which prompts begin alike: it finds nothing"
        in notes("prefix", "{trace: conversation, limit: 9}")[0]
    )
    off = "replicas: 2\nmemory: {prefix_caching: false}"
    assert "none has a prefix cache: it finds nothing" in notes("llm_d", load, off)[0]
    assert "gain nothing there" in notes("{policy: llm_d, index: approximate}", load, off)[0]
    assert "the workload has none" in notes("session", load)[0]
    assert notes("prefix", "{trace: conversation, limit: 9}", "replicas: 1") == []


@pytest.mark.parametrize("wrap", ["shed", "reserve", "session"])
@pytest.mark.parametrize("inner", ["prefix", "llm_d", "dynamo", "session"])
def test_a_note_names_the_router_that_asks_and_not_the_one_around_it(wrap: str, inner: str) -> None:
    settings = {"shed": "", "reserve": "machines: 1, ", "session": ""}[wrap]
    said = notes(f"{{policy: {wrap}, {settings}inner: {inner}}}", "{trace: conversation, limit: 9}")
    asked = [inner, "session"] if wrap == "session" != inner else [inner]
    assert [note.split()[2] for note in said if " asks " in note] == asked


def test_blocks_of_an_index_within_another_router_are_refused_by_their_key() -> None:
    inner = "{policy: prefix, index: approximate, block_tokens: 24}"
    with pytest.raises(ScenarioError, match=r": router\.inner\.inner\.block_tokens: the trace's ids"):
        notes(f"{{policy: shed, inner: {{policy: session, inner: {inner}}}}}", f"{{shared_prefix: {LOAD}}}")


def test_blocks_of_an_index_that_fit_no_id_are_refused() -> None:
    with pytest.raises(
        ScenarioError, match=r"router\.block_tokens: the trace's ids stand for 16 tokens each and .* for 24"
    ):
        notes("{policy: prefix, index: approximate, block_tokens: 24}", f"{{shared_prefix: {LOAD}}}")


def test_a_session_router_wraps_another_by_name() -> None:
    made = resolve(
        scenario(
            "replicas: 2\nrouter: {policy: session, max_waiting: 3, inner: {policy: llm_d, queue: 1}}\n"
            "workload: {trace: conversation, limit: 9}"
        )
    )
    router = made.experiment.router
    assert (router.max_waiting, router.inner.queue) == (3, 1.0)  # type: ignore[attr-defined]


def test_scenarios_without_generators_keep_their_hash() -> None:
    plain = scenario("workload: {trace: conversation}")
    assert plain.hash == plain.with_set("workload.shared_prefix=null").hash
    assert scenario(f"workload: {{shared_prefix: {LOAD}}}").hash != plain.hash
