import pytest

from sim import RooftraceError, Scenario
from sim.study.points import Sweep, check_key, content_key, load_sweep, read_axis

BASE = Scenario.default()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=256,512,1024", [256, 512, 1024]),
        ("a=0.5:2.0:7", [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]),
        ("a=1:9:5", [1, 3, 5, 7, 9]),
        ("a=0:1:11", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ("a=1:64:4:log", [1, 4, 16, 64]),
        ("a=0.01:1:3:log", [0.01, 0.1, 1.0]),
        ("a=-1:1:3", [-1, 0, 1]),
        ("a=h100-sxm, a100-80gb-sxm", ["h100-sxm", "a100-80gb-sxm"]),
        ("a={policy: vllm}, sarathi", [{"policy": "vllm"}, "sarathi"]),
        ("a=shortest:ShortestFirst, orca", ["shortest:ShortestFirst", "orca"]),
        ("a=1e3", [1000]),
        ("a=1e3:4e3:4", [1000, 2000, 3000, 4000]),
        ("a=1e3:1e6:4:log", [1000, 10_000, 100_000, 1_000_000]),
        ("a=null, fp8", [None, "fp8"]),
    ],
)
def test_an_axis_is_a_list_or_a_range(text, values):
    assert read_axis(text) == ("a", values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "expected key.path=VALUES"),
        ("=3", "expected key.path=VALUES"),
        ("a=", "expected key.path=VALUES"),
        ("a=1:2:1", "at least 2 values"),
        ("a=0:8:3:log", "above 0"),
        ("a=1,4:16:4", "neither a list with commas nor one range"),
        ("a=4:16", "neither a list with commas nor one range"),
        ("a={x", "not valid YAML"),
    ],
)
def test_an_axis_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(RooftraceError, match=message):
        read_axis(text)


@pytest.mark.parametrize(
    "key", ["replicas", "scheduler.token_budget", "workload.rate_scale", "memory.gpu_memory_utilization"]
)
def test_dotted_settings_are_known(key):
    check_key(key)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("replicsa", "did you mean replicas"),
        ("memory.gpu_memory_utilisation", "did you mean memory.gpu_memory_utilization"),
        ("replicas.n", "has none of its own"),
        ("meta.note", "is not a setting"),
    ],
)
def test_a_key_that_is_no_setting_is_refused_with_the_nearest(key, message):
    with pytest.raises(RooftraceError, match=message):
        Sweep(base=BASE, axes={key: [1]})


def test_points_are_every_combination_with_the_last_axis_fastest():
    sweep = Sweep(base=BASE, axes={"replicas": [1, 2], "scheduler.token_budget": [256, 512]})
    assert len(sweep) == 4
    assert [tuple(point.settings.values()) for point in sweep] == [(1, 256), (1, 512), (2, 256), (2, 512)]


def test_rows_of_a_file_are_points_and_meta_columns_go_along(tmp_path):
    file = tmp_path / "points.csv"
    file.write_text("\ufeffreplicas,router,meta.case,meta.site\n1,,base,007\n\n2,random,wide,12\n", encoding="utf-8")
    points = list(Sweep(base=BASE, points=file, axes={"workload.limit": [5]}))
    assert [point.settings for point in points] == [
        {"replicas": 1, "workload.limit": 5},
        {"replicas": 2, "router": "random", "workload.limit": 5},
    ]
    assert [point.meta for point in points] == [
        {"meta.case": "base", "meta.site": "007"},
        {"meta.case": "wide", "meta.site": 12},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("replicsa\n1\n", "did you mean replicas.*begin with meta."),
        ("replicas,replicas\n1,2\n", "named twice"),
        ("replicas,\n1,2\n", "without a name"),
    ],
)
def test_a_file_whose_header_is_wrong_is_refused(tmp_path, text, message):
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(RooftraceError, match=message):
        Sweep(base=BASE, points=tmp_path / "points.csv")


def test_a_row_with_too_many_cells_is_refused_with_its_line(tmp_path):
    (tmp_path / "points.csv").write_text("replicas\n1\n2,3\n")
    with pytest.raises(RooftraceError, match=r"line 3: 2 cells for 1 columns"):
        list(Sweep(base=BASE, points=tmp_path / "points.csv"))


