"""Terms that overheads.toml calls fitted: inside the bounds of its fit, moved by its data, and fitted to nothing left out."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hwmodels.measured import read
from hwmodels.model import load_model
from hwmodels.overheads import serving_stack, serving_stacks, stack_releases
from hwmodels.serving_intervals import QUANTITIES, kind_of, serving_interval
from sim.bench.published.rows import rows_of
from sim.validation.fit_kinds import Error, farther, written
from sim.validation.fit_stacks import (
    EAGER,
    LEVEL,
    RELEASED,
    SERVED,
    START,
    Point,
    _eager_points,
    apart,
    as_they_stand,
    behind,
    fit_what_matters,
    fold_of,
    held_of,
    held_without,
    left_out,
    limits,
    on_bound,
    predict,
    predict_and_slopes,
    served_points,
    stretch_of,
    tail_of,
    ways,
    with_terms,
    write_intervals,
)
from tests.validate.test_validate import DENSE, row_of

STACKS = [name for name, stack in serving_stacks().items() if name != "ideal" and stack.engine == name]
VERSIONS = [(name, release) for name in STACKS for release in stack_releases()[name]]


def fitted_terms(stack):
    return tuple(term for term, source in stack.sources.items() if source.startswith("fitted"))


@pytest.mark.parametrize(("name", "release"), VERSIONS)
def test_nothing_fitted_lies_on_a_bound_of_its_fit(name, release):
    names = EAGER if name == "eager" else SERVED
    stack = stack_releases()[name][release]
    terms = fitted_terms(stack)
    assert terms
    for term in terms:
        low, high = limits(names)[term]
        assert on_bound(term, getattr(stack.overheads, term), low, high) == "", term


@pytest.mark.parametrize(("name", "release"), VERSIONS)
def test_every_term_says_what_it_is_and_a_fitted_one_is_one_that_the_fit_has(name, release):
    offered = EAGER if name == "eager" else [term for term in SERVED if term not in ways()[name].given]
    stack = stack_releases()[name][release]
    for term, source in stack.sources.items():
        assert re.match(r"fitted to|derived, not fitted|taken from", source), source
        assert (term in offered) == source.startswith("fitted"), term
    assert all(getattr(stack.overheads, term) == 0.0 for term in ways()[name].not_offered)


@pytest.mark.parametrize("name", [name for name in STACKS if name != "eager"])
def test_older_releases_differ_in_nothing_but_what_releases_have_of_their_own(name):
    newest, *older = stack_releases()[name].values()
    for stack in older:
        moved = {term for term in SERVED if getattr(stack.overheads, term) != getattr(newest.overheads, term)}
        assert moved <= set(RELEASED)
        assert stack.fitted_to != newest.fitted_to


@pytest.mark.parametrize(("value", "side"), [(0.0, "low"), (0.019, "low"), (0.03, ""), (1.97, ""), (1.99, "high")])
def test_a_bound_is_touched_within_a_hundredth_of_the_range(value, side):
    assert on_bound("sustained_loss", value, 0.0, 2.0) == side


@pytest.mark.parametrize("name", STACKS)
def test_the_fit_moves_all_that_is_called_fitted(name, shared):
    folder = shared / "measured2"
    stack = serving_stack(name)
    if name == "eager":
        points = _eager_points(folder)[::9]
    else:
        rows = [point for point in served_points(folder, name) if point.release == stack.release]
        four = [point for point in rows if "gpt-oss" in point.row["model_path"]] or rows
        eight = [point for point in rows if str(point.row["gemm_quant_mode"]).startswith("fp8")]
        some = ((four[0], 2048.0, 1.0), (four[0], 64.0, 1.0), (eight[0], 2048.0, 1.0), (eight[0], 2048.0, 8.0))
        # Latent attention is DeepSeek's.
        some = (*some, *[(point, 2048.0, 1.0) for point in rows if "DeepSeek" in point.row["model_path"]][:1])
        points = [replace(point, row={**point.row, "isl": isl, "osl": 4.0, "concurrency": n}) for point, isl, n in some]
    terms = fitted_terms(stack)
    steps = {term: 0.1 * getattr(stack.overheads, term) for term in terms}
    moved = np.nanmax(np.abs([predict_and_slopes(point, stack, steps)[1:] for point in points]), axis=(0, 2))
    assert {term: float(most) for term, most in zip(terms, moved, strict=True) if not most > 1e-4} == {}


def by_differences(predict):
    """Slopes of *predict* by pricing each point again."""

    def price(points, versions, steps):
        found = np.full((len(points), 1 + len(steps), 2), np.nan)
        for i, point in enumerate(points):
            stack = behind(point, versions)
            found[i, 0] = predict(point, stack)
            for k, (term, step) in enumerate(steps.items()):
                own = stack.overheads
                moved = replace(stack, overheads=replace(own, **{term: getattr(own, term) + step}))
                found[i, 1 + k] = np.log(np.array(predict(point, moved)) / found[i, 0])
        return found

    return price


RANKED = "openai/gpt-oss-120b,b200_sxm,trtllm,,fp4,nvfp4,nvfp4,agg,1024,1024,32,8,1,1,4,4,1,121.7,3.48,,x\n"
"""Attention on four ranks."""


@pytest.mark.parametrize(
    ("row", "clients"),
    [
        (RANKED, "8"),
        pytest.param(RANKED, "3", marks=pytest.mark.slow(reason="several replays")),
        (DENSE, "4"),
    ],
)
def test_slopes_on_a_frozen_schedule_are_those_of_another_replay(row, clients):
    row = row_of(row) | {"osl": "64", "concurrency": clients}
    point = Point(row=row, measured_s=(0.01, 0.09), group="x")
    stack = serving_stack(row["backend"])
    if row["backend"] == "trtllm":
        # A long admission outlasts the steps that it began in, so that which of them a request sees is not the same again.
        none = dict.fromkeys(("admission_s", "admission_s_per_token", "admission_serial_s"), 0.0)
        stack = replace(stack, overheads=replace(stack.overheads, **none))
    steps = {"step_s": 2e-5, "sequence_s": 1e-6, "sustained_loss": 0.02}
    again = by_differences(predict)([point], {stack.release: stack}, steps)[0]
    assert predict_and_slopes(point, stack, steps) == pytest.approx(again, rel=0.05, abs=2e-4)


def made_of(truth):
    """Points whose measured TPOT is a hundredth of a second and what *truth* adds, and how they are priced."""

    def seconds(_point, stack):
        return (stack.overheads.step_s + 1e-2 + stack.overheads.sequence_s, 0.1)

    newest, *older = truth
    points = [Point(row={}, measured_s=seconds(None, truth[newest]), group=str(n), release=newest) for n in range(4)]
    points += [
        Point(row={}, measured_s=seconds(None, truth[each]), group=each, release=each)
        for each in older
        for _ in range(4)
    ]
    return points, by_differences(seconds)


def ideal(**terms):
    stack = replace(serving_stack("ideal"), name="vllm")
    return replace(stack, overheads=replace(stack.overheads, **terms))


def test_a_fit_leaves_out_what_its_data_put_on_zero_and_refuses_a_bound_above(capsys):
    points, price = made_of({"1": ideal(step_s=1e-3)})
    fitted = fit_what_matters(points, {"1": ideal()}, ("step_s",), price, rounds=30)
    assert fitted.names == ("step_s",)
    assert fitted.versions["1"].overheads.step_s == pytest.approx(1e-3, rel=1e-3)
    faster = [replace(point, measured_s=(9e-3, 0.1)) for point in points]
    fitted = fit_what_matters(faster, {"1": ideal()}, ("step_s",), price, rounds=30)
    assert (fitted.versions["1"].overheads.step_s, fitted.names) == (0.0, ())
    assert "put step_s on zero: left out" in capsys.readouterr().out
    slower = [replace(point, measured_s=(9e-1, 0.1)) for point in points]
    with pytest.raises(ValueError, match="vllm: step_s ends on its upper bound"):
        fit_what_matters(slower, {"1": ideal()}, ("step_s",), price, rounds=60)


def test_a_release_has_terms_of_its_own_and_a_part_of_the_points_is_fitted_without_the_rest():
    points, price = made_of({"2": ideal(step_s=1e-3), "1": ideal(step_s=4e-3)})
    start = {"2": ideal(), "1": ideal()}
    fitted = fit_what_matters(points, start, ("step_s", "1/step_s"), price, rounds=30)
    assert fitted.versions["2"].overheads.step_s == pytest.approx(1e-3, rel=1e-2)
    assert fitted.versions["1"].overheads.step_s == pytest.approx(4e-3, rel=1e-2)
    other = [replace(point, measured_s=(0.013, 0.1)) if i < 2 else point for i, point in enumerate(points)]
    mixed = fit_what_matters(other, start, ("step_s", "1/step_s"), price, rounds=30)
    without = mixed.refit(np.array([i >= 2 for i in range(len(other))]))
    assert without["2"].overheads.step_s == pytest.approx(1e-3, rel=0.1)


def test_terms_that_stand_move_by_what_a_part_of_the_points_is_worth():
    points, price = made_of({"1": ideal(step_s=1e-3)})
    standing = as_they_stand(points, {"1": ideal(step_s=2e-3)}, ("step_s", "sequence_s"), price)
    assert standing.names == ("step_s",)
    assert standing.versions["1"].overheads.step_s == 2e-3
    everything = np.ones(len(points), bool)
    assert standing.refit(everything)["1"].overheads.step_s == pytest.approx(2e-3)
    # One point that took longer pulls what stands up by no more than it pulls the least of all.
    slow = [replace(points[0], measured_s=(0.0125, 0.1)), *points[1:]]
    standing = as_they_stand(slow, {"1": ideal(step_s=2e-3)}, ("step_s",), price)
    without = standing.refit(np.array([False, True, True, True]))["1"].overheads.step_s
    assert 1e-3 < without < 2e-3


def test_a_term_that_releases_share_is_set_in_all_of_them():
    found = with_terms({"2": ideal(), "1": ideal()}, {"sustained_loss": 0.5, "step_s": 1e-3, "1/admission_s": 0.02})
    assert [each.overheads.sustained_loss for each in found.values()] == [0.5, 0.5]
    assert [each.overheads.step_s for each in found.values()] == [1e-3, 0.0]
    assert [each.overheads.admission_s for each in found.values()] == [0.0, 0.02]


def test_parts_of_the_deployments_do_not_follow_their_names():
    folds = [fold_of(f"model|{n}") for n in range(400)]
    assert set(folds) == {0, 1, 2, 3, 4}
    assert min(folds.count(part) for part in set(folds)) > 50


def test_no_row_with_speculation_informs_a_fit(shared):
    folder = shared / "measured2"
    told = rows_of(read(folder / "e2e_silicon_speculative_agg.csv"))
    assert all(left_out(row) for row in told)
    rows = rows_of(read(folder / "e2e_silicon_agg.csv"))
    strange = [row for row in rows if left_out(row)]
    assert {(row["model_path"], row["backend"]) for row in strange} == {
        (model, stack) for stack, way in ways().items() for model in way.strange
    }
    assert len(strange) == 34
    assert sum(len(served_points(folder, name)) for name in ("vllm", "trtllm", "sglang")) == len(rows) == 1008


def test_an_interval_is_judged_on_deployments_that_it_was_not_taken_from():
    rng = np.random.default_rng(0)
    groups = [str(n // 4) for n in range(400)]
    ratios = rng.normal(0.0, 0.1, 400)
    assert held_without(groups, ratios) == pytest.approx(0.9, abs=0.03)
    # One deployment alone, far off, is in nobody else's interval.
    ratios[:4] = 9.0
    assert held_without(groups[:8], ratios[:8]) <= 0.5


def test_an_interval_widens_where_model_or_device_is_a_stranger(tmp_path, monkeypatch):
    from hwmodels import serving_intervals

    widths = {"deployment": [0.8, 1.1], "model": [0.6, 1.0], "device": [0.9, 1.65], "held": 0.9}
    entry = {"rows": 12, "models": ["known"], "devices": ["here"], "tpot_s": widths, "ttft_s": widths}
    path = tmp_path / "intervals.toml"
    write_intervals({"vllm": entry}, path)
    write_intervals({"sglang": entry}, path)
    monkeypatch.setattr(serving_intervals, "FILE", path)
    monkeypatch.setattr(serving_intervals, "KINDS", tmp_path / "kinds.toml")
    of_all = {"kinds": ["dense fp8"], "tpot_s": (0.85, 1.05), "ttft_s": (0.7, 1.0)}
    farther = {"tpot_s": (0.9, 1.5), "ttft_s": (0.4, 1.2)}
    (tmp_path / "kinds.toml").write_text(written({"vllm": of_all, "sglang": of_all, "any": farther}))
    serving_intervals._table.cache_clear()
    serving_intervals._kinds.cache_clear()
    try:
        found = {
            pair: serving_interval("vllm", *pair)
            for pair in (("known", "here"), ("new", "here"), ("known", "there"), ("new", "there"))
        }
        assert found["known", "here"].tpot == (0.8, 1.1)
        # Never narrower: 1.0 above is that of deployments.
        assert found["new", "here"].tpot == pytest.approx((0.6, 1.1))
        # All rows, at any load, lie farther out than those that were held back.
        assert found["known", "there"].ttft == pytest.approx((0.7, 1.65))
        assert found["new", "there"].tpot == pytest.approx((0.6, 1.65))
        assert found["new", "there"].basis == "12 rows of vllm whose model and device no fit had seen"
        assert serving_interval("eager", "known", "here") is None
        assert serving_interval("vllm", "known", "here", kind="tpu") is None
        lent = serving_interval("vllm", "known", "there", loan=(0.5, 2.0))
        assert lent.tpot == pytest.approx((0.4, 3.3))
        assert lent.basis.endswith("no fit had seen, times 0.5 to 2 for kernels that were not measured on there")
        # An end that would narrow it does not count.
        assert serving_interval("vllm", "known", "here", loan=(1.2, 0.9)).tpot == (0.8, 1.1)
        assert serving_interval("sglang", "known", "here").facts["tpot_s"] == [0.8, 1.1]
        assert serving_interval("vllm", "known", "here", model_kind="dense fp8") == found["known", "here"]
        strange = serving_interval("vllm", "known", "here", model_kind="hybrid bf16")
        assert (*strange.tpot, *strange.ttft) == pytest.approx((0.72, 1.65, 0.28, 1.32))
        assert strange.basis.endswith("no fit had seen, wider since no row is of hybrid models in bf16")
    finally:
        serving_intervals._table.cache_clear()
        serving_intervals._kinds.cache_clear()


def test_every_stack_with_intervals_says_of_which_kinds_its_runs_are():
    from hwmodels.serving_intervals import ANY, _kinds, _table

    kinds = _kinds()
    assert set(kinds) == {*_table(), ANY}
    for quantity in QUANTITIES:
        assert kinds[ANY][quantity][0] <= 1 <= kinds[ANY][quantity][1]
    assert kind_of(load_model("llama-3.1-8b")) in kinds["vllm"]["kinds"]
    assert kind_of(load_model("qwen3-next-80b-a3b")) == "hybrid bf16"
    assert kind_of(load_model("gpt-oss-20b")) == "experts fp4"
    assert kind_of(load_model("deepseek-v3")) == "latent fp8"


def test_the_architecture_that_lies_farthest_out_says_how_much_an_unknown_one_needs():
    def rows(architecture, ratios):
        return [Error(stack="a", architecture=architecture, kind="", ratio=(ratio, 1.0)) for ratio in ratios]

    even, far = np.linspace(0.9, 1.1, 201), np.linspace(1.8, 2.2, 201)
    # Of the even ones 90 % lie within 0.91 to 1.09, of the far ones within 1.82 to 2.18.
    low, high = farther([*rows("dense", even), *rows("experts", far)], 0)
    assert (low, high) == pytest.approx((0.91 / 1.82, 2.18 / 1.09), rel=1e-3)
    assert farther([*rows("dense", even), *rows("experts", even)], 0) == pytest.approx((1.0, 1.0))
    # Too few rows of one, or one alone, say nothing.
    assert farther([*rows("dense", even), *rows("experts", far[:5])], 0) == (1.0, 1.0)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_intervals_of_each_stack_hold_nine_rows_in_ten_that_were_held_back(quantity):
    from hwmodels.serving_intervals import _table

    assert {
        name: entry[quantity]["held"] for name, entry in _table().items() if not 0.87 <= entry[quantity]["held"] <= 0.93
    } == {}


def test_an_interval_of_few_deployments_leaves_less_out_than_five_percent_on_either_side():
    rng = np.random.default_rng(0)
    # A deployment's rows lie together: a dozen of them say less of another than as many rows do.
    groups = [str(n // 12) for n in range(144)]
    ratios = np.repeat(rng.normal(0.0, 0.3, 12), 12) + rng.normal(0.0, 0.05, 144)
    assert held_without(groups, ratios) < LEVEL
    tail = tail_of(groups, ratios)
    assert tail < 5.0
    assert tail == 0.0 or held_without(groups, ratios, tail) >= LEVEL
    # Rows that know nothing of each other need no less.
    assert tail_of([str(n) for n in range(2000)], rng.normal(0.0, 0.3, 2000)) > 4.0


def test_the_share_that_is_held_is_of_deployments_that_neither_ends_nor_tail_were_taken_from():
    groups = [str(n // 10) for n in range(200)]
    even = np.tile(np.linspace(-0.1, 0.1, 10), 20)
    assert held_of(groups, even) == pytest.approx(1.0)
    assert held_of(groups, np.where(np.arange(200) < 10, 9.0, even)) == pytest.approx(0.95)


def test_of_few_models_an_interval_is_stretched_until_it_holds_nine_rows_in_ten_of_another():
    rng = np.random.default_rng(1)
    for _ in range(6):
        # The farthest of six models has 40 of 240 rows, which the other five cannot hold.
        groups = [str(n // 40) for n in range(240)]
        ratios = np.repeat(rng.normal(0.0, 0.3, 6), 40) + rng.normal(0.0, 0.1, 240)
        ratios[::30] = np.nan
        far, stretch = apart(groups, ratios), stretch_of(groups, ratios)
        assert stretch == 1.0 or 0.9 <= (far <= stretch).mean() < 0.93
        assert (stretch == 1.0) == (held_of(groups, ratios) >= LEVEL)


@pytest.mark.parametrize("name", ["vllm", "trtllm", "sglang"])
def test_intervals_are_wider_for_strangers(name):
    from hwmodels.serving_intervals import _table

    entry = _table()[name]
    assert all(entry[quantity]["deployment"][0] < 1 < entry[quantity]["deployment"][1] for quantity in QUANTITIES)
    known = serving_interval(name, entry["models"][0], entry["devices"][0])
    strange = serving_interval(name, "a model of tomorrow", entry["devices"][0])
    assert strange.ttft.low <= known.ttft.low
    assert strange.ttft.high >= known.ttft.high


def test_starts_are_within_what_a_fit_may_give():
    for name, (low, high) in limits(SERVED).items():
        assert low < START[name] < high


def test_intervals_are_of_the_kind_of_device_that_their_rows_are_of():
    from hwmodels.profiles import load_profile
    from hwmodels.serving_intervals import KIND, _table

    devices = {device for entry in _table().values() for device in entry["devices"]}
    assert {load_profile(device).kind for device in devices} == {KIND}
