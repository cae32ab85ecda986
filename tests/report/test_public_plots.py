"""Drawings, read back from the Axes."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from typer.testing import CliRunner

from sim import Scenario, plots, simulate, sweep
from sim.cli import build_app

TABLE = pd.DataFrame(
    {
        "workload.rate_scale": [0.5, 1.0, 2.0, 0.5, 1.0, 2.0],
        "replicas": [1, 1, 1, 2, 2, 2],
        "ttft_s.p99": [0.1, 0.2, np.nan, 0.05, 0.06, 0.07],
        "ttft_s.p99.half_width": [0.01, 0.02, np.nan, 0.01, 0.01, np.nan],
        "tpot_s.p99": [0.01, 0.02, 0.03, 0.01, 0.02, 0.03],
        "output_tokens_per_s": [100.0, 200, 240, 100, 200, 400],
        "saturated": [False, False, True, False, None, False],
    }
)


def axes():
    return plots.figure().subplots()


def test_every_column_has_a_label_with_its_unit():
    assert plots.label("ttft_s.p99") == "p99 time to first token, s"
    assert plots.label("output_tokens_per_s") == "output tokens/s"
    assert plots.label("meta.site_name") == "site name"


def test_lines_are_drawn_for_each_hue_with_error_bars_and_crosses_where_saturated():
    ax = axes()
    plots.lines(TABLE, ax, x="workload.rate_scale", y="ttft_s.p99", hue="replicas")
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["1", "2", "saturated"]
    drawn = ax.containers[0].lines[0]
    np.testing.assert_array_equal(drawn.get_xdata(), [0.5, 1.0, 2.0])
    np.testing.assert_array_equal(drawn.get_ydata(), [0.1, 0.2, np.nan])
    low, high = np.array(ax.containers[0].lines[2][0].get_segments()[0])[:, 1]
    assert (low, high) == pytest.approx((0.09, 0.11))
    crosses = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in crosses] == [[2.0]]
    assert ax.get_ylabel() == "p99 time to first token"
    assert ax.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("share", "values", "half_widths", "drawn"),
    [
        ("slo_attainment", [0.9, 0.1], [0.3, 0.2], [[0.6, 1.0], [0.0, 0.3]]),
        # Bandwidth beyond the one that a datasheet states.
        ("mbu", [1.02, 0.5], [0.01, 0.1], [[1.01, 1.02], [0.4, 0.6]]),
    ],
)
def test_intervals_of_shares_end_at_none_and_at_all(share, values, half_widths, drawn):
    ax = axes()
    table = pd.DataFrame({"x": [1, 2], share: values, f"{share}.half_width": half_widths})
    plots.lines(table, ax, x="x", y=share)
    (bars,) = ax.collections
    assert np.array([bar[:, 1] for bar in bars.get_segments()]) == pytest.approx(np.array(drawn))


def test_settings_that_begin_alike_and_numbers_that_are_near_have_a_line_each():
    """Their names differ too, so that no line joins the points of two settings."""
    drafted = [f'{{"method": "draft_model", "draft": {{"step_s": 0}}, "num_speculative_tokens": {k}}}' for k in (2, 4)]
    names = {
        "decoding": (drafted, [f"draft_model, num_speculative_tokens {k}" for k in (2, 4)]),
        "trace": ([f"{'a-folder/' * 6}{name}.csv" for name in "ab"],) * 2,
        "share": ([0.12341, 0.12344], ["0.12341", "0.12344"]),
    }
    for key, (values, shown) in names.items():
        table = TABLE.assign(**{key: [value for value in values for _ in range(3)]})
        for hue, along in ((key, "workload.rate_scale"), ("workload.rate_scale", key)):
            ax = axes()
            plots.lines(table, ax, x=along, y="tpot_s.p99", hue=hue)
            ticks = [text.get_text().replace("\n", "") for text in ax.get_xticklabels()]
            legend = [text.get_text() for text in ax.get_legend().get_texts()]
            assert (legend if hue == key else ticks) == [
                text if hue == key else text.replace(", ", ",") for text in shown
            ]
            assert all(len(set(line.get_xdata())) == len(line.get_xdata()) for line in ax.lines)
        made = plots.sweep_figures(table, [key, "workload.rate_scale"])
        assert any(shown[1] in text.get_text() for text in made["sweep-by-workload-rate-scale"].findobj(Text))


def test_texts_along_the_axis_keep_their_order():
    ax = axes()
    frame = pd.DataFrame({"hardware": ["h100", "a100"], "tpot_s.p99": [1.0, 2.0]})
    plots.lines(frame, ax, x="hardware", y="tpot_s.p99")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["h100", "a100"]
    assert ax.lines[0].get_linewidth() == 0.0, "there is nothing between two names"


def test_long_texts_along_the_axis_do_not_overlap():
    figure = plots.figure(3)
    ax = figure.subplots(1, 3)[0]
    names = [
        "vllm",
        *(f'{{"policy": "sarathi", "token_budget": {n}}}' for n in (512, 1024, 2048)),
        "my_module:MyScheduler",
    ]
    plots.lines(pd.DataFrame({"scheduler": names, "tpot_s.p99": 1.0}), ax, x="scheduler", y="tpot_s.p99")
    figure.canvas.draw()
    boxes = [tick.get_window_extent() for tick in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_throughput_and_latency_are_joined_along_the_load():
    ax = axes()
    plots.throughput_latency(TABLE.iloc[::-1], ax, hue="replicas")
    np.testing.assert_array_equal(ax.lines[-2].get_xdata(), [100, 200, 400])


def test_a_heat_map_says_its_numbers_and_its_verdicts():
    ax = axes()
    plots.heatmap(TABLE, ax, x="workload.rate_scale", y="replicas", value="ttft_s.p99")
    assert [text.get_text() for text in ax.texts] == ["100 ms", "200 ms", "sat.", "50 ms", "60 ms", "70 ms"]
    with pytest.raises(ValueError, match="share one cell"):
        plots.heatmap(TABLE.drop(columns="replicas").assign(one=1), axes(), x="one", y="one", value="ttft_s.p99")


def test_the_pareto_front_is_a_line_through_what_is_not_beaten():
    frame = pd.DataFrame({"tokens_per_s_per_user": [10, 20, 15], "tokens_per_s_per_gpu": [100, 50, 60]})
    ax = axes()
    plots.pareto(frame, ax)
    front = ax.lines[-1]
    assert front.get_label() == "Pareto front"
    assert front.get_xdata().tolist() == [10, 15, 20]


def test_candidates_that_miss_the_slo_are_hollow_and_not_on_the_front():
    frame = pd.DataFrame(
        {
            "tokens_per_s_per_user": [10, 20, 15],
            "tokens_per_s_per_gpu": [100, 50, 60],
            "keeps": [False, True, True],
            "pools.a.replicas": [1, 2, 3],
        }
    )
    ax = axes()
    plots.pareto(frame, ax, named=["pools.a.replicas"])
    full, hollow, _, front = ax.lines
    assert front.get_xdata().tolist() == [15, 20]
    assert full.get_xdata().tolist() == [20, 15]
    assert (hollow.get_xdata().tolist(), hollow.get_markerfacecolor()) == ([10], "none")
    assert "misses the SLO" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert [text.get_text() for text in ax.texts] == ["1", "2", "1: a.replicas 3\n2: a.replicas 2"]
    # Where none keeps it, the front is that of all.
    ax = axes()
    plots.pareto(frame.assign(keeps=False), ax)
    assert ax.lines[-1].get_xdata().tolist() == [10, 15, 20]


def test_points_of_the_front_that_are_too_near_for_a_number_each_share_a_label():
    frame = pd.DataFrame(
        {
            "tokens_per_s_per_user": [100, 50.0, 50.1, 50.2, 20, 20.1],
            "tokens_per_s_per_gpu": [1, 50.2, 50.1, 50, 90.1, 90],
        }
    )
    ax = axes()
    plots.pareto(frame, ax, named=["tokens_per_s_per_gpu"])
    assert [text.get_text() for text in ax.texts[:-1]] == ["1, 2", "3 to 5", "6"]


def test_speedup_draws_points_over_theory():
    theory = pd.DataFrame({"alpha": [0.8] * 3, "k": [1, 2, 3], "speedup": [1.5, 1.8, 2.0]})
    ax = axes()
    plots.speedup(theory.assign(**{"speedup.half_width": 0.1}), ax, theory=theory)
    assert ax.get_xlabel() == "drafted tokens K"
    assert ax.lines[0].get_ydata().tolist() == [1.5, 1.8, 2.0]


def test_a_roofline_bends_at_the_ridge():
    work = pd.DataFrame(
        {"name": ["decode", "prefill"], "flops": [1e12, 1e15], "bytes": [1e12, 1e12], "seconds": [0.5, 2]}
    )
    ax = axes()
    plots.roofline(work, ax, peak_flops_per_s=1e15, peak_bytes_per_s=2e12)
    x, y = ax.lines[0].get_data()
    assert y.max() == pytest.approx(1000)
    assert np.interp(250, x, y) == pytest.approx(500, rel=0.01)
    assert ax.lines[1].get_ydata()[0] == pytest.approx(2)


def test_unknown_columns_and_too_many_lines_are_refused():
    with pytest.raises(ValueError, match=r"did you mean ttft_s\.p99"):
        plots.lines(TABLE, axes(), x="replicas", y="ttft_s.p9")
    many = pd.DataFrame({"x": range(9), "y": range(9), "h": range(9)})
    with pytest.raises(ValueError, match="8 lines are the most"):
        plots.lines(many, axes(), x="x", y="y", hue="h")


def test_equal_figures_are_equal_files(tmp_path):
    written = []
    for name in ("a", "b"):
        figure = plots.figure()
        plots.lines(TABLE, figure.subplots(), x="workload.rate_scale", hue="replicas")
        written.append([path.read_bytes() for path in plots.save(figure, tmp_path / name)])
    assert written[0] == written[1]
    assert written[0][0].startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = Scenario.default().with_set("workload.limit=30")
    folder = tmp_path_factory.mktemp("plots")
    simulate(base).save(folder / "run")
    sweep(base, axes={"workload.rate_scale": [0.5, 1, 2], "replicas": [1, 2]}, out=folder / "sweep", jobs=1)
    return folder


def test_the_command_draws_a_run_and_a_figure_of_a_sweep(folders, tmp_path):
    run = CliRunner().invoke(build_app(), ["plot", str(folders / "run"), "--out", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"latency-distributions.png", "over-time.svg"}
    one = CliRunner().invoke(
        build_app(),
        ["plot", str(folders / "sweep"), "--x", "replicas", "--y", "e2el_s.mean", "--hue", "workload.rate_scale"],
    )
    assert "e2el-s-mean-by-replicas.png" in one.stdout
    assert (folders / "sweep-plots" / "e2el-s-mean-by-replicas.svg").is_file()


def test_a_sweep_over_two_numbers_has_lines_a_load_curve_and_a_heat_map():
    names = {"sweep-by-workload-rate-scale", "throughput-latency", "heatmap-ttft-s-p99"}
    assert set(plots.sweep_figures(TABLE, ["workload.rate_scale", "replicas"])) == names


@pytest.mark.slow(reason="every picture of a sweep is drawn")
def test_the_command_draws_all_of_a_sweep(folders, tmp_path):
    swept = CliRunner().invoke(build_app(), ["plot", str(folders / "sweep"), "--out", str(tmp_path / "s")])
    names = {Path(line).name for line in swept.stdout.split()}
    assert names >= {"sweep-by-workload-rate-scale.png", "throughput-latency.svg", "heatmap-ttft-s-p99.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--y", "ttft_s.p98"], "did you mean"),
        (["run", "--x", "replicas"], "holds one run"),
        (["nowhere"], "nowhere does not exist; give the folder of a run or a sweep"),
    ],
)
def test_what_cannot_be_drawn_is_refused(folders, arguments, message):
    done = CliRunner().invoke(build_app(), ["plot", str(folders / arguments[0]), *arguments[1:]])
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_latencies_of_groups_are_lines_of_one_picture():
    frame = pd.DataFrame({"ttft_s": [0.1, 0.2, 0.3, 1.0, 2.0, np.nan], "stack": [*"aaa", *"bbb"]})
    ax = axes()
    plots.latency_cdf(frame, ax, column="ttft_s", hue="stack")
    a, b = ax.get_lines()
    assert a.get_xdata().tolist() == [0.1, 0.2, 0.3]
    assert b.get_ydata().tolist() == [0.5, 1.0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.get_xlabel() == "time to first token, log scale"


def test_public_pictures_are_what_they_are_called():
    for name in plots.__all__:
        assert callable(getattr(plots, name)) or name.isupper(), name


def test_a_gantt_chart_says_what_its_colours_and_its_axis_mean():
    scenario = Scenario.default().with_set("workload.limit=20").with_set("parallel.pipeline=2")
    ax = axes()
    replica = simulate(scenario).columns.replicas[0]
    plots.gantt(replica, ax, begin_s=0.0, end_s=0.5)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["prompt only", "prompt and decodes", "decodes only", "bubble"]
    assert ax.get_xlabel() == "time, s"
    with pytest.raises(ValueError, match="end_s is after begin_s"):
        plots.gantt(replica, ax, begin_s=0.5, end_s=0.5)


def test_tokens_and_requests_of_a_run_count_time_from_one_instant():
    iterations = pd.DataFrame(
        {"start_ns": [3_000_000_000], "duration_ns": [1_000_000_000], "prefill_tokens": [50], "emitted_tokens": [0],
         "replica": [0], "lane": [0]}
    )  # fmt: skip
    ax = axes()
    plots.throughput(iterations, ax, bins=3, arrival_ns=1_000_000_000)
    assert ax.get_xlabel() == "time since the first arrival, s"
    np.testing.assert_allclose(ax.patches[0].get_data().values, [0, 0, 50])
    ax = axes()
    plots.throughput(iterations, ax, bins=3)
    assert ax.get_xlabel() == "time since the first iteration, s"


def test_a_point_without_an_interval_has_no_bar_of_length_zero():
    ax = axes()
    frame = pd.DataFrame({"k": [1.0, 2.0], "v": [1.0, 2.0], "v.half_width": [0.1, np.nan]})
    plots.lines(frame, ax, x="k", y="v")
    low_caps = ax.containers[0].lines[1][0].get_ydata()
    assert low_caps[0] == pytest.approx(0.9)
    assert np.isnan(low_caps[1])


@pytest.mark.parametrize("which", ["x", "y", "hue"])
def test_a_column_that_a_sweep_lacks_is_named_in_one_sentence(which):
    with pytest.raises(ValueError, match=r"replcias is not a column; did you mean replicas"):
        plots.sweep_figures(TABLE, ["workload.rate_scale", "replicas"], **{which: "replcias"})
