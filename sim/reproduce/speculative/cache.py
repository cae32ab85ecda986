"""The KV cache under speculation: its bytes, what it saves, and what becomes of rejected tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from hwmodels.latency_models import StepTime
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.work import stage_work
from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from sim.engine import Experiment, ReplicaSpec, run
from sim.reproduce.rows import Row
from workloads import ClosedLoop

_BLOCK = 16


def rows(_quick: bool) -> Iterator[Row]:
    """Bytes of a token, linear work of a step with and without a cache, blocks held under speculation."""
    row_of = partial(Row, "KV cache", kind="theory")
    for name in ("gpt2", "gpt2-xl", "opt-13b", "llama-13b", "gpt3-175b"):
        spec = load_model(name)
        yield row_of(
            f"{name}, fp16", "bytes a token, against 2 x layers x hidden x bytes",
            float(2 * spec.n_layers * spec.hidden * 2), float(spec.kv_bytes_per_token()),
            evidence="closed form against print", within_abs=0.0,
        )  # fmt: skip
    linear = stage_work(load_model("gpt2-xl"), ParallelConfig(), 0).linears
    for context in (266, 1024):
        cached, recomputed = (float(sum(each.flops(count) for each in linear)) for count in (1, context))
        yield row_of(
            f"gpt2-xl, context {context}", "linear work of a step without a cache over one with it", float(context),
            recomputed / cached, evidence="closed form against print", within_abs=1e-9 * context,
        )  # fmt: skip
    for alpha, k in ((0.0, 4), (0.6, 4), (0.9, 8)):
        most, wanted = _most_blocks(alpha, k)
        yield row_of(
            f"alpha {alpha:g}, K {k}, 100 + 400 tokens", "most blocks held: slots of rejected tokens are used again",
            wanted[1], most, evidence="event loop against theory", holds=wanted[0] <= most <= wanted[1],
            note=f"the text takes {wanted[0]:.0f}, with K + 1 slots ahead of it {wanted[1]:.0f}; alpha and K are ours",
        )  # fmt: skip


def _most_blocks(alpha: float, k: int) -> tuple[float, tuple[float, float]]:
    """The most KV blocks in use in a run of one request at a time, and the least and the most that theory allows."""
    prompt, output = 100, 400
    workload = ClosedLoop(prompt_tokens=np.full(4, prompt), output_tokens=np.full(4, output), concurrency=1)
    target: Any = StepTime(step_s=1e-2)
    draft: Any = StepTime(step_s=1e-3)
    spec = ReplicaSpec(
        cost=target,
        scheduler=OrcaPaged(max_sequences=1, watermark=0.0),
        kv_blocks=100,
        decoding=Speculative(method="draft_model", num_speculative_tokens=k, acceptance=Iid(alpha=alpha)),
        draft_cost=draft,
    )
    columns = run(Experiment(workload=workload, replicas=(spec,), router=RoundRobin(), seed=3))
    used = columns.iterations()["kv_blocks_used"]
    least, most = -(-(prompt + output - 1) // _BLOCK), -(-(prompt + output + k + 1) // _BLOCK)
    return float(used.max()), (float(least), float(most))
