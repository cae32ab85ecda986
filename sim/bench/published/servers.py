"""The settings that the servers behind published serving rows were given: a table beside the rows, and each row's own line of it.

The settings of a row become the settings of the stack's own scheduler (`Published` of its description), the share and the limits
of its memory, and the format of its cache. What the table leaves blank is the stack's default of the time.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwmodels.memory import engine_defaults
from hwmodels.stacks import default_stack, stacks
from hwmodels.stacks.description import Circumstances, Published, Stack
from policies.ranks import PromptBalance
from sim.scenario import named

if TYPE_CHECKING:
    from hwmodels.device import Device
    from policies.view import Scheduler

SETTINGS = "e2e_settings_agg.csv"
EXACT = ("model_path", "system", "backend", "backend_version", "precision", "isl", "osl", "concurrency", "tp_size",
         "attention_dp_size", "moe_tp_size", "moe_ep_size", "measured", "provenance", "speculation")  # fmt: skip
"""Columns that a row and its settings share."""
NEAR = ("model_path", "system", "backend", "precision", "isl", "osl", "concurrency", "tp_size", "attention_dp_size")
"""Those of a script of another day for the same point."""
SCRIPT = ("model_path", "system", "backend", "precision")
"""Those of a script of another day for the same model and machine."""
FORMAT = ("model_path", "system", "backend")
"""Those of a script for another format of the same model on the same machine."""
ANOTHER_DAY = "script of another day"
GAP_ANALYSIS = "internal-gap-analysis"
"""The provenance whose servers were started by a generator (`generated`)."""
GENERATED_SPARE_TOKENS = 1500
"""The spare tokens of its token budgets: C + ISL + 1500 (ai-dynamo/aiconfigurator, cli/backends/trtllm.py and the rule files of its
generator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings that a server was started with; None: its stack's default."""

    known_from: str
    """script: the launch script of the row's day; script of another day; script of another format; generator; defaults."""
    token_budget: int | None = None
    """vLLM max_num_batched_tokens, TensorRT-LLM max_num_tokens, SGLang chunked_prefill_size."""
    max_prefill_tokens: int | None = None
    """SGLang's."""
    max_sequences: int | None = None
    """vLLM max_num_seqs, TensorRT-LLM max_batch_size, SGLang max_running_requests."""
    graph_sequences: int | None = None
    """The largest decode step that a CUDA graph replays."""
    receive_interval: int = 1
    """SGLang scheduler_recv_interval."""
    stream_interval: int = 1
    wait_iterations: int = 0
    """TensorRT-LLM batch_wait_timeout_iters."""
    wait_tokens_share: float = 0.0
    """TensorRT-LLM batch_wait_max_tokens_ratio."""
    kv_precision: str | None = None
    """None: the model's own."""
    prefix_cache: bool = False
    memory_share: float | None = None
    mixed_chunk: bool = False
    """SGLang enable_mixed_chunk."""
    prompts_per_iteration: int | None = None
    """Whole prompts that an iteration computes at most; None: as many as its budget holds."""
    prompt_balance: PromptBalance | None = None
    """The balance of prompts between ranks of data-parallel attention."""
    asynchronous: bool = True
    """Iterations are planned while the one before runs."""

    def scheduler(self, stack: str, device: Device, *, tensor: int, concurrency: int, ranks: int = 1) -> Scheduler:
        """The stack's own scheduler with these settings and its own choices beside them, for at most *concurrency* requests in
        flight; *ranks*: of data-parallel attention, each with a scheduler."""
        described = described_by(stack)
        around = Circumstances(
            limits=engine_defaults(stack, device, tensor=tensor),
            decoding="autoregressive",
            draft_has_kv=False,
            data=ranks,
            max_positions=0,
            no_overlap=None,
        )
        assert described.choices is not None
        settings = published_by(stack).settings(asdict(self), around, concurrency)
        settings |= described.choices(settings, around)
        asked = {"policy": described.scheduler, **settings}
        if self.prompts_per_iteration is not None and "prefill_max_requests" not in settings:
            asked = {"policy": "cap", "max_prompts": self.prompts_per_iteration, "inner": asked}
        return named.policy(asked.pop("policy"), asked, named.SCHEDULERS, key="scheduler", method="plan")


def described_by(stack: str) -> Stack:
    """The description of *stack*, of that which it is like, or of the default stack where it is no server."""
    found = stacks()[stacks()[stack].like or stack]
    return found if found.published is not None else default_stack()


def published_by(stack: str) -> Published:
    """The servers of *stack* in published rows."""
    found = described_by(stack).published
    assert found is not None
    return found


def settings_of(row: Mapping[str, Any], folder: Path | None = None) -> ServerSettings:
    """The settings of the server behind *row*: its script's in *folder*'s settings table, or what else is known.

    A row without a script takes one of another day for the same point, or for the same model and machine at the nearest
    concurrency, and says so in `known_from`. Rows of a generator have the settings that it writes.
    """
    if str(row.get("provenance", "")) == GAP_ANALYSIS:
        return _generated(row)
    table = _table(str(folder / SETTINGS)) if folder is not None and (folder / SETTINGS).is_file() else None
    if table is not None:
        ways = {EXACT: "script", NEAR: ANOTHER_DAY, SCRIPT: ANOTHER_DAY, FORMAT: "script of another format"}
        for columns, known_from in ways.items():
            lines = table[columns].get(_key(row, columns))
            if lines:
                wanted = _number(row.get("concurrency")) or 0.0
                # The latest of the nearest loads.
                best = max(
                    lines, key=lambda line: (-abs((_number(line["concurrency"]) or 0) - wanted), line["measured"])
                )
                return replace(_of_script(best, known_from), prompt_balance=_balance(row))
    return ServerSettings(known_from="defaults", kv_precision=_cache_by_default(row), prompt_balance=_balance(row))


def _balance(row: Mapping[str, Any]) -> PromptBalance | None:
    balance = published_by(str(row["backend"])).prompt_balance
    if balance is None or (_number(row.get("attention_dp_size")) or 1) <= 1:
        return None
    return PromptBalance(**balance)


def _generated(row: Mapping[str, Any]) -> ServerSettings:
    """As aiconfigurator's generator writes them, one whole prompt an iteration beside the decodes.

    The budget C + ISL + 1500 would hold several short prompts; how TTFT grows with the concurrency says that they were not
    computed together (docs/validation.md).
    """
    published, prompt = published_by(str(row["backend"])), int(_number(row["isl"]) or 0)
    groups = int(_number(row.get("attention_dp_size")) or 1)
    clients = int(_number(row.get("concurrency")) or (_number(row.get("batch_size")) or 0) * groups)
    limits: dict[str, Any] = {
        "token_budget": clients + prompt + GENERATED_SPARE_TOKENS,
        "max_sequences": max(clients, 1),
        "max_prefill_tokens": prompt + GENERATED_SPARE_TOKENS,
    }
    mixes = published.mixed_chunk_since
    return ServerSettings(
        known_from="generator",
        **{name: limits[name] for name in published.generated},
        mixed_chunk=mixes is not None and _from_release(row, mixes),
        prompts_per_iteration=1,
        kv_precision=_cache_by_default(row),
        asynchronous=_from_release(row, published.overlap_since),
    )


def _from_release(row: Mapping[str, Any], first: tuple[int, ...]) -> bool:
    """Whether a row's server is of the release *first* or a later one, as are those that do not say theirs in numbers."""
    parts = str(row.get("backend_version", "")).split(".")[: len(first)]
    said = len(parts) == len(first) and all(part.isdigit() for part in parts)
    return not said or tuple(map(int, parts)) >= first


def _cache_by_default(row: Mapping[str, Any]) -> str | None:
    """The cache format of quantised checkpoints where the stack takes that over; None for the model's."""
    narrow = str(row.get("gemm_quant_mode", "")) in ("fp8", "fp8_block", "nvfp4") or str(row["precision"]) in (
        "fp8",
        "fp4",
    )
    return "fp8" if narrow and published_by(str(row["backend"])).narrows_cache else None


def _of_script(line: Mapping[str, str], known_from: str) -> ServerSettings:
    def whole(name: str) -> int | None:
        value = _number(line.get(name))
        return None if value is None else int(value)

    return ServerSettings(
        known_from=known_from,
        token_budget=whole("token_budget"),
        max_prefill_tokens=whole("max_prefill_tokens"),
        max_sequences=whole("max_sequences"),
        graph_sequences=whole("cuda_graph_batch"),
        receive_interval=whole("receive_interval") or 1,
        stream_interval=whole("stream_interval") or 1,
        wait_iterations=whole("wait_iterations") or 0,
        wait_tokens_share=_number(line.get("wait_tokens_share")) or 0.0,
        kv_precision=line["kv_dtype"] if line.get("kv_dtype", "") not in ("", "model") else None,
        prefix_cache=line.get("prefix_cache", "") == "True",
        memory_share=_number(line.get("memory_fraction")),
    )


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _key(row: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    def text(name: str) -> str:
        value = row.get(name, "none" if name == "speculation" else "")
        number = _number(value)
        if number is not None:
            return f"{number:g}"
        # One that is blank is 1 where it is a degree; DeepSeek-R1 and V3 name the same runs.
        return ("1" if name == "attention_dp_size" else "") if value in ("", None) or value != value else str(value)

    return tuple(text(name) for name in columns)


@functools.lru_cache(maxsize=4)
def _table(path: str) -> Mapping[tuple[str, ...], Mapping[tuple[str, ...], list[dict[str, str]]]]:
    """The settings by the columns of each way of joining them."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, str]]]] = {
        EXACT: {},
        NEAR: {},
        SCRIPT: {},
        FORMAT: {},
    }
    with Path(path).open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            for columns, lines in found.items():
                if columns is EXACT or line["speculation"] in ("", "none"):
                    lines.setdefault(_key(line, columns), []).append(line)
    return found


def warmed_up(row: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Whether the client of an InferenceX row warmed the server up: by its script, else by its day."""
    table = _table(str(folder / SETTINGS)) if folder is not None and (folder / SETTINGS).is_file() else None
    lines = table[EXACT].get(_key(row, EXACT)) if table is not None else None
    if lines and (given := _number(lines[0].get("warmup_per_client"))) is not None:
        return given > 0
    day = str(row.get("measured", ""))
    return day >= "2026-01-21" or day in ("", "nan")
