"""Times between measured steps: against laws in closed form, and against scipy's interpolation on full grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from hwmodels.steps.surface import Floats, Points, Surface
from hwmodels.steps.table import Table
from hwmodels.totals import Totals


def prompt_law_s(rows: Any, pairs: Any) -> Any:
    return 8e-3 + 20e-6 * rows + 3e-10 * pairs


def decode_law_s(seqs: Any, kv: Any) -> Any:
    return 5e-3 + 40e-6 * seqs + 2e-9 * kv


def grid(law: Callable[[Any, Any], Any], rows: list[float], keys: list[float]) -> Points:
    at_rows, at_keys = (each.ravel() for each in np.meshgrid(rows, keys))
    return Points(at_rows, at_keys, law(at_rows, at_rows * at_keys))


PROMPTS = grid(prompt_law_s, [256.0, 1024.0, 4096.0], [200.0, 2000.0, 20000.0])
DECODES = grid(decode_law_s, [1.0, 8.0, 9.0, 32.0], [128.0, 1024.0, 8192.0])


def step(*, prompt: Any = 0, pairs: Any = 0, seqs: Any = 0, kv: Any = 0) -> Totals:
    return Totals(prompt + seqs, prompt, 0, pairs, 0, seqs, kv, seqs)


@pytest.mark.parametrize(("rows", "keys"), [(300, 250), (1024, 19_999), (2500, 7000), (6000, 30_000)])
def test_a_linear_law_is_given_back_between_and_beyond_the_measured_prompts(rows: int, keys: int) -> None:
    found = Table(PROMPTS, DECODES).second(step(prompt=rows, pairs=rows * keys))

    assert found == pytest.approx(prompt_law_s(rows, rows * keys), rel=2e-3)


@pytest.mark.parametrize(("seqs", "keys"), [(1, 128), (5, 777), (20, 8000), (8, 60_000), (100, 20_000)])
def test_a_linear_law_is_given_back_between_and_beyond_the_measured_decodes(seqs: int, keys: int) -> None:
    found = Table(PROMPTS, DECODES).second(step(seqs=seqs, kv=seqs * keys))

    assert found == pytest.approx(decode_law_s(seqs, seqs * keys), rel=1e-3)


def test_a_step_with_both_takes_its_prompts_and_what_its_decodes_take_beyond_the_least() -> None:
    found = Table(PROMPTS, DECODES).second(step(prompt=1000, pairs=1000 * 2000, seqs=16, kv=16 * 4000))

    least = decode_law_s(1, 128)
    decodes = decode_law_s(16, 16 * 4000)
    assert found == pytest.approx(prompt_law_s(1000, 2_000_000) + decodes - least, rel=2e-3)


def test_one_prompt_token_takes_as_long_as_one_decode_and_the_way_to_the_smallest_prompt_is_straight() -> None:
    table = Table(PROMPTS, DECODES)

    one = table.second(step(seqs=1, kv=200))
    assert table.second(step(prompt=1, pairs=200)) == pytest.approx(one)
    smallest = table.second(step(prompt=256, pairs=256 * 200))
    halfway = table.second(step(prompt=128, pairs=128 * 200))
    assert halfway == pytest.approx(one + (smallest - one) * 127 / 255)


def test_below_the_smallest_context_and_batch_the_time_is_that_of_the_smallest() -> None:
    table = Table(PROMPTS, grid(decode_law_s, [8.0, 32.0], [1024.0, 8192.0]))

    assert table.second(step(seqs=1, kv=10)) == pytest.approx(decode_law_s(8, 8 * 1024))


def test_a_step_without_tokens_takes_nothing() -> None:
    table = Table(PROMPTS, DECODES)

    assert table.second(step()) == 0.0
    assert table.seconds(Totals(*(np.zeros(3, np.int64) for _ in range(10)))).tolist() == [0.0, 0.0, 0.0]


def random_points(rng: np.random.Generator) -> tuple[Points, Floats, Floats, Floats]:
    """Points of a full grid whose times rise along both sides, and the grid."""
    rows = np.cumsum(rng.integers(1, 900, rng.integers(2, 6))).astype(float) + 1
    keys = np.cumsum(rng.integers(1, 9000, rng.integers(2, 6))).astype(float)
    values = np.cumsum(np.cumsum(rng.random((len(rows), len(keys))), axis=0), axis=1) * 1e-3 + 1e-3
    order = rng.permutation(values.size)
    at_rows, at_keys = np.repeat(rows, len(keys)), np.tile(keys, len(rows))
    return Points(at_rows[order], at_keys[order], values.ravel()[order]), rows, keys, values


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_full_grid_is_interpolated_as_scipy_interpolates_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, rows, keys, values = random_points(rng)
    surface = Surface(points)

    at_rows, at_keys = rng.uniform(rows[0], rows[-1], 50), rng.uniform(keys[0], keys[-1], 50)
    by_scipy = RegularGridInterpolator((rows, keys), values)(np.column_stack((at_rows, at_keys)))
    assert surface.seconds(at_rows, at_keys) == pytest.approx(by_scipy, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_times_of_any_table_do_not_fall_along_rows_or_keys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 15))
    points = Points(
        rng.integers(1, 40, n).astype(float), rng.integers(1, 9000, n).astype(float), rng.uniform(1e-3, 9e-3, n)
    )
    surface = Surface(points, anchor=Surface(points.at(rng.permutation(n)[:2])) if seed % 2 else None)

    at_rows, at_keys = np.meshgrid(np.sort(rng.uniform(1, 80, 30)), np.sort(rng.uniform(1, 20_000, 30)))
    found = surface.seconds(at_rows, at_keys)
    assert (np.diff(found, axis=0) >= -1e-15).all()
    assert (np.diff(found, axis=1) >= -1e-15).all()
    assert (found > 0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_one_step_and_many_are_equal_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = Table(random_points(rng)[0], random_points(rng)[0])
    n = 60
    prompt, seqs = rng.integers(0, 5000, n) * rng.integers(0, 2, n), rng.integers(0, 900, n) * rng.integers(0, 2, n)
    many = step(
        prompt=prompt, pairs=prompt * rng.integers(1, 30_000, n), seqs=seqs, kv=seqs * rng.integers(1, 30_000, n)
    )
    none = np.zeros(n, np.int64)
    many = Totals(*(each + none for each in many))
    singly = [table.second(Totals(*(int(each[i]) for each in many))) for i in range(n)]

    assert table.seconds(many).tolist() == singly


def test_times_that_fall_are_levelled_and_counted() -> None:
    fallen = PROMPTS._replace(seconds=PROMPTS.seconds.copy())
    fallen.seconds[4] *= 0.5

    n, most = Table(fallen, DECODES).levelled()
    assert n >= 2
    assert most > 0.1
    assert Table(PROMPTS, DECODES).levelled()[0] == 0


def test_nine_in_ten_measured_times_of_a_held_out_half_lie_within_the_stated_factors() -> None:
    rng = np.random.default_rng(5)
    prompts, decodes = (
        each._replace(seconds=each.seconds * rng.lognormal(0, 0.05, len(each.seconds)))
        for each in (
            grid(prompt_law_s, [128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0], [200.0, 1000.0, 5000.0, 20000.0]),
            grid(decode_law_s, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], [128.0, 512.0, 2048.0, 8192.0, 32768.0]),
        )
    )
    known_prompts, known_decodes = (
        rng.permutation(len(each.seconds)) < len(each.seconds) // 2 for each in (prompts, decodes)
    )
    table = Table(prompts.at(known_prompts), decodes.at(known_decodes))
    factors = table.factors()
    assert factors is not None

    ratios = np.concatenate(
        [
            held.seconds / table.of(what, held)
            for what, held in (("prompts", prompts.at(~known_prompts)), ("decodes", decodes.at(~known_decodes)))
        ]
    )
    assert ((ratios >= factors[0]) & (ratios <= factors[1])).mean() >= 0.85


def test_three_points_of_a_kind_are_too_few_to_hold_half_of_them_back() -> None:
    assert Table(PROMPTS.at([0, 4, 8]), DECODES).factors() is None


def test_a_table_needs_steps_with_prompts_and_with_decodes() -> None:
    with pytest.raises(ValueError, match="1 measured steps with prompts alone are too few"):
        Table(PROMPTS.at([0]), DECODES)
    with pytest.raises(ValueError, match="0 measured steps with decodes alone are too few"):
        Table(PROMPTS, DECODES.at([]))
