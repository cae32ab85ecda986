import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from sim import Scenario, simulate
from sim.plots import classes, latency, levels, runs, style
from sim.text import seconds_text


def test_ecdf_steps_at_the_values():
    x, share = latency.weighted_ecdf(
        lambda: [(np.array([3.0, 1.0]), np.array([1, 1])), (np.array([2.0]), np.array([2]))]
    )
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.75, 1.0]


def test_a_gathered_ecdf_stays_close_to_the_exact_one():
    values = np.random.default_rng(0).lognormal(0, 1, 50_000)
    x, share = latency.ecdf(values)
    exact = np.searchsorted(np.sort(values), x, side="right") / values.size
    assert np.abs(share - exact).max() < 0.002


def test_rates_spread_each_iteration_over_its_duration():
    """Within an interval, up to an edge, across edges, and out of the picture on either side."""
    edges = np.array([10.0, 20.0, 30.0, 40.0])
    start = np.array([12, 15, 18, 25, 0, 38, 50, 20])
    duration = np.array([3, 5, 20, 0, 15, 10, 4, 10])
    amount = np.array([6, 10, 40, 7, 30, 5, 9, 1])
    expected = np.zeros(3)
    for begin, lasts, much in zip(start, duration, amount, strict=True):
        lasts = max(lasts, 1)
        for i in range(3):
            inside = max(0.0, min(edges[i + 1], begin + lasts) - max(edges[i], begin))
            expected[i] += much * inside / lasts / 10 * 1e9
    (rate,) = levels.rate_per_s(edges, start, duration, amount)
    assert rate == pytest.approx(expected)


def test_an_ecdf_of_pieces_is_that_of_the_whole():
    values = np.random.default_rng(0).lognormal(0, 1, 50_000)
    pieces = [(part, np.ones(part.size)) for part in np.split(values, [10, 20_000, 20_000])]
    for mine, whole in zip(latency.weighted_ecdf(lambda: pieces), latency.ecdf(values), strict=True):
        assert np.array_equal(mine, whole)


def test_mean_level_integrates_the_counting_process():
    edges = np.array([0.0, 10.0, 20.0])
    level = levels.mean_level(edges, enter_ns=np.array([0, 5]), leave_ns=np.array([15, 20]))
    assert level.tolist() == pytest.approx([1.5, 1.5])


def test_rate_spreads_an_iteration_over_its_duration():
    edges = np.array([0.0, 1e9, 2e9, 3e9])
    starts, durations = np.array([0, 2_000_000_000]), np.array([2_000_000_000, 500_000_000])
    rate, other = levels.rate_per_s(edges, starts, durations, np.array([8, 3]), np.array([1, 1]))
    assert rate.tolist() == pytest.approx([4.0, 4.0, 3.0])
    assert other.tolist() == pytest.approx([0.5, 0.5, 1.0])


@pytest.mark.parametrize("least", [1, 10, 1000], ids=["runs in order", "of all but short ones", "one by one"])
@pytest.mark.parametrize("in_order", [False, True])
def test_rates_of_iterations_are_what_was_done_within_each_interval(monkeypatch, least, in_order):
    monkeypatch.setattr(levels, "_LEAST_IN_ORDER", least)
    rng = np.random.default_rng(3)
    edges = np.linspace(200.0, 900.0, 8)
    starts, durations, amounts = rng.integers(0, 1000, 300), rng.integers(0, 400, 300), rng.integers(0, 50, 300)
    starts = np.sort(starts) if in_order else starts
    lasting = np.maximum(durations, 1)
    inside = np.minimum(edges[1:, None], starts + lasting) - np.maximum(edges[:-1, None], starts)
    expected = (amounts * np.maximum(inside, 0) / lasting).sum(axis=1) / np.diff(edges) * 1e9
    assert levels.rate_per_s(edges, starts, durations, amounts)[0] == pytest.approx(expected)
    monkeypatch.setattr(levels, "_AT_ONCE", 70)
    parts = [(starts[at : at + 40], durations[at : at + 40], amounts[at : at + 40]) for at in range(0, 300, 40)]
    assert levels.rate_of_parts(edges, parts) == pytest.approx(expected)
    assert levels.rate_of_parts(edges, []).tolist() == [0.0] * 7


