"""Choices between measured servers, counted by hand on small made-up tables."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sim.cli import build_app
from sim.validation.aims import aims_markdown, held_back
from sim.validation.choices import Loss, best_layout, choices_markdown, loss_under, named, scores, servers, stack_pairs
from sim.validation.files import Comparison
from sim.validation.served import served_markdown

FILES = Path(__file__).resolve().parents[2] / "docs" / "validation" / "files.csv"
HEADER = (
    "model_path,system,backend,backend_version,precision,gemm_quant_mode,moe_quant_mode,mode,isl,osl,concurrency,"
    "batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,ttft_ms,tpot_ms,measured,provenance\n"
)
LLAMA = "meta-llama/Llama-3.1-70B,b200_sxm,vllm,,fp8,fp8,fp8,agg,1024,128,4,4,2,1,1,2,1,90,10,,x\n"


def pair_of(*rows):
    """TPOT and TTFT of rows: stack, layout, GPUs, load, measured and predicted TPOT in ms; a first token takes 1 s, an answer is of
    101 tokens."""
    stack, layout, gpus, load, measured, predicted = zip(*rows, strict=True)
    same = {"family": "InferenceX", "model": "m", "device": "b200", "precision": "fp8", "isl": 1024.0, "osl": 101.0}
    groups = {name: np.array([value] * len(rows)) for name, value in same.items()}
    groups |= {
        "stack": np.array(stack),
        "layout": np.array(layout),
        "gpus": np.array(gpus),
        "load": np.array(load, float),
    }
    one = np.ones(len(rows))
    steps = [np.array(column) * 1e-3 for column in (predicted, measured)]
    tpot, ttft = (
        Comparison(file="x", device="b200", quantity=what, predicted=p, measured=m, groups=groups)
        for what, p, m in (("tpot", *steps), ("ttft", one, one))
    )
    return tpot, ttft


def test_the_faster_of_two_stacks_is_named_or_not():
    pair = pair_of(
        ("vllm", "TP1", 1, 4, 10.0, 10.0),
        ("sglang", "TP1", 1, 4, 12.0, 11.0),  # slower than vllm's, and predicted so
        ("trtllm", "TP1", 1, 4, 8.0, 10.5),  # the fastest; predicted slower than vllm's
        ("trtllm", "TP1", 1, 4, 10.4, 9.0),  # a tie with vllm's; faster than sglang's, and predicted so
        ("vllm", "TP2", 2, 4, 5.0, 5.0),  # on other GPUs
        ("vllm", "TP1", 1, 8, 5.0, 5.0),  # at another load
    )
    pairs = stack_pairs(servers(pair))
    found = named(pairs, "tpot_s")
    # vllm-sglang right, vllm-trtllm wrong, a tie, sglang-trtllm right twice.
    assert (found.cases, found.ties, found.right) == (5, 1, 3)
    # The same stack always: trtllm before sglang twice, vllm before sglang, trtllm before vllm.
    assert (found.constant, found.right_pct) == (4, 75.0)
    assert named(pairs, "ttft_s").ties == 5
    assert np.isnan(named(pairs, "ttft_s").right_pct)
    # 1 + 100 steps: 2 s against 2.2, 1.8 and 2.04; 2.04 s is a tie with 2, and no longer one with 2.2.
    assert named(pairs, "throughput").ties == 1
    # Five per cent between two are a choice, and less is none.
    edge = pair_of(("vllm", "TP1", 1, 4, 1000.0, 1.0), ("sglang", "TP1", 1, 4, 1050.0, 2.0))
    assert named(stack_pairs(servers(edge)), "tpot_s").ties == 0


def test_two_names_of_one_model_are_a_pair():
    tpot, ttft = pair_of(("trtllm", "TP8", 8, 4, 10.0, 10.0), ("sglang", "TP8", 8, 4, 12.0, 11.0))
    groups = tpot.groups | {"model": np.array(["deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"])}
    assert len(stack_pairs(servers((replace(tpot, groups=groups), replace(ttft, groups=groups))))) == 1


def test_throughput_is_of_the_closed_loop_by_gpu():
    (one,) = servers(pair_of(("vllm", "TP2", 2, 4, 10.0, 40.0)))
    assert one.measured.throughput == pytest.approx(4 * 101 / 2.0 / 2)
    assert one.predicted.throughput == pytest.approx(4 * 101 / 5.0 / 2)


def test_the_best_layout_is_by_throughput_of_a_gpu():
    rows = [
        ("vllm", "TP1", 1, 4, 10.0, 10.0),  # 4 x 101 / 2 s on one GPU
        ("vllm", "TP2", 2, 4, 5.0, 5.0),  # 4 x 101 / 1.5 s on two
        ("vllm", "TP4", 4, 8, 10.0, 10.0),
        ("vllm", "TP2 EP2", 2, 8, 30.0, 70.0),  # 4 s on two are as many GPU seconds as 2 s on four: a tie
        ("vllm", "TP4", 4, 16, 10.0, 10.0),
        ("vllm", "TP2 EP2", 2, 16, 20.0, 70.0),  # 3 s on two are better than 2 s on four; predicted worse
        ("vllm", "TP2", 2, 32, 10.0, 10.0),  # no other layout
    ]
    found = best_layout(servers(pair_of(*rows)))
    assert (found.cases, found.ties, found.right, found.constant) == (3, 1, 1, 2)
    # A layout measured again counts by its mean.
    again = best_layout(servers(pair_of(*rows[4:6], ("vllm", "TP2 EP2", 2, 16, 60.0, 20.0))))
    assert (again.cases, again.right) == (1, 1)


def test_a_pick_loses_what_the_best_within_the_limit_has_more():
    rows = [
        ("vllm", "TP1", 1, 4, 10.0, 10.0),  # 4 x 101 / 2 s: 202
        ("sglang", "TP1", 1, 8, 15.0, 25.0),  # 8 x 101 / 2.5 s: 323, the best within 20 ms; predicted beyond it
        ("sglang", "TP1", 1, 16, 30.0, 30.0),
    ]
    picked = servers(pair_of(*rows))
    assert loss_under(picked, 0.02) == Loss(limit_s=0.02, cases=1, none=0, missed=0, mean_pct=37.5)
    # Predicted within 20 ms though it takes 30.
    missed = loss_under(servers(pair_of(*rows[:2], ("sglang", "TP1", 1, 16, 30.0, 19.0))), 0.02)
    assert (missed.cases, missed.missed, missed.whole_pct) == (1, 1, 100.0)
    assert np.isnan(missed.mean_pct)
    # Four per cent beyond the limit, with more throughput than any within it: no loss, and no gain.
    beyond = loss_under(servers(pair_of(*rows[:2], ("sglang", "TP1", 1, 16, 20.8, 19.0))), 0.02)
    assert (beyond.cases, beyond.missed, beyond.mean_pct) == (1, 0, 0.0)
    # Nothing is predicted within it.
    nothing = loss_under(servers(pair_of(*[(*row[:5], 50.0) for row in rows])), 0.02)
    assert (nothing.cases, nothing.none) == (1, 1)
    # One configuration within the limit is no choice.
    assert loss_under(picked, 0.01).cases == 0


def test_rows_without_layout_load_or_prediction_are_no_servers():
    rows = [("vllm", "", 0, 4, 10.0, 10.0), ("vllm", "TP1", 1, np.nan, 10.0, 10.0), ("vllm", "TP1", 1, 4, 10.0, np.nan)]
    assert servers(pair_of(*rows)) == []
    tpot, ttft = pair_of(*rows)
    bare = {name: column for name, column in tpot.groups.items() if name != "layout"}
    assert servers((replace(tpot, groups=bare), replace(ttft, groups=bare))) == []


def test_the_page_has_choices_beside_those_held_back():
    pair = pair_of(("vllm", "TP1", 1, 4, 10.0, 10.0), ("sglang", "TP1", 1, 4, 12.0, 9.0))
    held = {"models": scores(servers(pair_of(("vllm", "TP1", 1, 4, 10.0, 1.0), ("sglang", "TP1", 1, 4, 12.0, 9.0))))}
    page = "\n".join(choices_markdown(pair, held))
    assert "| faster stack by TPOT | 1 | 0 | 100.0 | 0.0 | 100.0 |" in page
    assert "| sglang and vllm | b200 | 1 | 0.0 | 0.0 | - |" in page
    assert "| 20 ms TPOT | 1 | 0 | 0 | 9.1 | 0.0 (0 miss) |" in page
    assert not list(choices_markdown(pair_of(("vllm", "TP1", 1, 4, 10.0, 10.0)), held))
    assert "Choices between stacks" in served_markdown(pair)


def test_an_aim_is_met_or_not(monkeypatch):
    table = {"errors": {"all": [9, 7.0, 20.0]}, "inside": {"vllm": [90.0, 80.0]}}
    shares = {name: [5, 1, 2, 2] for name in ("tpot_s", "throughput", "ttft_s", "layout")}
    table["choices"] = {**shares, **{name: [10, 0, 1, 5.0] for name in ("10 ms", "20 ms", "50 ms")}}
    monkeypatch.setattr("sim.validation.aims.held_back", lambda: {"deployments": table, "models": table})
    pair = pair_of(("vllm", "TP1", 1, 4, 10.0, 12.0), ("sglang", "TP1", 1, 4, 12.0, 12.5))
    page = "\n".join(aims_markdown({"e2e_silicon_disagg.csv": pair}, pair))
    assert "| deployments held back, all: median TPOT, TTFT % | <= 8, 15 | 7.0, 20.0 | no |" in page
    assert "| models held back, all: median TPOT, TTFT % | <= 11, 22 | 7.0, 20.0 | yes |" in page
    assert "| `e2e_silicon_disagg.csv`, all: median TPOT, TTFT % | <= 12, 28 | 12.1, 0.0 | no |" in page
    assert "| `e2e_silicon_disagg.csv`, sglang: median TPOT, TTFT % | <= 12, 35 | 4.2, 0.0 | yes |" in page
    assert "| faster stack by TPOT, % | >= 75 | 100.0, 50.0, 50.0 | no |" in page
    assert "by TTFT, %" not in page  # a tie is no choice
    assert "| loss of picks within 20 ms TPOT, a miss as all, % | <= 15 | 0.0, 14.5, 14.5 | yes |" in page
    assert "| models | 90.0 | 80.0 |" in page
    vllm = pair_of(("vllm", "TP1", 1, 4, 10.0, 12.0))
    assert "csv`, sglang" not in "\n".join(aims_markdown({"e2e_silicon_disagg.csv": vllm}, vllm))


def test_validate_prints_choices_of_a_table_of_two_layouts(tmp_path):
    (tmp_path / "e2e_silicon_agg.csv").write_text(
        HEADER + LLAMA + LLAMA.replace(",4,4,2,1,1,2,", ",4,4,4,1,1,4,").replace(",90,10,", ",80,9,")
    )
    result = CliRunner().invoke(build_app(), ["validate", "--measured", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"best layout +1 +0 +100\.0", result.output)
    assert "faster stack" not in result.output
    facts = CliRunner().invoke(build_app(), ["validate", "--measured", str(tmp_path), "--json"])
    (one,) = json.loads(facts.stdout)["choices"]
    assert (one["choice"], one["cases"], one["ties"], one["right"]) == ("layout", 1, 0, 1)


def test_figures_held_back_are_of_the_rows_that_the_page_states():
    with FILES.open(encoding="utf-8") as file:
        rows = {row["file"]: int(row["rows"]) for row in csv.DictReader(file) if row["quantity"] == "tpot"}
    for kind in held_back().values():
        # Two rows of more clients than a fit sees have no prediction held back.
        assert kind["errors"]["all"][0] == pytest.approx(rows["e2e_silicon_agg.csv"], abs=2)
        assert set(kind["inside"]) | {"all"} == set(kind["errors"])