def test_replications_share_their_seeds_with_every_other_point():
    sweep = Sweep(base=BASE.with_value("seed", 7), axes={"replicas": [1, 2]}, replications=3)
    seeds = [[run.scenario.seed for run in sweep.runs(point)] for point in sweep]
    assert seeds == [[7, 8, 9], [7, 8, 9]]
    assert len({run.key for point in sweep for run in sweep.runs(point)}) == 6


def test_seeds_cannot_vary_twice():
    with pytest.raises(RooftraceError, match="replications choose the seeds"):
        Sweep(base=BASE, axes={"seed": [1, 2]}, replications=2)


def test_a_point_that_is_no_scenario_keeps_its_error():
    (run,) = Sweep(base=BASE, axes={"replicas": [0]}).runs(next(iter(Sweep(base=BASE, axes={"replicas": [0]}))))
    assert run.scenario is None
    assert "replicas is a number at least 1" in run.error


def test_the_key_follows_the_content_not_the_way_it_was_written(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n")
    scenario = BASE.with_value("workload", {"trace": str(trace)})
    before = content_key(scenario)
    assert content_key(scenario.with_set("replicas=1").with_set("seed=0")) == before
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,11,2\n")
    assert content_key(BASE.with_value("workload", {"trace": str(trace)})) != before


def test_the_key_follows_the_code_of_a_policy_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "policy_of_mine.py").write_text("class Mine:\n    pass\n")
    scenario = BASE.with_set("scheduler=policy_of_mine:Mine")
    before = content_key(scenario)
    (tmp_path / "policy_of_mine.py").write_text("class Mine:\n    x = 1\n")
    assert content_key(scenario) != before


def test_a_sweep_file_holds_scenario_changes_axes_and_replications(tmp_path):
    (tmp_path / "base.yaml").write_text("replicas: 2\n")
    (tmp_path / "sweep.yaml").write_text(
        "scenario: base.yaml\nset: {workload.limit: 9}\nreplications: 2\n"
        "axes:\n  scheduler.token_budget: [256, 512]\n  workload.rate_scale: 0.5:1.5:3\n"
    )
    sweep = load_sweep(tmp_path / "sweep.yaml")
    assert isinstance(sweep, Sweep)
    assert (sweep.base.replicas, sweep.base.workload.limit, sweep.replications) == (2, 9, 2)
    assert sweep.axes == {"scheduler.token_budget": [256, 512], "workload.rate_scale": [0.5, 1.0, 1.5]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {replicas: [1]}\nreplication: 3\n", "did you mean replications"),
        ("axes: [1, 2]\n", "axes is a mapping"),
        ("axes: {replicsa: 1}\n", "sweep.yaml: replicsa is not a setting"),
        ("axes: {replicas: []}\n", "has no values"),
        ("points: 3\n", "CSV file or a list"),
        ("replications: 0\n", "at least 1"),
    ],
)
def test_a_sweep_file_that_is_wrong_is_refused(tmp_path, text, message):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(RooftraceError, match=message):
        load_sweep(tmp_path / "sweep.yaml")


def test_a_scenario_file_is_a_scenario(tmp_path):
    (tmp_path / "plain.yaml").write_text("replicas: 2\n")
    assert isinstance(load_sweep(tmp_path / "plain.yaml"), Scenario)


def test_a_range_in_a_sweep_file_needs_no_quotes(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("axes:\n  replicas: 1:9:5\n  workload.rate_scale: 0.5:1:2\n")
    assert load_sweep(file).axes == {"replicas": [1, 3, 5, 7, 9], "workload.rate_scale": [0.5, 1.0]}
    file.write_text("axes: {replicas: 4:16}")
    with pytest.raises(RooftraceError, match="nor one range FROM:TO:COUNT"):
        load_sweep(file)
    file.write_text("axes: {replicas: [1, 4:16]}")
    with pytest.raises(RooftraceError, match="a range stands alone"):
        load_sweep(file)


def test_a_range_in_a_row_is_refused(tmp_path):
    (tmp_path / "p.csv").write_text("replicas\n4:16\n")
    with pytest.raises(RooftraceError, match="a row holds one value of each"):
        list(Sweep(base=BASE, points=tmp_path / "p.csv"))
