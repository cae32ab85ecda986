"""Rates by position behind published curves of mean acceptance lengths."""

import csv
from typing import get_args

import numpy as np
import pytest

from policies.acceptance import CURVES, PUBLISHED, Curve, published
from policies.decoding import Method
from sim.errors import RooftraceError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.scenario.assembly.acceptance import acceptance_of


def squared_error(reached, lengths):
    return float(((1.0 + np.cumsum(reached) - lengths) ** 2).sum())


@pytest.mark.parametrize("name", CURVES)
def test_no_other_rates_come_nearer_to_a_published_curve(name):
    """Survival never rises with the position; a thousand neighbours that obey this are no better."""
    lengths, process = np.array(CURVES[name].lengths), published(name).acceptance
    reached = process.per_position(len(lengths))
    assert (np.diff(reached) <= 1e-12).all()
    assert reached[0] <= 1.0
    best = squared_error(reached, lengths)
    rng = np.random.default_rng(1)
    for scale in (0.1, 0.01):
        for _ in range(500):
            other = np.clip(reached + rng.normal(0.0, scale, len(reached)), 0.0, 1.0)
            assert squared_error(np.minimum.accumulate(other), lengths) >= best - 1e-12


@pytest.mark.parametrize("name", CURVES)
def test_the_source_says_how_far_lengths_of_the_rates_are_off(name):
    lengths = CURVES[name].lengths
    off = max(abs(published(name).acceptance.mean_length(k) - lengths[k - 1]) for k in range(1, len(lengths) + 1))
    assert f"{off:.2f} tokens off at most" in published(name).source
    assert off < 0.2


def test_a_curve_that_some_rates_have_gives_these_rates_back():
    lengths = (1.8, 1.8 + 0.8 * 0.6, 1.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.5)
    assert Curve(lengths=lengths, model="toy", method="mtp", source="here").published().rates == pytest.approx(
        (0.8, 0.6, 0.5)
    )


def test_curves_are_those_of_the_table(shared):
    found = {}
    with (shared / "measured3" / "acceptance_golden.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["run"], row["thinking"]
            found.setdefault(key, []).append(float(row["mean_accepted_length"]))
    ours = {(one.source.split("run ")[1].split(":")[0], "on" if name.endswith("thinking") else "off"): one.lengths
            for name, one in CURVES.items()}  # fmt: skip
    assert ours == {key: tuple(lengths) for key, lengths in found.items()}


def decoded(published, method="mtp", k=3, model="deepseek-v3", **settings):
    decoding = {"method": method, "num_speculative_tokens": k, "acceptance": {"published": published}, **settings}
    return Scenario(model=model, hardware="h200", parallel={"tensor": 8}, decoding=decoding)


def test_a_scenario_takes_a_curve_by_name_up_to_its_longest_draft():
    made = resolve(decoded("glm-5.2-mtp-thinking"))
    assert made.manifest["decoding"]["mean_length"] == {"3": pytest.approx(2.99, abs=0.02)}
    with pytest.raises(RooftraceError) as refused:
        resolve(decoded("glm-5.2-mtp-thinking", k=9))
    assert (
        "decoding.num_speculative_tokens drafts 9 tokens a round, and decoding.acceptance.published: glm-5.2-mtp-thinking says "
        "nothing beyond the first 8; draft at most 8" in str(refused.value)
    )


def test_a_curve_of_ones_own_is_met_where_rates_can_meet_it():
    lengths = [1.8, 2.3, 2.6, 2.75]
    decoding = {"method": "mtp", "num_speculative_tokens": 4, "acceptance": {"lengths": lengths}}
    scenario = Scenario(model="deepseek-v3", hardware="h200", parallel={"tensor": 8}, decoding=decoding)
    assert resolve(scenario).manifest["decoding"]["mean_length"] == {"4": pytest.approx(2.75)}
    for k, length in enumerate(lengths, start=1):
        assert acceptance_of(scenario.decoding, lambda _name: None).mean_length(k) == pytest.approx(length)


@pytest.mark.parametrize("lengths", [[], [1.8, 3.2], [0.9], [2.5]])
def test_lengths_that_no_rounds_have_are_refused_with_their_key(lengths):
    decoding = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": {"lengths": lengths}}
    with pytest.raises(RooftraceError, match=r"acceptance.lengths: give the mean length for 1, 2, ... drafted tokens"):
        resolve(Scenario(model="deepseek-v3", hardware="h200", parallel={"tensor": 8}, decoding=decoding))


def test_more_drafted_tokens_than_a_curve_has_are_refused():
    decoding = {"method": "mtp", "num_speculative_tokens": 3, "acceptance": {"lengths": [1.8, 2.3]}}
    with pytest.raises(RooftraceError, match=r"acceptance.lengths says nothing beyond the first 2"):
        resolve(Scenario(model="deepseek-v3", hardware="h200", parallel={"tensor": 8}, decoding=decoding))


def test_every_curve_names_a_model_and_a_method_of_which_it_is():
    for name, curve in {**CURVES, **PUBLISHED}.items():
        assert name.startswith(curve.model)
        assert curve.method in (*get_args(Method), "dspark")


def notes(*given, **settings):
    return [note for note in resolve(decoded(*given, **settings)).manifest["notes"] if "was measured with" in note]


@pytest.mark.parametrize(
    ("published", "model", "method", "as_measured"),
    [
        ("deepseek-v3", "deepseek-v3", "mtp", True),
        ("deepseek-v3-low", "deepseek-ai/DeepSeek-V3-0324", "mtp", True),
        ("deepseek-v3", "deepseek-v3.2", "mtp", False),
        ("deepseek-v3", "deepseek-v3", "eagle", False),
        ("kimi-k2.5-eagle3", "kimi-k2.5", "eagle", True),
        ("kimi-k2.5-eagle3", "kimi-k2", "eagle", False),
        ("glm-5.2-mtp-thinking", "deepseek-v3", "mtp", False),
    ],
)
def test_acceptance_measured_with_another_model_or_method_is_noted(published, model, method, as_measured):
    draft = {} if method == "mtp" else {"draft": {"cost_ratio": 0.05}}
    found = notes(published, method, k=1, model=model, **draft)
    assert bool(found) is not as_measured
    assert all(f"decoding.acceptance.published: {published} was measured with" in note for note in found)
