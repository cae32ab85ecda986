"""Rates by position behind published curves of mean acceptance lengths."""

import csv

import numpy as np
import pytest

from policies.acceptance import CURVES, Curve, published
from sim.errors import RooftraceError
from sim.scenario import Scenario
from sim.scenario.assembly import resolve


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
    assert Curve(lengths=lengths, source="here").published().rates == pytest.approx((0.8, 0.6, 0.5))


def test_curves_are_those_of_the_table(shared):
    found = {}
    with (shared / "measured3" / "acceptance_golden.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["run"], row["thinking"]
            found.setdefault(key, []).append(float(row["mean_accepted_length"]))
    ours = {(one.source.split("run ")[1].split(":")[0], "on" if name.endswith("thinking") else "off"): one.lengths
            for name, one in CURVES.items()}  # fmt: skip
    assert ours == {key: tuple(lengths) for key, lengths in found.items()}


def test_a_scenario_takes_a_curve_by_name_up_to_its_longest_draft():
    def with_k(k):
        decoding = {"method": "mtp", "num_speculative_tokens": k, "acceptance": {"published": "glm-5.2-mtp-thinking"}}
        return Scenario(model="deepseek-v3", hardware="h200", parallel={"tensor": 8}, decoding=decoding)

    assert resolve(with_k(3)).manifest["decoding"]["mean_length"] == {"3": pytest.approx(2.99, abs=0.02)}
    with pytest.raises(RooftraceError, match="k = 9 drafts more positions than the 8 that have a rate"):
        resolve(with_k(9))
