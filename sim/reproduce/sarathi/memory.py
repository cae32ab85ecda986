"""How many sequences fit: the paper's formula, its stated batches, and the memory of GPT-3's deployments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hwmodels.model import load_model
from sim.reproduce.rows import Row
from sim.reproduce.sarathi.machines import deployment
from sim.reproduce.sarathi.runs import PRINT, SHOWN, published
from sim.study.memory import batch_plan, reserve_range
from sim.theory import sarathi as theory


def stated_batches() -> list[dict[str, Any]]:
    """For each model the batches by formula and as stated, the KV pools that these need, and what that says."""
    cases = []
    for model in ("llama-13b", "llama-33b"):
        spec = load_model(model)
        lines = [line for line in published("batches") if line["model"] == model]
        kv = theory.kv_bytes_per_token(spec.n_layers, spec.hidden)
        memory, weights = float(lines[0]["memory_gb"]) * 1e9, float(lines[0]["weights_gb"]) * 1e9
        batches = []
        for line in lines:
            tokens, stated = int(line["tokens"]), int(line["stated"])
            plan = batch_plan(memory_bytes=memory, weight_bytes=weights, kv_bytes_per_token=kv, sequence_tokens=tokens)
            pool = theory.implied_pool_bytes(stated, tokens, kv)
            batches.append(
                {
                    "tokens": tokens,
                    "formula": plan.sequences,
                    "published_formula": int(line["formula"]),
                    "stated": stated,
                    "pool_gb": [float(end) / 1e9 for end in pool],
                }
            )
        reserve = reserve_range(
            memory_bytes=memory,
            weight_bytes=weights,
            kv_bytes_per_token=kv,
            batches={batch["tokens"]: batch["stated"] for batch in batches},
        )
        if reserve is None:
            verdict = (
                "no single pool gives the stated batches, so they are not the formula's; they are captions of figures, "
                "and a reserve has to be given for each length"
            )
        elif reserve[1] < 0:
            verdict = (
                f"the stated batches need {-reserve[1] / 1e9:.2f} to {-reserve[0] / 1e9:.2f} GB more than "
                "M_G - M_S in decimal GB; the device's 80 GiB (85.9 GB) has that, with the rest as reserve"
            )
        else:
            verdict = f"the stated batches follow with a reserve of {reserve[0] / 1e9:.2f} to {reserve[1] / 1e9:.2f} GB"
        cases.append(
            {
                "model": model,
                "free_gb": (memory - weights) / 1e9,
                "batches": batches,
                "reserve_gb": None if reserve is None else [end / 1e9 for end in reserve],
                "verdict": verdict,
            }
        )
    return cases


def rows() -> Iterator[Row]:
    row_of = partial(Row, "batch capacity", kind="theory")
    for case in stated_batches():
        for batch in case["batches"]:
            yield row_of(
                f"{case['model']}, {batch['tokens']} tokens, decimal GB, no reserve", "sequences",
                batch["published_formula"], batch["formula"], evidence=PRINT, within_abs=0.0,
            )  # fmt: skip
    first, _ = stated_batches()
    yield row_of(
        "llama-13b: 18, 10 and 6 from one pool", "possible", "no", "no" if first["reserve_gb"] is None else "yes",
        evidence=PRINT, within_abs=0.0,
    )  # fmt: skip
    kv = theory.kv_bytes_per_token(60, 6656)
    for tokens, stated in ((1024, 10), (2048, 5), (3072, 3)):
        yield row_of(
            f"llama-33b, {tokens} tokens, a pool of 17 GB", "sequences", stated,
            int(theory.batch_capacity(17e9, 0.0, tokens, kv)), evidence=PRINT, within_abs=0.0,
        )  # fmt: skip
    # GPT-3 at the longest request, 4096 tokens; its batch is of one of eight micro-batches.
    for pipeline, stated in ((1, 11), (8, 27)):
        room = deployment("gpt3-175b", "a100-80gb-sxm", 8, pipeline)
        pool = 80e9 - room.weight_bytes_per_device
        yield row_of(
            f"gpt3-175b, TP8 x PP{pipeline}, 4096 tokens, decimal GB, no reserve", "sequences of a micro-batch",
            float(stated), pool / (4096 * room.kv_bytes_per_token_per_device) / pipeline, evidence=SHOWN,
            note="the reserve is not published",
        )  # fmt: skip
