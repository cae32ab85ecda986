"""Kimi-K2.5 on ranks of vLLM with a prefill cadence: TPOT measured, and ours with the cadence and without.

    python -m benchmarks.prefill_cadence

The five points are of one GPU a rank, experts over all, prompts and answers of 80 to 100 % of 8,192 and 1,024 tokens, and as many
requests in flight as the table says. They were measured with `--prefill-schedule-interval 4` alone: what the same server does
without it nobody has published.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hwmodels
from sim.engine import run
from sim.scenario import Scenario
from sim.scenario.assembly import build

INTERVAL = 4
REQUESTS_A_CLIENT = 10


class Point(NamedTuple):
    """A measured point; from aisimulate (305e46b4, Apache-2.0), benchmarks/evidence/accuracy/replay-evidence.md."""

    hardware: str
    gpus: int
    concurrency: int
    utilization: float
    tpot_ms: float


POINTS = (
    Point("b200", 8, 512, 0.80, 89.548),
    Point("b200", 8, 1024, 0.80, 143.23),
    Point("b300", 4, 128, 0.85, 48.845),
    Point("b300", 4, 256, 0.85, 69.027),
    Point("b300", 4, 512, 0.85, 109.11),
)


def checkpoint() -> dict[str, Any]:
    """The config of nvidia/Kimi-K2.5-NVFP4: that of the model, with all but attention and head in four bits."""
    config = json.loads((Path(hwmodels.__file__).parent / "models" / "kimi-k2.5.json").read_text())
    group = {name: {"num_bits": 4, "type": "float", "group_size": 16} for name in ("weights", "input_activations")}
    config["text_config"]["quantization_config"] = {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }
    del config["rooftrace"]
    return config


def scenario_of(point: Point, interval: int, model: Path) -> Scenario:
    settings = (
        f"model={model}", f"hardware={point.hardware}", "kv_precision=fp8", "serving_stack=vllm",
        f"parallel={{tensor: 1, data: {point.gpus}, expert: {point.gpus}}}",
        f"scheduler={{policy: vllm, max_num_seqs: {point.concurrency}, prefill_schedule_interval: {interval}}}",
        f"memory={{gpu_memory_utilization: {point.utilization}, prefix_caching: false}}",
        f"workload={{requests: {REQUESTS_A_CLIENT * point.concurrency}, "
        "prompt_tokens: {distribution: uniform, min_tokens: 6554, max_tokens: 8192}, "
        "output_tokens: {distribution: uniform, min_tokens: 820, max_tokens: 1024}, "
        f"arrivals: {{process: closed_loop, concurrency: {point.concurrency}}}}}",
    )  # fmt: skip
    scenario = Scenario.default()
    for setting in settings:
        scenario = scenario.with_set(setting)
    return scenario


def tpot_ms(point: Point, interval: int) -> float:
    """Mean over requests."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(checkpoint()))
        table = run(build(scenario_of(point, interval, model))).requests
    return float(((table["finish_ns"] - table["first_token_ns"]) / (table["output_tokens"] - 1)).mean() * 1e-6)


def errors(interval: int) -> list[float]:
    """The error of each point, as a share of the measured TPOT."""
    return [tpot_ms(point, interval) / point.tpot_ms - 1 for point in POINTS]


def main() -> None:
    with_it, without = errors(INTERVAL), errors(1)
    print(f"{'':24}{'measured, ms':>14}{'interval 4':>12}{'interval 1':>12}")
    for point, a, b in zip(POINTS, with_it, without, strict=True):
        name = f"{point.hardware} x {point.gpus}, {point.concurrency} in flight"
        print(f"{name:24}{point.tpot_ms:14.1f}{a:+12.1%}{b:+12.1%}")
    means = (float(np.mean(np.abs(each))) for each in (with_it, without))
    print(f"{'mean, whichever sign':24}{'':14}" + "".join(f"{mean:12.1%}" for mean in means))


if __name__ == "__main__":
    main()
