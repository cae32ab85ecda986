"""Classes of service in scenarios: drawn or read, held to their own limits, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim import Scenario, simulate
from sim.errors import ScenarioError
from sim.metrics.classes import jain, limits_of, service_tokens
from sim.plots.runs import _classes_headline
from sim.results import Result, fact_rows, group_rows
from sim.scenario.assembly import resolve
from tests.cli.test_run import rooftrace
from workloads import ServiceClass, Trace, concat, draw_classes, merge, predict_outputs, read_trace, with_classes

TRACE = """arrival_s,prompt_tokens,output_tokens,class,tenant
0.0,100,10,chat,a
0.1,200,20,batch,b
0.2,300,30,chat,b
"""
MIX = {
    "chat": {"share": 3, "priority": 0, "weight": 2.0, "slo": {"ttft_s": 0.5}},
    "batch": {"share": 1, "priority": 1, "tenant": "lab", "deadline_s": 60.0},
}


def scenario(tmp_path: Path | None = None, text: str = TRACE, **settings: Any) -> Scenario:
    """A short run; with *tmp_path* of the trace *text*."""
    workload: dict[str, Any] = {"trace": "conversation", "limit": 40}
    if tmp_path is not None:
        (tmp_path / "trace.csv").write_text(text)
        workload = {"trace": str(tmp_path / "trace.csv")}
    workload |= settings.pop("workload", {})
    return Scenario.from_mapping({"scheduler": "vllm", "workload": workload, **settings})


def workload_of(asked: Scenario) -> Trace:
    workload = resolve(asked).experiment.workload
    assert isinstance(workload, Trace)
    return workload


def test_a_mix_is_drawn_by_shares_from_a_stream_of_its_own() -> None:
    plain, mixed = workload_of(scenario()), workload_of(scenario(classes=MIX))
    for name in ("arrival_ns", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(mixed, name))
    assert mixed.class_index is not None
    assert mixed.priority is not None
    assert mixed.deadline_ns is not None
    np.testing.assert_array_equal(mixed.priority, mixed.class_index)
    np.testing.assert_array_equal(mixed.deadline_ns, np.where(mixed.class_index == 1, 60 * 10**9, -1))
    assert mixed.tenants == ("chat", "lab")
    many = draw_classes(
        Trace(arrival_ns=np.zeros(40_000), prompt_tokens=np.ones(40_000), output_tokens=np.ones(40_000)),
        [ServiceClass(name="x"), ServiceClass(name="y")],
        [3, 1],
        seed=5,
    )
    # Four standard deviations: a false alarm in 16,000, and the seed is fixed.
    assert many.class_index is not None
    assert abs(many.class_index.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 40_000)


def test_classes_and_tenants_of_a_trace_are_read_and_written_back(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TRACE)
    trace = read_trace(tmp_path / "a.csv")
    assert (trace.classes, trace.tenants) == (("chat", "batch"), ("a", "b"))
    assert trace.describe()["requests_of_class"] == {"chat": 2, "batch": 1}
    predict_outputs(trace, 0.0, 1).to_csv(tmp_path / "b.csv")
    back = read_trace(tmp_path / "b.csv")
    np.testing.assert_array_equal(back.class_index, trace.class_index)  # type: ignore[arg-type]
    np.testing.assert_array_equal(back.predicted_tokens, trace.output_tokens)  # type: ignore[arg-type]
    both = merge([trace, trace.take([1])])
    assert both.tenants == ("a", "b")
    assert sorted(both.class_index.tolist()) == [0, 0, 1, 1]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="traces with and without predicted_tokens cannot be joined"):
        concat([trace, back])


def test_a_predictor_s_error_is_log_normal_and_scales_the_same_luck() -> None:
    n = 20_000
    trace = Trace(arrival_ns=np.zeros(n), prompt_tokens=np.ones(n), output_tokens=np.full(n, 10**6))
    half, whole = (np.log(predict_outputs(trace, error, 3).predicted_tokens / 1e6) for error in (0.5, 1.0))  # type: ignore[operator]
    assert abs(whole.std() - 1.0) < 4 / np.sqrt(2 * n)
    assert abs(whole.mean()) < 4 / np.sqrt(n)
    np.testing.assert_allclose(half, whole / 2, atol=1e-4)


def test_a_class_is_held_to_its_own_limits_and_counted_apart(tmp_path: Path) -> None:
    tight = {"chat": {"slo": {"ttft_s": 1e-6}, "weight": 2.0}, "batch": {}}
    result = simulate(scenario(tmp_path, classes=tight, slo={"e2el_s": 100.0}))
    classes, tenants = result.summary["classes"], result.summary["tenants"]
    assert [classes[name]["requests"]["total"] for name in ("chat", "batch")] == [2, 1]
    assert (classes["chat"]["slo_attainment"], classes["batch"]["slo_attainment"]) == (0.0, 1.0)
    assert result.summary["slo_attainment"] == pytest.approx(1 / 3)
    assert (tenants["a"]["slo_attainment"], tenants["b"]["slo_attainment"]) == (0.0, 0.5)
    assert [name for name, _, _ in group_rows(result.summary)] == [
        *("class chat", "class batch", "tenant a", "tenant b"),
    ]
    assert "Jain's fairness" in dict(fact_rows(result.summary))
    assert set(result.requests) >= {"class_index", "tenant_index"}
    # Over a window as well.
    windowed = simulate(scenario(tmp_path, classes=tight, slo={"e2el_s": 100.0}, window={"from_s": 0.05}))
    assert windowed.summary["classes"]["chat"]["requests"]["total"] == 1
    assert windowed.summary["slo_attainment"] == pytest.approx(1 / 2)


def test_a_folder_keeps_classes_and_tenants(tmp_path: Path) -> None:
    from sim.results import Result

    result = simulate(scenario(tmp_path, classes={"chat": {}, "batch": {"weight": 3.0}}))
    back = Result.load(result.save(tmp_path / "out"))
    assert back.summary["classes"] == result.summary["classes"]
    assert [each["weight"] for each in back.manifest["classes"]] == [1.0, 3.0]


def test_service_is_counted_until_an_instant_and_shared_by_jain_s_index() -> None:
    requests = {
        "first_token_ns": np.array([10, 40, -1]),
        "finish_ns": np.array([30, 60, -1]),
        "prompt_tokens": np.array([100, 50, 7]),
        "emitted_tokens": np.array([5, 3, 0]),
    }
    # Half of the four later tokens of the first; all of it; and nothing of who never began.
    assert service_tokens(requests, 0, 20).tolist() == [103.0, 0.0, 0.0]
    assert service_tokens(requests, 20, 100).tolist() == [2.0, 53.0, 0.0]
    assert jain(np.array([1.0, 1.0, 1.0, 1.0])) == 1.0
    assert jain(np.array([4.0, 0.0, 0.0, 0.0])) == 0.25
    assert jain(np.zeros(3)) is None


def test_limits_of_requests_are_those_of_their_classes() -> None:
    classes = [{"slo": {"ttft_s": 0.5, "tpot_s": None, "e2el_s": None}}, {"slo": {"ttft_s": None}}]
    limits = limits_of({"class_index": np.array([1, 0])}, {"ttft_s": 9.0}, classes)
    assert {key: value.tolist() for key, value in limits.items()} == {"ttft_s": [np.inf, 0.5]}  # type: ignore[union-attr]


def test_limits_of_the_top_level_are_those_of_classes_that_say_nothing() -> None:
    asked = scenario(classes=MIX, slo={"ttft_s": 3.0, "tpot_s": 0.1})
    chat, batch = workload_of(asked).terms
    assert (chat.ttft_s, chat.tpot_s) == (0.5, 0.1)
    assert (batch.ttft_s, batch.first_token_ns) == (3.0, 3 * 10**9)


def test_a_scenario_without_classes_keeps_its_hash_and_its_run() -> None:
    assert scenario().hash == scenario(classes=None).hash != scenario(classes=MIX).hash
    plain, labelled = simulate(scenario()), simulate(scenario(classes={"only": {"share": 1}}))
    for name, column in plain.columns.requests.items():
        np.testing.assert_array_equal(column, labelled.columns.requests[name], err_msg=name)
    assert "classes" not in plain.summary


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": {"chat": {}}}, "the trace has requests of class batch, which is not declared; declared are chat"),
        ({"classes": MIX}, "the trace has a column class; leave out the shares"),
        (
            {"classes": {"chat": {"tenant": "x"}, "batch": {}}},
            "classes: the trace has a column tenant and class chat sets it as well",
        ),
        ({"classes": {}}, "classes: give at least one class"),
        ({"classes": {"chat": {"share": 1}, "batch": {}}}, "every class has a share, or none .* batch has none"),
        ({"classes": {"chat": {"weight": 0}}}, r"classes.chat.weight"),
        ({"classes": {"chat": {"prio": 1}}}, "priority"),
        ({"scheduler": {"policy": "keep_slo", "inner": "vllm"}}, "keep_slo goes by a class's limit of the first token"),
        (
            {"scheduler": {"policy": "order", "by": "shortest_predicted", "inner": "vllm"}},
            "needs a predictor; give workload.predictor",
        ),
    ],
)
def test_classes_that_do_not_fit_are_refused_in_a_sentence(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve(scenario(tmp_path, **settings))


def test_a_class_without_a_share_needs_a_trace_that_says_who_is_of_it() -> None:
    with pytest.raises(ScenarioError, match="give each a share, as the trace has no column class"):
        resolve(scenario(classes={"chat": {}}))
    with pytest.raises(
        ScenarioError, match="weighted_fair shares between tenants, and nobody says who sends a request"
    ):
        resolve(scenario(scheduler={"policy": "weighted_fair", "inner": "vllm"}))


def test_requests_of_closed_loop_clients_have_classes_and_predictions() -> None:
    loop = {"trace": "conversation", "limit": 40, "arrivals": {"process": "closed_loop", "concurrency": 2}}
    asked = scenario(
        classes=MIX,
        workload=loop | {"predictor": {"error": 0.5}},
        scheduler={"policy": "weighted_fair", "inner": "vllm"},
    )
    columns, timed = (
        simulate(asked).columns.requests,
        scenario(classes=MIX, workload={"trace": "conversation", "limit": 40}),
    )
    assert (columns["finish_ns"] > 0).all()
    classes = resolve(timed).experiment.workload.class_index
    assert classes is not None
    assert columns["class_index"].tolist() == classes.tolist()
    assert len(set((columns["predicted_tokens"] / columns["output_tokens"]).tolist())) > 5


def test_notes_say_what_of_classes_nobody_heeds(tmp_path: Path) -> None:
    def notes(asked: Scenario) -> str:
        return " ".join(resolve(asked).manifest["notes"])

    assert "the scenario says nothing of classes" in notes(scenario(tmp_path))
    assert "Requests have priorities and no scheduler asks for them" in notes(scenario(classes=MIX))
    assert "Classes have weights and no scheduler goes by them" in notes(scenario(classes=MIX))
    assert "Output lengths are predicted and no scheduler goes by it" in notes(
        scenario(workload={"predictor": {"error": 0.2}})
    )
    fair = {"policy": "weighted_fair", "inner": {"policy": "preempt", "inner": "vllm"}}
    assert "Classes have" not in notes(scenario(classes=MIX, scheduler=fair))
    assert "none preempts another" in notes(scenario(classes={"a": {"share": 1}}, scheduler=fair))
    shed = {"policy": "shed", "inner": "round_robin"}
    assert "The router shed is not asked" in notes(scenario(classes=MIX, router=shed))
    assert "The router shed goes by priority" in notes(scenario(replicas=2, router=shed))
    assert "The router" not in notes(scenario(classes=MIX, replicas=2, router=shed))
    reserve = {"policy": "reserve", "machines": 2, "inner": "least_outstanding"}
    assert "keeps 2 machines of 2" in notes(scenario(classes=MIX, replicas=2, router=reserve))


def test_classes_of_a_trace_keep_terms_in_their_order() -> None:
    trace = Trace(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1], class_index=[0], classes=("a",))
    with pytest.raises(ValueError, match="the trace has requests of class 'a', which is not declared"):
        with_classes(trace, [ServiceClass(name="b")])
    with pytest.raises(ValueError, match="class_index and classes go together"):
        Trace(arrival_ns=[0], prompt_tokens=[1], output_tokens=[1], class_index=[0])
    with pytest.raises(ValueError, match="weight of class a is a finite number above 0; got 0"):
        ServiceClass(name="a", weight=0)


def test_the_table_of_a_run_has_a_row_a_class(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "s.yaml").write_text("workload: {trace: trace.csv}\nclasses: {chat: {weight: 2}, batch: {}}\n")
    out = rooftrace("run", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert out.exit_code == 0
    assert "class chat" in out.stdout
    assert "tenant b" in out.stdout
    assert (tmp_path / "out" / "classes.png").stat().st_size > 10_000
    assert "within their limits" not in _classes_headline(Result.load(tmp_path / "out"))
    limited = simulate(scenario(classes={**MIX, "bulk": {"share": 1}}))
    kept = {name: each["slo_attainment"] for name, each in limited.summary["classes"].items()}
    assert (
        _classes_headline(limited)
        == f"Requests within their limits: chat {kept['chat']:.1%}, batch {kept['batch']:.1%}"
    )
    (tmp_path / "s.yaml").write_text("workload: {trace: trace.csv}\nclasses: {chat: {}}\n")
    refused = rooftrace("run", tmp_path / "s.yaml")
    assert refused.exit_code == 2
    assert "class batch, which is not declared" in refused.stderr