def test_lightened_axes_look_as_matplotlib_draws_them():
    def drawn(lightly: bool) -> tuple[set[str], np.ndarray]:
        """Its texts, and the picture without them."""
        values_s = np.random.default_rng(0).lognormal(0, 2, 500)
        figure = runs.latency_figure(
            ttft_s=values_s, e2el_s=values_s, itl_blocks=lambda: [], itl_quantiles_s=None, title="Latency"
        )
        if lightly:
            style.lighten(figure)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = {text.get_text() for text in figure.findobj(Text) if text.get_visible()}
        for text in figure.findobj(Text):
            text.set_visible(False)
        canvas.draw()
        return texts, np.asarray(canvas.buffer_rgba()).astype(int)

    (texts, light), (all_texts, plain) = drawn(True), drawn(False)
    # Where a line of the grid lies on a spine they differ a little; a line of the grid is 34 from white.
    assert np.abs(light - plain).max() <= 20
    assert texts <= all_texts
    assert {"0 %", "100 %", "share at or below", "latency, log scale", "1 s", "10 ms"} <= texts


@pytest.mark.parametrize(
    ("value_s", "text"), [(8.31e-3, "8.31 ms"), (1.2, "1.2 s"), (3e-5, "30 µs"), (1260.0, "21 min"), (0.0, "0 s")]
)
def test_seconds_are_written_for_people(value_s, text):
    assert seconds_text(value_s) == text


def test_the_panels_of_a_timeline_add_up_to_what_happened():
    second = 1_000_000_000
    requests = {
        "arrival_ns": np.array([0, 1, 2]) * second,
        "scheduled_ns": np.array([1 * second, 2 * second, -1]),
        "finish_ns": np.array([3 * second, 4 * second, -1]),
        "status": np.array([0, 0, 1]),
    }
    iterations = {
        "replica": np.array([0, 0, 1]),
        "lane": np.zeros(3, np.int64),
        "start_ns": np.array([1, 3, 2]) * second,
        "duration_ns": np.array([2, 1, 2]) * second,
        "prefill_tokens": np.array([200, 0, 50]),
        "emitted_tokens": np.array([1, 4, 2]),
        "kv_blocks_used": np.array([10, 30, 100]),
    }
    figure = runs.timeline_figure(
        requests=requests, iterations=lambda: [iterations], last_end_ns=-1, kv_blocks_total=[100, 200], title=""
    )
    drawn = {ax.get_ylabel(): ax.patches[0].get_data() for ax in figure.axes}
    total = {name: float((step.values * np.diff(step.edges)).sum()) for name, step in drawn.items()}
    assert total == pytest.approx(
        {
            "requests waiting": 1 + 1,
            "requests running": 2 + 2,
            # Shares of each replica's own blocks, in the mean of both.
            "KV blocks used, %": (2 * 10 + 1 * 30 + 2 * 50) / 2,
            "prompt tokens/s": 250,
            "output tokens/s": 7,
        },
        rel=1e-6,
    )


def test_marks_of_a_distribution_are_its_quantiles_in_order():
    figure = runs.latency_figure(
        ttft_s=np.array([0.1, 0.2, 0.3]),
        e2el_s=np.array([1.0, np.nan, 3.0]),
        itl_blocks=lambda: [(np.array([5_000_000, 9_000_000]), np.array([9, 1]))],
        itl_quantiles_s=[0.005, 0.006, 0.009],
        title="",
    )
    ttft, itl, e2el = (" ".join(ax.texts[0].get_text().split()) for ax in figure.axes)
    assert ttft == "p50 200 ms p90 280 ms p99 298 ms"
    assert itl == "p50 5 ms p90 6 ms p99 9 ms"
    assert e2el == "p50 2 s p90 2.8 s p99 2.98 s"


def test_each_class_is_drawn_against_its_own_limit():
    requests = {
        "arrival_ns": np.array([0, 0, 0, 0]),
        "first_token_ns": np.array([1, 3, 5, -1]) * 1_000_000_000,
        "class_index": np.array([0, 0, 1, 1]),
        "status": np.array([0, 0, 0, 1]),
    }
    declared = [{"name": "chat", "slo": {"ttft_s": 2.0}}, {"name": "batch", "slo": {"ttft_s": None}}]
    chat, batch = classes.classes_figure(requests=requests, classes=declared, title="").axes
    assert (chat.get_title(), batch.get_title()) == ("chat, 2: 50.0% in 2 s", "batch, 2")
    assert " ".join(batch.texts[0].get_text().split()) == "p50 5 s p90 5 s p99 5 s"
    assert ("limit" in chat.get_xlabel(), "limit" in batch.get_xlabel()) == (True, False)


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ({"trace": "conversation", "limit": 200}, "The deployment keeps up with its arrivals"),
        ({"arrivals": {"process": "closed_loop", "concurrency": 4}, "prompt_tokens": 9, "output_tokens": 9, "requests": 200},
         "Clients ask again when they are answered"),
    ],
)  # fmt: skip
def test_nobody_is_told_that_waiting_clients_are_kept_up_with(workload, says):
    result = simulate(Scenario.from_mapping({"scheduler": "vllm", "workload": workload}))
    assert result.summary["saturated"] is False
    assert runs._timeline_headline(result).startswith(says)
