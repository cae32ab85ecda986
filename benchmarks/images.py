"""Multimodal servers of the ML.ENERGY benchmark beside their simulation: output tokens a second, and the median gap of tokens.

    python -m benchmarks.images MEASURED [--rows N]

MEASURED is a folder with power_mlenergy3_multimodal.csv and power_mlenergy3_text.csv (vLLM 0.11.1; as many requests in flight as a
server has seats). No parameter was fitted to the first. Its rows do not say what was sent: neither lengths of prompts nor sizes of
images. `TASKS` has what is assumed of all rows of a task. Where the same language model served text on as many GPUs with as many
seats, the speed is laid beside that too: what images cost a server, whatever the simulation of its language model is off by.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels.measured import read
from sim.bench.published.rows import rows_of, whole
from sim.engine import run
from sim.engine.batch.prices import StageTable
from sim.scenario import Scenario
from sim.scenario.assembly import build
from sim.work import iterations_of


class Task(NamedTuple):
    """The images of a request, by assumption."""

    text_tokens: int
    images: int
    width: int
    height: int


TEXT = "lm-arena-chat"
TASKS = {TEXT: Task(300, 0, 1, 1), "image-chat": Task(100, 1, 1000, 800), "video-chat": Task(100, 16, 640, 360)}
"""A question about one photograph; and one about a film of 32 frames, of which an encoder that joins two frames makes 16 images."""
MODELS = {
    "Qwen/Qwen3-VL-235B-A22B-Instruct": "qwen3-vl-235b-a22b",
    "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8": "qwen3-vl-235b-a22b",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3-vl-30b-a3b",
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "qwen3-omni-30b-a3b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
}
TEXT_MODELS = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
}
"""Language models that served text, and those with an encoder whose language model has the same shapes."""
DEVICES = {"H100": "h100-sxm", "B200": "b200"}


class Found(NamedTuple):
    """Figures of the steady part of a run."""

    tokens_per_s: float
    gap_ms: float


def scenario_of(row: Mapping[str, Any]) -> Scenario:
    """The server of a row under its load."""
    seats, gpus, task = whole(row, "max_num_seqs", 0), whole(row, "num_gpus", 1), TASKS[str(row["task"])]
    answer = max(2, round(float(row["avg_output_len"])))
    return Scenario.from_mapping(
        {
            "model": MODELS[str(row["model"])],
            "hardware": DEVICES[str(row["gpu"])],
            **({"precision": "fp8_block"} if str(row["precision"]) == "fp8" else {}),
            "parallel": {"tensor": gpus, "expert": gpus},
            "serving_release": "0.11",
            "scheduler": {"policy": "vllm", "max_num_seqs": seats, "max_num_batched_tokens": max(8192, seats)},
            **({"encode": {"at": "engine"}} if task.images else {}),
            "workload": {
                "arrivals": {"process": "closed_loop", "concurrency": seats},
                "requests": 2 * seats + 24,
                "prompt_tokens": task.text_tokens,
                "output_tokens": {"distribution": "lognormal", "mean": answer, "median": round(0.75 * answer)},
                **(
                    {"images": {"per_request": task.images, "width": task.width, "height": task.height}}
                    if task.images
                    else {}
                ),
            },
        }
    )


def simulated(row: Mapping[str, Any]) -> Found:
    """The steady part: from the first half of the answers to the end of the last request but a server full."""
    experiment = build(scenario_of(row))
    columns = run(experiment)
    finished, seats = np.sort(columns.requests["finish_ns"]), whole(row, "max_num_seqs", 0)
    begin_ns, end_ns = int(finished[seats // 2]), int(finished[len(finished) - seats - 1])
    (machine,) = experiment.machines
    cost = machine.hosted[0].cost
    assert not isinstance(cost, StageTable)
    steps = iterations_of(cost, columns, from_ns=begin_ns, to_ns=end_ns)
    gaps, counts = columns.itl()
    order = np.argsort(gaps)
    middle = np.searchsorted(np.cumsum(counts[order]), counts.sum() / 2)
    return Found(steps.tokens / (end_ns - begin_ns) * 1e9, float(gaps[order][middle]) / 1e6)


def server(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that two rows of one server under other loads have in common."""
    return row["model"], row["gpu"], row["precision"], *(whole(row, name, 1) for name in ("num_gpus", "max_num_seqs"))


def text_rows(folder: Path) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """The rows of text by their server, as one of the model with an encoder."""
    found = [row for row in rows_of(read(folder / "power_mlenergy3_text.csv")) if row["task"] == TEXT]
    named = [{**row, "model": TEXT_MODELS[str(row["model"])]} for row in found if str(row["model"]) in TEXT_MODELS]
    return {server(row): row for row in named}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images")
    parser.add_argument("measured", type=Path, help="a folder with the two tables")
    parser.add_argument("--rows", type=int, default=1, help="every so many-th row only")
    asked = parser.parse_args()
    rows, texts = rows_of(read(asked.measured / "power_mlenergy3_multimodal.csv")), text_rows(asked.measured)
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows[:: max(1, asked.rows)]:
        name = f"{row['task']}, {row['model']}, {int(row['num_gpus'])} x {row['gpu']}"
        found, text = simulated(row), texts.get(server(row))
        speed = found.tokens_per_s / float(row["output_tokens_per_s"]) - 1
        gap, beside = found.gap_ms / float(row["itl_p50_ms"]) - 1, float("nan")
        if text is not None:
            beside = (1 + speed) / (simulated(text).tokens_per_s / float(text["output_tokens_per_s"])) - 1
        errors.setdefault(name, []).append((speed, gap, beside))
        print(
            f"{name}, {int(row['max_num_seqs'])} seats: {row['output_tokens_per_s']:,.0f} tokens/s measured, "
            f"{found.tokens_per_s:,.0f} simulated ({speed:+.1%}); gap {row['itl_p50_ms']:.1f} ms, {found.gap_ms:.1f} ({gap:+.1%})"
            + ("" if text is None else f"; speed over that of text {beside:+.1%}"),
            flush=True,
        )
    for name, each in [*errors.items(), ("all", [row for rows in errors.values() for row in rows])]:
        speed, gap, _ = np.median(np.abs(np.array(each)), axis=0)
        known = [abs(beside) for *_, beside in each if beside == beside]
        ratio = f", of the speed over that of text {np.median(known):.1%} ({len(known)} rows)" if known else ""
        print(f"{name}: {len(each)} rows, median error of the speed {speed:.1%}, of the gap {gap:.1%}{ratio}")


if __name__ == "__main__":
    main()
