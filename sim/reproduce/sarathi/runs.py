"""The runs of all experiments of this group: requests, replicas, and the figures read off them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hwmodels.cost import CostModel
from policies.published import OrcaPaged, Static
from policies.routers import LeastOutstanding, RoundRobin
from policies.sarathi import DecodeMaximal
from policies.view import Scheduler
from sim.engine import Columns, Experiment, ReplicaSpec, run
from sim.reproduce.sarathi.machines import deployment
from sim.theory.published import published as packaged
from workloads import Trace

AMPLE_BLOCKS = 1 << 24
"""KV blocks where batches are limited by their number of sequences, as in SARATHI."""
MEASURED = "event loop against measurement"
THEORY = "event loop against theory"
PRINT = "closed form against print"
INPUT = "input returned"
SHOWN = "shown only"


def published(name: str) -> list[dict[str, str]]:
    """Rows of one table of published numbers, `data/sarathi_NAME.csv`."""
    return packaged(f"sarathi_{name}")


def cost_of(
    model: str, machine: str, tensor: int = 1, pipeline: int = 1, factory: Callable[..., Any] | None = None
) -> CostModel:
    """The cost model of a deployment in fp16, by the account of its machine or by *factory*."""
    return deployment(model, machine, tensor, pipeline, factory).cost


def replay(
    cost: CostModel,
    scheduler: Scheduler,
    trace: Trace,
    *,
    replicas: int = 1,
    lanes: int | None = None,
    kv_blocks: int = AMPLE_BLOCKS,
) -> Columns:
    """Run *trace* on equal replicas."""
    spec = ReplicaSpec(cost=cost, scheduler=scheduler, kv_blocks=kv_blocks, micro_batches=lanes)
    router = RoundRobin() if replicas == 1 else LeastOutstanding()
    return run(Experiment(workload=trace, replicas=(spec,) * replicas, router=router))


def at_once(prompts: Any, decodes: Any) -> Trace:
    """Requests that are all there from the start, each with so many decodes behind its prompt.

    A request here emits one token more than the paper's D decodes: its first token is computed with the prompt.
    """
    prompts, decodes = np.broadcast_arrays(np.asarray(prompts, np.int64), np.asarray(decodes, np.int64))
    return Trace(arrival_ns=np.zeros(len(prompts), np.int64), prompt_tokens=prompts, output_tokens=decodes + 1)


def iteration_s(cost: CostModel, prompt: int, decodes: int, context: int = 1024) -> float:
    """Seconds of the iteration that computes a prompt and a step of so many others, found by running it.

    The others have *context* tokens in their step, the one it adds included.
    """
    # The prompt arrives while those of the decodes are computed, and so joins their first step.
    lengths = [context - 1] * decodes + ([prompt] if prompt else [])
    arrivals = [0] * decodes + ([1 if decodes else 0] if prompt else [])
    prompts = np.array(lengths, np.int64)
    trace = Trace(
        arrival_ns=np.array(arrivals, np.int64), prompt_tokens=prompts, output_tokens=np.full_like(prompts, 2)
    )
    iterations = replay(cost, OrcaPaged(len(lengths)), trace).iterations()
    wanted = (iterations["prefill_tokens"] == prompt) & (iterations["decode_tokens"] == decodes)
    return float(iterations["duration_ns"][np.flatnonzero(wanted)[0]]) * 1e-9


def prefill_s(cost: CostModel, prompt: int, chunk: int) -> tuple[float, int]:
    """Seconds to compute a prompt alone in chunks, and the KV tokens that its chunks read."""
    trace = at_once([prompt], 0)
    columns = replay(cost, DecodeMaximal(chunk, 1, align=False), trace)
    return float(columns.requests["finish_ns"][0]) * 1e-9, int(columns.replicas[0].spans["prefill_kv_tokens"].sum())


def batch_s(cost: CostModel, batch: int, tokens: int) -> float:
    """Seconds to compute so many prompts of so many tokens in one iteration."""
    trace = at_once(np.full(batch, tokens), 0)
    return float(replay(cost, Static(batch), trace).iterations()["duration_ns"][0]) * 1e-9


def steady_rate(columns: Columns, batch: int) -> float:
    """Requests a second from a quarter of the batches to three quarters: neither filling nor draining counts."""
    finish = np.sort(columns.requests["finish_ns"])
    batches = len(finish) // batch
    first, last = batches // 4 * batch, batches * 3 // 4 * batch
    return (last - first) / float(finish[last - 1] - finish[first - 1]) * 1e9


def stream(cost: CostModel, scheduler: Scheduler, batch: int, prompt: int, decodes: int, batches: int = 40) -> Columns:
    """A stream of equal requests, *batches* times *batch* of them."""
    return replay(cost, scheduler, at_once(np.full(batches * batch, prompt), decodes))


def throughput(
    cost: CostModel, scheduler: Scheduler, batch: int, prompt: int, decodes: int, batches: int = 40
) -> float:
    """Requests a second of a stream of equal requests."""
    return steady_rate(stream(cost, scheduler, batch, prompt, decodes, batches), batch)


class Gain(NamedTuple):
    """SARATHI over the baseline at one ratio of prompt to decodes."""

    prompt: int
    decodes: int
    gain: float

    @property
    def pd_ratio(self) -> float:
        return self.prompt / self.decodes


def gain(cost: CostModel, scheduler: Scheduler, batch: int, tokens: int, decodes: int, batches: int = 40) -> Gain:
    """Throughput of *scheduler* over prefill-only and decode-only batches, requests of *tokens* tokens in all.

    The baseline's prefill-only batches are of one prompt, as in table 2 of the paper.
    """
    prompt = tokens - decodes
    base = throughput(cost, Static(batch, max_prompts=1), batch, prompt, decodes, batches=8)
    return Gain(prompt, decodes, throughput(cost, scheduler, batch, prompt, decodes, batches) / base)


def gains_over_pd(
    cost: CostModel, batch: int, tokens: int, chunk: int, decodes: Sequence[int], batches: int = 40
) -> list[Gain]:
    """`gain` of SARATHI with chunk *chunk* for each number of decodes."""
    return [gain(cost, DecodeMaximal(chunk, batch), batch, tokens, d, batches) for d in decodes]


def decodes_at(tokens: int, pd_ratio: float) -> int:
    """Decodes of a request of *tokens* tokens with this ratio of prompt to decodes, rounded."""
    return round(tokens / (pd_ratio + 1))


def around(centre: int, tokens: int) -> list[int]:
    """Numbers of decodes to sweep: every one near *centre*, and further off in steps."""
    near = range(max(1, centre - 4), centre + 5)
    far = [round(centre * factor) for factor in (0.35, 0.5, 0.65, 0.8, 1.25, 1.5, 2.0, 3.0)]
    return sorted({d for d in (*near, *far) if 1 <= d < tokens // 2})
