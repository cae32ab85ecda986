"""Measured power of servers that are kept full: its replay, and the fit on rows that it has made."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from hwmodels.layerwise import LayerwiseCost
from hwmodels.overheads import serving_stack
from hwmodels.power import ARITHMETIC_EXPONENT, power_model
from sim.bench.published.machines import Unmodelled
from sim.bench.published.powered import HOSTS, LONE_HOSTS, RELEASES, Drawn, drawn, server_of, stack_of
from sim.validation.files import validate
from sim.validation.fit_power import Fit, Row, host_terms, host_without_each, joule_factors, lone_terms, without_each

ROW = {
    "task": "lm-arena-chat", "model": "Qwen/Qwen3-8B", "gpu": "H100", "num_gpus": 1, "precision": "bfloat16", "tp": 1,
    "max_num_seqs": 8, "avg_batch_size": 8.0, "avg_output_len": 200.0, "output_tokens_per_s": 900.0,
    "joules_per_token": 0.45, "power_w": 430.0, "power_per_gpu_w": 430.0,
}  # fmt: skip


def made(seed: int, *, idle: float, compute: float, memory: dict[str, float]) -> list[Row]:
    """Rows of six models on each device, half of them slower than their replays, by known terms."""
    rng = np.random.default_rng(seed)
    rows = []
    for device in memory:
        for i in range(60):
            bandwidth, root, speed = rng.uniform(0.1, 0.6), rng.uniform(0.05, 0.4), rng.choice([0.3, 1.0])
            share = idle + speed * (memory[device] * bandwidth + compute * root)
            replay = Drawn(
                device=device, watt=0.0, tokens_per_s=100.0, devices=1, busy=1.0, bandwidth=bandwidth, arithmetic=root
            )
            rows.append(
                Row(
                    model=f"model-{i % 6}", device=device, set="made", share=share, tokens_per_s=100.0 * speed, batch=1.0,
                    drawn=replay, plain=True,
                )
            )  # fmt: skip
    return rows


def test_a_fit_finds_the_terms_that_made_its_rows() -> None:
    rows = made(3, idle=0.15, compute=0.7, memory={"b200": 0.6, "h100-sxm": 0.3})
    fit = Fit.of(rows, ("b200", "h100-sxm"))
    for device, memory in (("b200", 0.6), ("h100-sxm", 0.3)):
        wanted = {"idle": 0.15, "memory": memory, "compute": 0.7}
        assert fit.entry(device) == pytest.approx(wanted, rel=0.02)
    share = np.array([row.share for row in rows])
    held_back = without_each(rows, fit.devices, "model", measured_speed=True)
    assert held_back == pytest.approx(share, rel=0.02)
    # Energy a token has the error of the speed in it: a row that is slower than its replay takes more of it.
    slow = np.array([row.speed < 1 for row in rows])
    assert np.all(joule_factors(rows, held_back)[slow] > 2)


def test_a_row_whose_time_is_filled_with_what_nobody_knows_informs_no_fit() -> None:
    rows = made(5, idle=0.15, compute=0.7, memory={"b200": 0.6})
    strange = [replace(row, share=0.99, plain=False, tokens_per_s=10.0) for row in rows]
    assert Fit.of([*rows, *strange], ("b200",)).terms == pytest.approx(Fit.of(rows, ("b200",)).terms)


def test_a_device_that_waits_draws_no_more_than_any_was_measured_to_draw() -> None:
    rows = made(7, idle=0.4, compute=0.7, memory={"b200": 0.6})
    waiting = replace(rows[0], share=0.25, tokens_per_s=1.0)
    assert Fit.of(rows, ("b200",)).entry("b200")["idle"] == pytest.approx(0.4, rel=0.02)
    assert Fit.of([*rows, waiting], ("b200",)).entry("b200")["idle"] <= 0.25


def test_host_terms_are_what_steps_take_more_than_their_replays() -> None:
    """A step of 20 ms and 0.1 ms a sequence, of which the replays lack 2 ms and 0.02; one model's rows have nothing to say."""
    rows = []
    for row, batch in zip(made(9, idle=0.15, compute=0.7, memory={"h100-sxm": 0.3}), cycle([8.0, 64.0, 256.0])):
        replayed_s, measured_s = 0.018 + 8e-5 * batch, 0.020 + 1e-4 * batch
        of_replay = replace(row.drawn, tokens_per_s=batch / replayed_s)
        rows.append(replace(row, batch=batch, tokens_per_s=batch / measured_s, drawn=of_replay))
    found = host_terms(rows)
    assert found == pytest.approx((2e-3, 2e-5), rel=0.01)
    strange = [replace(row, tokens_per_s=1.3 * row.tokens_per_s) if row.model == "model-0" else row for row in rows]
    held_back = host_without_each(strange)
    for row, plain in zip(held_back, rows, strict=True):
        if row.model == "model-0":
            assert row.drawn.tokens_per_s == pytest.approx(plain.tokens_per_s, rel=1e-3)
            faster = row.drawn.tokens_per_s / plain.drawn.tokens_per_s
            assert row.drawn.bandwidth == pytest.approx(plain.drawn.bandwidth * faster)
            assert row.drawn.arithmetic == pytest.approx(plain.drawn.arithmetic * faster**ARITHMETIC_EXPONENT)
    slow = [replace(row, device="b200", tokens_per_s=0.8 * row.tokens_per_s) for row in rows]
    assert host_terms([*rows, *slow]) == pytest.approx(found)


