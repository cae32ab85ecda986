"""KV blocks that engines' published logs report, beside those of `hwmodels.memory`, and the fit of its constants to them.

Each row of memory_logs.csv is one deployment; `SOURCES` says where its figures were published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy as np

from hwmodels import memory
from hwmodels.cache import paged
from hwmodels.deployment import Deployment, deploy
from hwmodels.memory import GIB, LargestBatch, MemoryPlan, StackMemory, memory_plan, stack_memory
from hwmodels.precision import precision
from hwmodels.tables import packaged_rows

TOLERANCE = 0.03
"""The tolerance as a share of the blocks, for a deployment whose flags are all published."""
SOURCES = {
    "empirical": "llm-d-planner 0.3.3 (PyPI sdist, Apache-2.0), docs/empirical-vllm-memory-results.md",
    "accuracy": "llm-d-planner 0.3.3 (PyPI sdist, Apache-2.0), docs/accuracy/vllm-v0.19.0-accuracy-report.md",
    "kv_tiers_lustre": "llm-d, guides/tiered-prefix-cache/benchmark-results/vllm-qwen3-32b-h100-lustre.md",
    "kv_tiers_cpu": "llm-d, guides/tiered-prefix-cache/benchmark-results/vllm-qwen3-32b-h100.md",
    "routing_capacity73": "llm-d-kv-cache, benchmarking/73-capacity/README.md",
    "pd_multitier": "llm-d, guides/pd-disaggregation/benchmark-results/vllm-gpt-oss-120b-h200-multi-tier.md",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One deployment as its log describes it; GiB are of one GPU, and NaN where the log does not print them."""

    name: str
    source: str
    release: str
    formats: tuple[str, ...]
    """The formats of weights and cache, where the log sets them."""
    rules: StackMemory
    deployment: Deployment
    share: float
    tokens: int
    sequences: int
    block_tokens: int
    weight_gib: float
    activation_gib: float
    context_gib: float
    """Everything that PyTorch did not allocate, communicator included."""
    kv_gib: float
    kv_tokens: int | None
    device_gib: float
    printed: str
    """The figures that the number of blocks comes from: `kv_tokens`, `kv_gib`, `parts` (the share less all printed parts), or
    `hybrid`."""
    assumed: str
    """Flags that the source does not state, and what is taken for them."""

    def plan(self, rules: StackMemory | None = None) -> MemoryPlan:
        """As predicted."""
        return memory_plan(
            self.deployment,
            rules or self.rules,
            largest=LargestBatch(self.tokens, self.sequences),
            share=self.share,
            block_tokens=self.block_tokens,
        )

    def predicted_blocks(self, rules: StackMemory | None = None) -> int:
        """The blocks of the first stage, whose parts the logs of pipelines print."""
        plan = self.plan(rules)
        if self.printed == "hybrid":
            assert plan.logged is not None
            return plan.logged["blocks"]
        return int(plan.stages[0].kv_bytes // self._block_bytes)

    @property
    def measured_blocks(self) -> int:
        if self.printed == "hybrid":
            assert self.kv_tokens is not None
            longest = self.deployment.model.max_positions
            assert longest is not None
            # As vLLM 0.32.0 prints it: v1/core/kv_cache_utils.py `get_kv_cache_capacity`.
            pages = paged(self.deployment.stage_caches()[0], self.block_tokens)
            return round(self.kv_tokens / longest * pages.peak_blocks(longest, self.tokens))
        if self.kv_tokens is not None:
            return self.kv_tokens // self.block_tokens
        gib = self.kv_gib
        if self.printed == "parts":
            gib = self.share * self.device_gib - self.weight_gib - self.activation_gib - self.context_gib
        return int(gib * GIB // self._block_bytes)

    @property
    def _block_bytes(self) -> float:
        _, token_bytes, _ = self.deployment.stage_bytes()[0]
        return token_bytes * self.block_tokens


@cache
def published_logs() -> tuple[Log, ...]:
    """All deployments of memory_logs.csv."""
    found = []
    for row in packaged_rows("memory_logs.csv"):
        rules = stack_memory(row["stack"], row["release"])
        assert rules is not None
        found.append(
            Log(
                name=row["deployment"],
                source=SOURCES[row["source"]],
                release=row["logged_release"],
                formats=tuple(
                    text for text in (row["precision"], row["kv_precision"] and f"KV {row['kv_precision']}") if text
                ),
                rules=rules,
                deployment=deploy(
                    model=row["model"],
                    hardware=row["hardware"],
                    precision=row["precision"] or None,
                    kv_precision=row["kv_precision"] or None,
                    parallel={"tensor": int(row["tensor"]), "pipeline": int(row["pipeline"])},
                ),
                share=float(row["share"]),
                tokens=int(row["tokens"]),
                sequences=int(row["sequences"]),
                block_tokens=int(row["block_tokens"]),
                weight_gib=float(row["weight_gib"] or "nan"),
                activation_gib=float(row["activation_gib"] or "nan"),
                context_gib=float(row["context_gib"] or "nan"),
                kv_gib=float(row["kv_gib"] or "nan"),
                kv_tokens=int(row["kv_tokens"]) if row["kv_tokens"] else None,
                device_gib=float(row["device_gib"] or "nan"),
                printed=row["printed"],
                assumed=row["assumed"],
            )
        )
    return tuple(found)


def fitted(release: str, without: str | None = None) -> StackMemory:
    """The constants of vLLM's *release* fitted to the parts that its logs print, no log of the model *without* among them.

    Activations: least squares of what a logit and a hidden tensor add (0.11), or the median number of hidden tensors beside the
    logits, whose bytes the source gives (0.19). Context and communicator: medians.
    """
    logs = [log for log in published_logs() if log.rules is not None and log.rules.release == release]
    base = logs[0].rules
    assert base is not None
    logs = [log for log in logs if log.deployment.model.name != without]
    sampled = [
        log for log in logs if log.activation_gib == log.activation_gib and log.deployment.parallel.pipeline == 1
    ]
    rows, hidden, activations = [], [], []
    for log in sampled:
        spec = log.deployment.model
        element = precision(spec.base_precision).element_bytes
        bare = replace(base, logit_bytes=0.0, hidden_copies=0.0)
        known = memory.sampler_bytes(spec, log.deployment.device, bare, log.tokens, log.sequences)
        if base.workspace_kept:
            known += memory.workspace_bytes(spec, log.deployment.parallel, log.tokens)
        rows.append(min(log.sequences, log.tokens) * spec.vocab)
        hidden.append(log.tokens * spec.hidden * element)
        activations.append(log.activation_gib * GIB - known)
    if "logs" in base.sources["logit_bytes"]:
        (logit, copies), *_ = np.linalg.lstsq(np.column_stack([rows, hidden]), np.array(activations), rcond=None)
    else:
        logit = base.logit_bytes
        copies = median(
            (activation - logit * row) / tensor
            for activation, row, tensor in zip(activations, rows, hidden, strict=True)
        )
    others = [log for log in logs if log.context_gib == log.context_gib]
    alone = median(log.context_gib for log in others if log.deployment.parallel.n_devices == 1) * GIB
    pipelined = [log.context_gib * GIB for log in others if log.deployment.parallel.pipeline > 1]
    worker = median(pipelined) if pipelined else alone
    communicator = {}
    for degree in base.communicator_bytes:
        found = [log.context_gib * GIB - worker for log in others if log.deployment.parallel.tensor == degree]
        communicator[degree] = median(found) if found else base.communicator_bytes[degree]
    return replace(
        base,
        logit_bytes=float(logit),
        hidden_copies=float(copies),
        context_bytes=alone,
        worker_bytes=worker,
        communicator_bytes=communicator,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A deployment, its blocks as logged, and the errors of both predictions."""

    log: Log
    measured: int
    predicted: int
    unseen: int | None
    """With constants that no log of its model went into; None for a release without a fit of its own."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def unseen_error(self) -> float:
        return (self.predicted if self.unseen is None else self.unseen) / self.measured - 1


def table() -> list[Row]:
    """Every deployment, in the order of the file."""
    found = []
    for log in published_logs():
        unseen = None
        if any("fitted" in source for source in log.rules.sources.values()):
            unseen = log.predicted_blocks(fitted(log.rules.release, without=log.deployment.model.name))
        found.append(Row(log=log, measured=log.measured_blocks, predicted=log.predicted_blocks(), unseen=unseen))
    return found


def within(rows: Sequence[Row]) -> str:
    """The number of deployments with published figures and flags that are within `TOLERANCE`, in a sentence."""
    sure = [row for row in rows if not row.log.assumed]
    own = [row for row in sure if row.log.printed != "parts"]
    good = [row for row in sure if abs(row.unseen_error) <= TOLERANCE]
    good_own = [row for row in own if abs(row.unseen_error) <= TOLERANCE]
    return (
        f"Within {TOLERANCE:.0%}, with constants fitted without any log of the same model: {len(good)} of {len(sure)} "
        f"deployments whose flags are published, {len(good_own)} of {len(own)} of those that print the cache itself (two of "
        "these differ from another in the format of the cache alone)."
    )


_INTRO = """\
Blocks of the KV cache as vLLM's logs report them, and as `memory:` of a scenario with the same flags gives them (`python -m
benchmarks.kv_blocks`). The constants of a stack's memory.toml are fitted to the parts that the logs print, never to the blocks;
"unseen" is with constants fitted without any log of the same model. The forms of the account were chosen with all logs in view.
Where a source gives no limits, they are vLLM's defaults on an H100 (1,024 sequences, 8,192 tokens). Logs of SGLang and TensorRT-LLM
were not at hand: their accounts follow their sources and were compared with nothing."""
_MISSES = """
The misses: gpt-oss-120b on one H100 has 3.3 GiB of cache beside 64 GiB of weights, of which 0.1 GiB are off; for Qwen3-32B in
September 2025 neither release nor flags are known. The row of gpt-oss compares blocks of the pool that vLLM's groups of layers
share.
"""


def markdown() -> str:
    """The section of docs/validation.md: every deployment, and what is assumed of some."""
    rows = table()
    lines = [
        _INTRO,
        "",
        within(rows),
        "",
        "| deployment | release | share | blocks | predicted | error % | unseen % | blocks from |",
        "| --- | --- | --: | --: | --: | --: | --: | --- |",
    ]
    kinds = {
        "kv_tokens": "tokens printed",
        "kv_gib": "GiB printed",
        "parts": "share less the printed parts",
        "hybrid": "tokens printed, two groups of layers",
    }
    notes = []
    for row in rows:
        log = row.log
        mark = ""
        if log.assumed:
            notes.append(f"{log.name}: {log.assumed}.")
            mark = " (assumed)"
        d = log.deployment
        gpus = f"{d.parallel.n_devices} x {d.device.name}"
        layout = f", pipeline {d.parallel.pipeline}" if d.parallel.pipeline > 1 else ""
        formats = "".join(f", {each}" for each in log.formats)
        lines.append(
            f"| {d.model.name}{formats} on {gpus}{layout} | {log.release} | {log.share:g}{mark} | {row.measured:,} | "
            f"{row.predicted:,} | {100 * row.error:+.1f} | {100 * row.unseen_error:+.1f} | {kinds[log.printed]} |"
        )
    lines.append("\nAssumed, and not counted above:\n")
    lines += [f"* {note}" for note in notes]
    lines.append(_MISSES)
    lines.append("Sources:\n")
    lines += [f"* {source}" for source in SOURCES.values()]
    return "\n".join(lines)
