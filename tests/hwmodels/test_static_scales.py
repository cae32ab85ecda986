"""FP8 products of checkpoints that state the scales of activations, which TensorRT-LLM then does not look for."""

import csv
import statistics

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import load_device
from hwmodels.gpu import gemm_seconds
from hwmodels.measured import predict, read
from hwmodels.model import load_model
from hwmodels.profiles import load_profile
from hwmodels.totals import Totals
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario.assembly import deployment_of, resolve

FEW = {"arrivals": {"process": "poisson", "rate_per_s": 1}, "requests": 2, "prompt_tokens": 10, "output_tokens": 2}
SHAPES = [(n, k) for n in (1024, 8192, 28672) for k in (1024, 8192, 28672)]


def product_us(device, stack, fmt, m, n, k):
    profile = Calibrated.for_stack(stack).load(load_device(device))
    return 1e6 * gemm_seconds(profile, (stack, "vllm"), m, n, k, dtype="fp8", weight_bytes=1.0, fmt=fmt)


def decode_ms(stack, precision, device="b200"):
    """A decode iteration of one sequence of 1,024 tokens."""
    deployment = deploy(model="llama-3.1-8b", hardware=device, precision=precision, cost=Calibrated.for_stack(stack))
    return 1e3 * deployment.cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, 1024, 1))


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
def test_the_product_is_what_the_table_has_less_the_dynamic_quantisation_that_was_timed_by_itself(device, shared):
    """Product and quantisation are two tables, neither of which the subtraction has seen together."""
    with (shared / "measured3" / f"computescale_{device}_fp8_trtllm1.3rc20.csv").open() as file:
        dynamic_us = {(row["m"], row["k"]): float(row["dynamic_us"]) for row in csv.DictReader(file)}
    errors = []
    with (shared / "measured2" / f"gemm_{device}_fp8_trtllm1.3rc20.csv").open() as file:
        for row in list(csv.DictReader(file))[::29]:
            passes_us = dynamic_us.get((row["m"], row["k"]))
            if passes_us is not None:
                found_us = product_us(device, "trtllm", "fp8_static", *(int(row[name]) for name in "mnk"))
                errors.append(abs(found_us / (float(row["latency_us"]) - passes_us) - 1.0))
    assert len(errors) >= 50
    assert statistics.median(errors) < 0.10


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "b200", "gb200"])
def test_a_stated_scale_saves_the_passes_that_find_one_at_any_size(device):
    for n, k in SHAPES:
        rows = np.array([1.0, 16.0, 256.0, 8192.0])
        saved_us = product_us(device, "trtllm", "fp8", rows, n, k) - product_us(
            device, "trtllm", "fp8_static", rows, n, k
        )
        assert (saved_us > 7.0).all()
        # Of 16-bit activations at most three readings and an 8-bit copy are saved, at a quarter of the bandwidth or more.
        most_us = 12.0 + 1e6 * 4 * rows * k * 7.0 / load_device(device).hbm_bytes_per_s
        assert (saved_us < most_us).all()


def test_a_block_takes_a_row_in_vllm_and_the_kernel_that_finds_its_scale_is_what_is_priced(tmp_path):
    path = tmp_path / "computescale_h100_fp8_vllm0.24.csv"
    path.write_text(
        "m,k,static_us,dynamic_us,latency_us\n1,1024,1.9,2.6,0.7\n1,65536,7.1,15.1,8.0\n16,65536,7.5,15.4,7.9\n"
    )
    table = read(path)
    assert table.measured_s == pytest.approx([2.6e-6, 15.1e-6, 15.4e-6])
    assert predict(table, load_profile("h100")).seconds == pytest.approx(table.measured_s, rel=0.15)


def test_where_the_quantisation_was_not_timed_apart_both_kinds_of_checkpoints_cost_the_same():
    for stack in ("vllm", "sglang"):
        assert decode_ms(stack, "fp8_static") == decode_ms(stack, "fp8")


def test_a_decode_step_of_a_dense_model_is_shorter_by_four_launches_a_layer():
    saved_us = 1e3 * (decode_ms("trtllm", "fp8") - decode_ms("trtllm", "fp8_static"))
    products = 4 * load_model("llama-3.1-8b").n_layers
    assert 7.0 < saved_us / products < 12.0


def test_fp8_behind_tensorrt_llm_is_what_its_checkpoints_are():
    """ModelOpt's FP8 states its scales; vLLM finds them in the call when it is asked for fp8."""
    found = {
        stack: deployment_of(
            Scenario(model="llama-3.1-8b", hardware="h100-sxm", precision="fp8", serving_stack=stack)
        ).model
        for stack in ("trtllm", "vllm")
    }
    assert (found["trtllm"].mlp_precision, found["vllm"].mlp_precision) == ("fp8_static", "fp8")


@pytest.mark.parametrize("cost_model", ["calibrated", "roofline"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-405b", "mixtral-8x7b"])
@pytest.mark.parametrize("device", ["a100-80gb-sxm", "h100-sxm", "l40s", "rtx-pro-6000", "v100-32"])
def test_whoever_asks_for_fp8_is_answered_in_that_word(device, model, cost_model):
    """Not with the format that it stands for behind TensorRT-LLM."""
    asked = Scenario(
        model=model, hardware=device, precision="fp8", serving_stack="trtllm", cost_model=cost_model, workload=FEW
    )
    try:
        said = resolve(asked).manifest["notes"]
    except ScenarioError as error:
        said = [str(error)]
        assert "fp8 with static scales" in said[0]
    assert not any("fp8_static" in each for each in said)