def test_servers_of_one_device_whose_hosts_are_slow_have_terms_of_their_own() -> None:
    """Steps of 18 ms and 0.08 ms a sequence, beside which measured ones take three times as long for their hosts."""
    rows = []
    for row, batch in zip(made(9, idle=0.15, compute=0.7, memory={"b200": 0.3}), cycle([8.0, 64.0, 256.0])):
        replay = replace(row.drawn, tokens_per_s=batch / (0.018 + 8e-5 * batch))
        of_one = replace(row, set="mlenergy3", batch=batch, tokens_per_s=replay.tokens_per_s / 3.0, drawn=replay)
        rows += [of_one, replace(of_one, tokens_per_s=replay.tokens_per_s, drawn=replace(replay, devices=2))]
    assert [row.lone for row in rows[:2]] == [True, False]
    assert lone_terms(rows) == pytest.approx((0.036, 1.6e-4), rel=0.01)
    even = [replace(row, device="h100-sxm") for row in rows if not row.lone]
    held_back = host_without_each([*rows, *even])
    assert [row.speed for row in held_back] == pytest.approx([1.0] * len(held_back), rel=0.01)


def test_rows_are_replayed_with_the_terms_of_their_hosts() -> None:
    own = serving_stack("vllm", RELEASES["mlenergy3"]).overheads
    assert stack_of(RELEASES["mlenergy3"]).overheads == replace(own, **HOSTS["mlenergy3"]) != own
    lone = LONE_HOSTS["mlenergy3", "b200"]
    assert stack_of(RELEASES["mlenergy3"], "b200").overheads == replace(own, **lone)
    assert stack_of(RELEASES["mlenergy3"], "h100") == stack_of(RELEASES["mlenergy3"])
    assert stack_of(RELEASES["mlenergy2"]) == serving_stack("vllm", RELEASES["mlenergy2"])


def test_servers_of_latent_attention_are_replayed_without_the_tiles_of_deepgemm() -> None:
    fp8 = {**ROW, "gpu": "B200", "num_gpus": 8, "tp": 1, "ep": 8, "precision": "fp8"}
    for model, backend in (("deepseek-ai/DeepSeek-V3.1", "triton"), ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", None)):
        served = server_of({**fp8, "model": model}, "0.11.1")
        assert served.model.expert_precision == "fp8_block"
        assert served.decode.parallel.layout.backend == backend


def test_what_a_full_server_draws_follows_from_what_it_reaches() -> None:
    found = drawn(ROW, "0.11.1")
    model = power_model("h100-sxm")
    # Nothing here ends on the limit, so that means are enough.
    share = model.idle + found.busy * (model.memory * found.bandwidth + model.compute * found.arithmetic)
    assert found.watt == pytest.approx(700 * share, rel=0.02)
    assert found.joule_per_token == pytest.approx(found.watt / found.tokens_per_s)
    assert found.busy > 0.95
    assert 600 < found.tokens_per_s < 1500
    two = drawn({**ROW, "num_gpus": 2, "tp": 2}, "0.11.1")
    assert two.watt < found.watt
    assert two.joule_per_token == pytest.approx(2 * two.watt / two.tokens_per_s)


def test_a_server_of_one_b200_is_replayed_with_its_own_hosts_terms() -> None:
    release, one = RELEASES["mlenergy3"], {**ROW, "gpu": "B200"}
    found = drawn(one, release)
    assert found.tokens_per_s == drawn(one, release, stack_of(release, "b200")).tokens_per_s
    assert found.tokens_per_s < drawn(one, release, stack_of(release)).tokens_per_s


def test_rows_that_only_fill_tiles_draw_power(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {**ROW, "task": "gpqa", "max_num_seqs": 32, "avg_output_len": 4000.0}
    found = drawn(long, "0.11.1")
    work = LayerwiseCost.work
    monkeypatch.setattr(LayerwiseCost, "work", lambda cost, totals: work(cost, totals)._replace(tile_flops=0.0))
    without = drawn(long, "0.11.1")
    assert without.tokens_per_s == found.tokens_per_s
    assert without.bandwidth == found.bandwidth
    assert without.arithmetic < 0.9 * found.arithmetic
    assert without.watt < 0.95 * found.watt


def test_less_power_is_drawn_while_nothing_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {**ROW, "num_gpus": 2, "tp": 2}
    found, work = drawn(two, "0.11.1"), LayerwiseCost.work
    monkeypatch.setattr(LayerwiseCost, "work", lambda cost, totals: work(cost, totals)._replace(still_s=0.0))
    without = drawn(two, "0.11.1")
    assert without.tokens_per_s == found.tokens_per_s
    assert found.arithmetic < 0.95 * without.arithmetic
    assert found.watt < without.watt


def test_prompts_with_images_are_not_replayed() -> None:
    with pytest.raises(Unmodelled, match="images or videos of unknown size"):
        drawn({**ROW, "task": "image-chat"}, "0.11.1")


def test_a_table_of_power_is_compared_row_by_row(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "task": "video-chat"}]
    text = "\n".join(",".join(map(str, each)) for each in (ROW, *(row.values() for row in rows)))
    (tmp_path / "power_mlenergy3_text.csv").write_text(text + "\n")
    watt, joule = validate(tmp_path)
    assert (watt.quantity, joule.quantity) == ("power of a GPU", "energy a token")
    assert watt.predicted[0] == pytest.approx(drawn(ROW, "0.11.1").watt)
    assert joule.predicted[0] == pytest.approx(drawn(ROW, "0.11.1").joule_per_token)
    assert np.isnan(watt.predicted[1])
    assert watt.unmodelled == {"prompts of video-chat have images or videos of unknown size": 1}
