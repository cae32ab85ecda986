"""Every key that a scenario file may hold, with its bounds and its default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hwmodels.experts import ExpertLayout
from hwmodels.graphs import GraphSettings
from hwmodels.precision import PRECISIONS
from hwmodels.stacks import default_scheduler, default_stack, stacks
from policies.ranks import PromptBalance
from sim.scenario.adapters import AdapterSettings
from sim.scenario.chosen import Distribution, Eviction, Own, Process, Router, Scheduler
from sim.scenario.decoding import DecodingSettings
from sim.scenario.encoding import EncodeSettings
from sim.scenario.fleet import Autoscale, Failures
from sim.scenario.section import FilePath, MayBeFile, ModelName, OneOf, Section
from sim.scenario.structured_output import StructuredOutput
from sim.scenario.tiers import Degraded, Fabric, Tier
from sim.text import unknown
from workloads import FORMATS, Rollout, ServeGen, SharedPrefix
from workloads.components import ComponentOrder
from workloads.exports import MissingOutput

TraceFormat = Annotated[str, OneOf("auto", *(name for name in FORMATS if not name.startswith("azure_functions")))]
WeightPrecision = Annotated[str, OneOf(*PRECISIONS)]
KvPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
_STACKS = tuple(stacks())
BUILT_IN_TRACES = ("conversation",)


def _stack_or_file(value: str) -> str:
    if value not in _STACKS and not value.endswith(".toml"):
        raise PydanticCustomError("literal_error", "not a serving stack", {"expected": ", ".join(_STACKS)})
    return value


StackOrFile = Annotated[
    str,
    AfterValidator(_stack_or_file),
    WithJsonSchema({"anyOf": [{"enum": list(_STACKS)}, {"type": "string", "pattern": r"\.toml$"}]}),
    MayBeFile(names=_STACKS),
]
"""A stack by name, or a file that `rooftrace bench fit` wrote."""
_CONNECTORS = tuple(stack.connector for stack in stacks().values() if stack.connector is not None)
_HANDOVERS = (*(name for name, stack in stacks().items() if stack.handover is not None), "dynamo", "splitwise")
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Parallel(Section):
    """The layout of one replica over tensor x pipeline x data GPUs."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """GPUs that share every layer; under `data`, those of a rank, which share its attention."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Stages of consecutive layers."""
    data: Annotated[int, Field(ge=1)] = 1
    """Ranks of data-parallel attention, for mixtures of experts: each with sequences, a queue, a scheduler and KV memory of its
    own, on `tensor` GPUs of each stage. All step together, and a stage's experts are spread over the GPUs of all its ranks."""
    expert: Annotated[int, Field(ge=1)] = 1
    """Groups of the tensor x data GPUs that hold different experts; within a group each expert is split by columns. 1: every expert
    is split over all."""

    decode_context: Annotated[int, Field(ge=1)] = 1
    """GPUs of the `tensor` that share the KV of each sequence, token by token, where each would have the same key-value heads
    (vLLM's `--decode-context-parallel-size`): as many times the tokens fit, and decodes read each token on one of them."""
    prefill_context: Annotated[int, Field(ge=1)] = 1
    """Groups of `tensor` GPUs that share the tokens of every prompt, and the decodes (vLLM's `--prefill-context-parallel-size`).
    Each has the whole KV cache."""
    kv_interleave: Annotated[int, Field(ge=1)] = 1
    """Tokens that follow each other on one GPU of `decode_context` (vLLM's `--cp-kv-cache-interleave-size`)."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data * self.prefill_context


class Memory(Section):
    """The part of the GPUs' memory that holds the KV cache, and what happens when it runs out."""

    gpu_memory_utilization: Share | None = None
    """vLLM: share of each GPU's memory that the server may take, everything included. Where it is left out, the stack's default;
    `eager`, `ideal` and `cost_model: roofline` share it between weights and KV cache alone, 0.9 by default."""
    mem_fraction_static: Share | None = None
    """SGLang: share of what is free before loading that weights and KV cache take; where it is left out, from the device."""
    free_gpu_memory_fraction: Share | None = None
    """TensorRT-LLM: share of what weights, activations and buffers leave free that the KV cache takes."""
    release: Annotated[str, Field(min_length=1)] | None = None
    """The release of the serving stack, for its account of memory ("0.19.1"): the newest known that is not after it (0.11, 0.19 and
    0.32 of vLLM); where it is left out, the newest."""
    reserve_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Bytes on each GPU kept out of that share beyond what the stack sets aside: other programs, an encoder."""
    kv_blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks of the KV cache, null block included, in place of what the memory has room for (vLLM's num_gpu_blocks_override)."""
    block_tokens: Annotated[int, Field(ge=1)] | None = None
    """Where it is left out, the stack's: 16 for vLLM, 1 for SGLang, 32 for TensorRT-LLM."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and answer together that the server takes (vLLM's `--max-model-len`): an answer ends there, and a prompt
    that leaves no room for one is rejected. Where it is left out, the model's own context, beyond which requests are rejected."""
    prefix_caching: bool | None = None
    """Whether KV blocks are found again by prompts that begin alike, where the trace says which do; where it is left out, as the
    stack has it: on for vLLM, SGLang and TensorRT-LLM, off for `eager` and `ideal`."""
    eviction: Eviction | None = None
    """Which cached blocks go first when new ones are needed; where it is left out, the least recently used ones, as in vLLM and
    SGLang."""
    tiers: list[Tier] = Field(default_factory=list)
    """Memory behind the KV cache, nearest first: what the device has given up is loaded from there in place of being computed."""
    preemption: Literal["recompute", "swap", "none"] = "recompute"
    """`recompute`: the newest sequences give their KV back and are computed again; `swap`: it is moved to the `host` tier and comes
    back from there; `none`: running out is an error."""

    @property
    def shares(self) -> dict[str, float]:
        """The shares that are given, by their stacks' names."""
        names = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
        return {name: given for name in names if (given := getattr(self, name)) is not None}


class StepHardware(Section):
    """Hardware by the measured times of whole steps, whatever engine and device they are of (docs/steps.md)."""

    short: ClassVar[str | None] = "device"

    steps: FilePath
    """A table of steps: a whole-forward table of aiconfigurator or AISimulate (.parquet, .csv), a recording of vllm-vcr (.jsonl,
    .jsonl.gz), or a CSV with the columns batch_size, new_tokens, cached_tokens (of each sequence) and latency_ms."""
    device: FilePath | None = None
    """The device, for its memory, links, power and price; where it is left out, the one that the file names."""
    where: dict[str, str | int | bool] | None = None
    """Values of columns that single out one deployment of a file of several: {tp: 4, gemm_quant_mode: fp8}."""
    host_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that each step takes beside what was measured, such as batch building and sampling around a forward pass."""


class Conversations(Section):
    """Conversations of several turns: a prompt is the system prompt, all that was said and answered before, and something new."""

    sessions: Annotated[int, Field(ge=1)]
    turns: Distribution
    user_tokens: Distribution
    """The tokens that a person adds with each turn."""
    answer_tokens: Distribution
    system_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    """The same for all sessions."""
    mean_think_s: Annotated[float, Field(ge=0)] = 0.0
    """The time from an answer to the next prompt, exponential."""
    block_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens that one id of the generated prompts and answers stands for."""


class Predictor(Section):
    """Predicted output lengths, for schedulers that sort by them."""

    error: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm of guess over truth: 0 knows all, 0.7 is wrong by a factor of two one time in three."""


class _RequestMedia(Section):
    """Images or clips that are drawn for each request beside its text. Their tokens come on top of `prompt_tokens`."""

    per_request: Distribution = Distribution.model_validate({"distribution": "fixed", "tokens": 1})
    distinct: Annotated[int, Field(ge=1)] | None = None
    """Different ones that there are; where it is left out, all are different."""
    zipf: Annotated[float, Field(ge=0)] = 0.0
    """The i-th of the different ones, from 1, is asked for in proportion to i to the power of minus this; 0: all equally often."""
    after_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of text that stand ahead of them, such as a system prompt's; they stand at the end of a shorter text."""

    @model_validator(mode="after")
    def _popular_among_some(self) -> Self:
        if self.zipf and self.distinct is None:
            raise ValueError("zipf says how often each of the different ones is asked for; give distinct, their number")
        return self


class RequestImages(_RequestMedia):
    """Images that are drawn for each request."""

    width: Distribution
    """Pixels of each image."""
    height: Distribution


class RequestAudio(_RequestMedia):
    """Clips of speech that are drawn for each request. They stand behind images that are after as many tokens of text."""

    milliseconds: Distribution
    """The length of each clip."""


def _as_text(value: Any) -> Any:
    """A date of YAML as it would be written in quotes."""
    return value.isoformat() if isinstance(value, date) else value


Moment = Annotated[Annotated[str, Field(min_length=1)] | float, BeforeValidator(_as_text)]
"""A date with a time, or seconds from the first row of a trace."""


class _Source(NamedTuple):
    """A workload says in one of these ways which requests are sent and when; a way needs some settings and takes others."""

    says: str
    needs: tuple[str, ...] = ()
    """Settings that have to be beside it."""
    lacks: str = ""
    """The error where some of them are not."""
    takes: tuple[str, ...] = ()
    """Settings that may be."""


_LENGTHS = ("prompt_tokens", "output_tokens")
_AMOUNTS = ("requests", "duration_s")
_OF_FILES = (
    *("format", "sort", "drop_empty", "spread_arrivals", "columns", "missing_output", "keep_failed"),
    *("tokenizer", "since", "until", "component_order"),
)
_WHEN = "say in arrivals when {what} start (poisson, deterministic, ...)"
_SOURCES = {
    "shared_prefix": _Source("shared_prefix already says what is sent", takes=("limit",)),
    "conversations": _Source(
        "conversations already says what is sent", ("arrivals",), _WHEN.format(what="conversations"), ("limit",)
    ),
    "servegen": _Source("servegen already says what is sent", takes=("limit",)),
    "rollout": _Source("a rollout already says what is sent", _LENGTHS, "a rollout also needs {}"),
    "generator": _Source("generator already says what is sent", takes=("limit",)),
    "sessions": _Source(
        "sessions already say what is sent",
        ("arrivals",),
        f"sessions have no common clock; {_WHEN.format(what='they')}",
        ("limit", "block_tokens"),
    ),
    "protocol": _Source("a protocol says who sends what when", ("concurrency", *_LENGTHS), "a protocol also needs {}"),
    "trace": _Source(
        "a trace says what is sent when, and limit shortens it", takes=("limit", "arrivals", "requests", *_OF_FILES)
    ),
}
_DRAWN = _Source(
    "this workload is generated", ("arrivals", *_LENGTHS), "a generated workload also needs {}", ("limit", *_AMOUNTS)
)
_OF_SOURCES = (*_SOURCES, "concurrency", "arrivals", *_LENGTHS, *_AMOUNTS, "limit", "block_tokens")
_MISPLACED = {
    "concurrency": "{name} is the clients of a protocol; give protocol, or arrivals: {{process: closed_loop, concurrency: ...}}",
    "block_tokens": "{name} is about the blocks of sessions; give sessions or leave it out",
    **dict.fromkeys(_OF_FILES, "{name} is about reading a trace, and {source}; leave it out"),
}
"""Errors about some settings that are given beside a source that does not take them."""
_TOO_MUCH = "{source}, so {names} cannot be given too; leave out one or replace the whole section (--set 'workload={{{whole}}}')"
_ONE_AMOUNT = "give requests or duration_s, one of the two"
_NO_SOURCE = (
    "give a trace, sessions, or a generator: shared_prefix, conversations, servegen, rollout, or arrivals, prompt_tokens, "
    "output_tokens and requests or duration_s"
)


class Gateway(Section):
    """The delay of a gateway before its router sees a request."""

    delay_s: Annotated[float, Field(ge=0)] = 0.0
    delay_s_per_token: Annotated[float, Field(ge=0)] = 0.0
    """For each prompt token."""
    tokenizes: bool = False
    """Whether it brings prompts to tokens, as llm-d's exact index needs them: for as long as the engines' front end, which does it
    again."""


class Workload(Section):
    """The requests that arrive: a trace, a generator, or the lengths of a trace under generated arrivals."""

    trace: Annotated[str, Field(min_length=1), MayBeFile(names=BUILT_IN_TRACES, several=True)] | None = None
    """A file, a folder or a pattern such as logs/*.jsonl, or the name of a built-in workload (conversation)."""
    sessions: FilePath | None = None
    """A file of sessions, of which each request is sent when the answers before it have come and its delay is over; `arrivals` says
    when sessions start."""
    shared_prefix: SharedPrefix | None = None
    """Groups that share a system prompt, in stages of load with rates of their own."""
    conversations: Conversations | None = None
    """Conversations whose next prompt contains the last answer; `arrivals` says when they start."""
    servegen: ServeGen | None = None
    """Production traffic by client, its rate, burstiness and lengths by the hour."""
    rollout: Rollout | None = None
    """Steps of reinforcement learning: prompts with several answers each, of which `prompt_tokens` and `output_tokens` say the
    lengths."""
    generator: Own | None = None
    """A kind of workload of your own: package.module:Class or a class method (`batches:Batches.equal`), with its settings."""
    block_tokens: Annotated[int, Field(ge=1)] | None = None
    """Prompt tokens that one of a session's block ids stands for; where it is left out, what the lengths say."""
    format: TraceFormat = "auto"
    sort: bool = False
    """Accept a file whose arrivals are out of order."""
    drop_empty: bool = False
    """Leave out rows with neither prompt nor output tokens."""
    spread_arrivals: bool = False
    """Spread arrivals that the log rounded, to whole seconds and the like, evenly over that time, drawn by the seed."""
    columns: dict[str, Annotated[str, Field(min_length=1)]] | None = None
    """The column of each field of a trace that a tool exported, where its name does not say: arrival, prompt_tokens, output_tokens,
    end, duration, max_tokens, encoder_tokens, model, session, prompt, answer, status, ... to a column, or a dotted path into JSON.
    Behind the column of a time, `:ms` says its unit and `:%d.%m.%Y %H:%M:%S` how its dates are written."""
    missing_output: MissingOutput | None = None
    """The fate of requests of an exported trace without an output length: left out (drop, as where nothing is said), given as
    many tokens as their client allowed (max_tokens), or lengths drawn from those of the others (draw)."""
    keep_failed: bool = False
    """Keep failed requests of an exported trace that have tokens."""
    tokenizer: FilePath | None = None
    """A tokenizer.json that counts the tokens of a trace's texts; without it they are counted approximately."""
    since: Moment | None = None
    """Requests of a trace that came before are left out: a date such as 2026-11-03T09:00 (UTC where it says no zone), or seconds
    from the first row. Time runs from the first request that is taken."""
    until: Moment | None = None
    """Requests of a trace that came then or later are left out; where times are in order, nothing behind is read."""
    component_order: ComponentOrder = "as_sent"
    """The order of a prompt's components, in a trace that names these: as they were sent, or as earlier prompts had them (seen), so
    that a prefix cache finds more."""
    arrivals: Process | None = None
    prompt_tokens: Distribution | None = None
    output_tokens: Distribution | None = None
    requests: Annotated[int, Field(ge=1)] | None = None
    """The number of requests to generate."""
    duration_s: Seconds | None = None
    """The time over which requests arrive, in place of a number of `requests`."""
    protocol: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = None
    """The behaviour of a benchmark's clients (inferencex, genai-perf, ...), by name or by its keys, in place of `arrivals` and
    `requests`; the lengths are then the nominal ones, two numbers."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Clients of the protocol."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Output tokens that clients allow each request, for schedulers that keep memory for them; where it is left out, what the
    trace's column of that name says or, without one, as many as it emits, which no server knows."""
    rate_scale: Annotated[float, Field(gt=0)] = 1.0
    """Arrivals come this many times as fast."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Keep the first requests only."""
    predictor: Predictor | None = None
    """Guesses of output lengths, drawn around the truth; where it is left out, the trace's column `predicted_tokens`, if any."""
    images: RequestImages | None = None
    """Images in prompts; where it is left out, the trace's column `images`, if any."""
    audio: RequestAudio | None = None
    """Clips of speech in prompts; where it is left out, the trace's column `audio_s`, if any."""
    models: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Models that the requests ask for, drawn at random in proportion to these shares; in place of what a trace asks for."""

    @field_validator("models")
    @classmethod
    def _some_share(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and (not all(value) or sum(value.values()) <= 0):
            raise ValueError(f"give models by name with shares that are not all 0; got {value!r}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        """Check what the source of the requests needs and what it does not take; the first that is given is the source."""
        given = [name for name in _OF_SOURCES if getattr(self, name) is not None]
        name = next((name for name in _SOURCES if name in given), "")
        source = _SOURCES.get(name, _DRAWN)
        if misplaced := [
            each for each in (*given, *self.about_files()) if each not in (name, *source.needs, *source.takes)
        ]:
            told = _MISPLACED.get(misplaced[0], _TOO_MUCH)
            whole = f"trace: {self.trace}" if name == "trace" else "..."
            names = " and ".join(misplaced)
            raise ValueError(told.format(source=source.says, name=misplaced[0], names=names, whole=whole))
        missing = [each for each in source.needs if each not in given]
        if source is _DRAWN:
            amounts = [each for each in _AMOUNTS if each in given]
            missing += [] if amounts else [" or ".join(_AMOUNTS)]
            if len(amounts) > 1 or len(missing) > len(source.needs):
                raise ValueError(_ONE_AMOUNT if amounts else _NO_SOURCE)
        if missing:
            raise ValueError(source.lacks.format(", ".join(missing)))
        self._check_values()
        return self

    def _check_values(self) -> None:
        """Check what the source's settings say together with others."""
        if self.shared_prefix is not None and len(self.shared_prefix.stages) > 1 and self.rate_scale != 1.0:
            raise ValueError("rate_scale does not reach stages, which begin when others have ended; change their rates")
        if self.spread_arrivals and self.arrivals is not None:
            raise ValueError(
                "spread_arrivals is of the times of a trace, and arrivals draws others; leave out one of them"
            )
        for name in _LENGTHS if self.protocol is not None else ():
            if getattr(self, name).distribution != "fixed":
                raise ValueError(
                    f"{name} of a protocol is a number, the nominal length; how it varies is the protocol's"
                )
        if self.duration_s is not None and self.arrivals is not None and self.arrivals.process == "closed_loop":
            raise ValueError(
                "closed-loop clients send as fast as they are answered; give requests in place of duration_s"
            )

    def about_files(self) -> dict[str, Any]:
        """The settings about reading a trace's file that are not at their defaults."""
        fields = type(self).model_fields
        return {name: value for name in _OF_FILES if (value := getattr(self, name)) != fields[name].default}


SLO_MEASURES = ("ttft", "tpot", "e2el", "itl")
SLO_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_SLO_OF_ALL = f"^({'|'.join(SLO_MEASURES)})_({'|'.join(SLO_STATISTICS)})_s$"


class Slo(Section):
    """Limits in seconds: `ttft_s`, `tpot_s` and `e2el_s` of each request, which must keep all of them to count as goodput; and of
    all requests together a mean or percentile each, `ttft_p95_s: 1.0`: ttft, tpot, e2el or itl, with mean, p50, p90, p95 or p99."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "additionalProperties": False,
            "patternProperties": {
                _SLO_OF_ALL: {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
            },
        },
    )
    __pydantic_extra__: dict[str, Seconds | None] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2el_s: Seconds | None = None

    @model_validator(mode="after")
    def _of_all_by_name(self) -> Self:
        for key in self.model_extra or {}:
            if not re.match(_SLO_OF_ALL, key):
                raise ValueError(_no_limit(key))
        return self

    @property
    def of_each(self) -> dict[str, float]:
        """The limits that each request has to keep."""
        return {key: value for key in type(self).model_fields if (value := getattr(self, key)) is not None}

    @property
    def of_all(self) -> dict[str, float]:
        """The limits of means and percentiles."""
        return {key: value for key, value in (self.model_extra or {}).items() if value is not None}


def _no_limit(key: str) -> str:
    """The error about a *key* that is no limit: the nearest percentile that is one, or the nearest name."""
    asked = re.match(rf"^({'|'.join(SLO_MEASURES)})_p(\d+)(_s)?$", key)
    if asked is None:
        names = [f"{measure}_{statistic}_s" for measure in SLO_MEASURES for statistic in SLO_STATISTICS]
        return unknown(f"{key} is not a limit", key, [*Slo.model_fields, *names])
    percent = float(f"{asked[2][:2]}.{asked[2][2:]}0")
    near = min(SLO_STATISTICS[1:], key=lambda each: (abs(float(each[1:]) - percent), -float(each[1:])))
    return f"{key} is not a limit; did you mean {asked[1]}_{near}_s?"


class ServiceClass(Section):
    """The terms of a class of requests, and its share of the requests."""

    share: Annotated[float, Field(ge=0)] | None = None
    """Its share of the requests, in proportion to the other classes' shares; left out where the trace has a column `class`."""
    priority: int | None = None
    """Smaller goes first, as in vLLM, for schedulers that ask for it; where it is left out, the trace's, or 0."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The weight of its tokens among those of others, for `weighted_fair` and the index of fairness: twice the weight, twice the
    service."""
    tenant: Annotated[str, Field(min_length=1)] | None = None
    """The tenant that sends them; where it is left out, the trace's column `tenant`, or the class by itself."""
    deadline_s: Seconds | None = None
    """The time from arrival to the last token: a request's own, for `{policy: order, by: deadline}`, `reject` and the figures."""
    slo: Slo = Slo()
    """Limits of its requests, over those of the top level key by key; of a mean or percentile, over its requests alone. Schedulers
    see that of the first token."""

    @field_validator("slo")
    @classmethod
    def _gaps_are_of_all(cls, slo: Slo) -> Slo:
        gaps = next((key for key in slo.of_all if key.startswith("itl_")), None)
        if gaps is not None:
            raise ValueError(f"gaps between tokens are not known class by class; give {gaps} at the top level")
        return slo


class Costs(Section):
    """The price of devices and of their power, for the summary's `costs` and `optimize --goal cost|energy`."""

    usd_per_device_hour: Annotated[float, Field(gt=0)] | None = None
    """A price in place of list prices, for every device."""
    provider: Annotated[str, Field(min_length=1)] | None = None
    """The provider whose list prices are taken: aws, gcp, ...; where it is left out, the first that is listed for the device."""
    prices: FilePath | None = None
    """A file of prices in the form of hwmodels/prices.toml, in place of those that are shipped."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power usage effectiveness: of the building over that of the devices."""
    carbon_g_per_kwh: Annotated[float, Field(ge=0)] | None = None
    """Carbon intensity of the electricity."""


class Window(Section):
    """The part of a run that its figures are over: requests by arrival, rates from the first of them to the last."""

    rule: Literal["whole", "after_warmup", "arrivals"] = "whole"
    """`whole`: first arrival to last finish; `after_warmup`: what MSER-5 leaves of the end-to-end latencies, up to the last
    arrival; `arrivals`: from `from_s` to `to_s`. A word alone stands for the rule, the bounds alone for `arrivals`."""
    from_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds after the first arrival; where it is left out, 0."""
    to_s: Seconds | None = None
    """Seconds after the first arrival, the last arrival at most; where it is left out, the last arrival."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"rule": value}
        if isinstance(value, Mapping) and "rule" not in value and {"from_s", "to_s"} & set(value):
            return {"rule": "arrivals", **value}
        return value

    @model_validator(mode="after")
    def _bounds_belong_to_arrivals(self) -> Self:
        given = [name for name in ("from_s", "to_s") if getattr(self, name) is not None]
        if self.rule != "arrivals" and given:
            raise ValueError(f"rule {self.rule} takes no {' or '.join(given)}; leave out the rule or the bounds")
        if self.rule == "arrivals" and not given:
            raise ValueError("rule arrivals needs from_s or to_s, in seconds after the first arrival")
        if self.to_s is not None and self.to_s <= (self.from_s or 0.0):
            raise ValueError(f"to_s lies after from_s; got {self.from_s or 0:g} to {self.to_s:g}")
        return self


PowerLimit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""W of one device."""


class Pool(Section):
    """Machines of one kind. What is left out is as at the top level; `parallel` and `memory` key by key."""

    role: Literal["both", "prefill", "decode"] = "both"
    """The part that its machines do with a request: `prefill` computes its prompt and hands the KV over to machines that `decode`,
    across one of `links`; `both` is all of it."""
    model: ModelName | None = None
    models: Annotated[list[ModelName], Field(min_length=1)] | None = None
    """Several models that share each machine, in place of `model`: they take turns on its stages, and each has an equal part of
    the memory that all leave beside their caches. NAME#TAG is another copy of NAME, with requests of its own."""
    hardware: FilePath | StepHardware | None = None
    power_limit_w: PowerLimit | None = None
    precision: WeightPrecision | None = None
    kv_precision: KvPrecision | None = None
    serving_stack: StackOrFile | None = None
    serving_release: Annotated[str, Field(min_length=1)] | None = None
    cost_model: Literal["calibrated", "roofline"] | None = None
    parallel: Parallel | None = None
    experts: ExpertLayout | None = None
    cuda_graphs: GraphSettings | None = None
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Machines in the pool, at the beginning where it is autoscaled."""
    autoscale: Autoscale | None = None
    rank_router: Router | None = None
    prompt_balance: PromptBalance | None = None
    scheduler: Scheduler | None = None
    decoding: DecodingSettings | None = None
    decoding_by_model: dict[str, DecodingSettings] | None = None
    """The decoding methods of single models of `models`, by name, in place of `decoding`."""
    memory: Memory | None = None

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.models is not None:
            if self.model is not None:
                raise ValueError("give model, or models that share each machine, one of the two")
            if len(set(self.models)) < len(self.models):
                raise ValueError(
                    f"models that share a machine differ; got {self.models!r}, and NAME#TAG makes a copy of NAME"
                )
        for name in self.decoding_by_model or {}:
            if name not in (self.models or ()):
                raise ValueError(
                    f"decoding_by_model has {name!r}, which is not among models ({', '.join(self.models or ())})"
                )
        return self


class KvLink(Section):
    """The link that KV crosses from machines that prefill to machines that decode."""

    sender: Annotated[str, Field(min_length=1)] | None = None
    """A pool with role prefill; where it is left out, the only one."""
    receiver: Annotated[str, Field(min_length=1)] | None = None
    """A pool with role decode; where it is left out, the only one."""
    connector: Annotated[str, OneOf(*_CONNECTORS)] | None = None
    """Fixed cost and share of the bandwidth as measured (docs/pools.md), in place of `latency_s` and of all of it."""
    bandwidth_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    """The bandwidth of one transfer, all adapters of a machine together, in 10^9 bytes; where it is left out, that of the
    datasheets' networks: an adapter for each GPU of the side that has fewer."""
    latency_s: Annotated[float, Field(ge=0)] | None = None
    """The time that each transfer takes beside its bytes, while the link is free for others; where it is left out, the connector's,
    or 0."""
    concurrent_transfers: Annotated[int, Field(ge=1)] = 1
    """So many at once, each with the whole bandwidth; others wait, first come, first served."""
    shared: Literal["sender", "receiver", "pair", "pools"] = "sender"
    """The transfers that wait for each other: those of one sending machine, of one receiving, of the two, or of both pools."""
    sent: Literal["whole", "layers"] = "whole"
    """`layers`: each layer's KV goes while the next ones are computed, where there is room for it before (`handover.room`)."""
    fabric: Fabric | None = None
    """A network that it shares with other links, and with tiers that name it."""
    degraded: Degraded = ()
    """Times for which the link, of all machines of the two pools, has less bandwidth or takes longer; no two at once."""


class HandoverSettings(Section):
    """The way in which requests go from machines that prefill to machines that decode. What is left out is as in `like`."""

    like: Annotated[str, OneOf(*_HANDOVERS)] | None = None
    """The stack or paper whose way it is (docs/pools.md has the releases); where it is left out, that of the decode pools' serving
    stack."""
    first_token: Literal["prefill", "arrival", "decode"] | None = None
    """`prefill`: clients have their first token when the prompt is computed; `arrival`: the same token, when the KV has arrived;
    `decode`: the token is dropped, and the decode machine computes the prompt's last token again."""
    room: Literal["after_prefill", "before_prefill"] | None = None
    """The moment at which the decode machine takes room for the KV: when the prompt is computed, or before it is sent to be."""
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 0
    """A prompt of which the decode machine lacks no more tokens than these, being short or cached there, is computed there."""
    headroom_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens that the decode machine leaves free for each sequence it has when it takes room for another."""
    repack: bool | None = None
    """Whether KV that the two sides divide over different numbers of GPUs is copied once more where it arrives."""
    router: Router | None = None
    """Which decode machine; where it is left out, by the policy of the top level's `router`."""


class Settings(Section):
    """Every key of a scenario file."""

    model: ModelName = "llama-3.1-8b"
    """Catalogue name (`rooftrace models`), or a path to a HuggingFace config.json."""
    hardware: FilePath | StepHardware = "h100-sxm"
    """Catalogue name (`rooftrace hardware`), a path to a hardware or calibrated profile (.toml), or {steps: FILE} with measured
    times of whole steps. With a limit below the TDP: `{name: h100-sxm, power_limit_w: 500}`, where the name may be left out."""
    precision: WeightPrecision | None = None
    """Format of the weights; where it is left out, what the checkpoint has (bf16 for most)."""
    kv_precision: KvPrecision | None = None
    """Format of the KV cache; where it is left out, that of floating-point weights, or the checkpoint's."""
    power_limit_w: PowerLimit | None = None
    """The most that a device draws, where it was set below the TDP: arithmetic takes longer, for the clock falls
    (docs/how-to/costs.md)."""
    serving_stack: StackOrFile = default_stack().name
    """The stack whose kernels and overheads are priced: host work of a step, sampling, launches, tokenisation. `ideal` has none. A
    file (.toml) that `rooftrace bench fit` wrote has those of a deployment that was measured."""
    serving_release: Annotated[str, Field(min_length=1)] | None = None
    """Release of the serving stack ("0.12"): its overheads are those fitted to the newest release that is not after it; where it is
    left out, the newest there are."""
    cost_model: Literal["calibrated", "roofline"] = "calibrated"
    """`calibrated`: kernels as measured, or borrowed from the nearest relative; `roofline`: peaks of the datasheet."""
    parallel: Parallel = Parallel()
    experts: ExpertLayout | None = None
    """The experts of a mixture."""
    cuda_graphs: GraphSettings | None = None
    """The graphs of serving_stack vllm, sglang and trtllm on GPUs; where it is left out, as the stack captures them."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Micro-batches in flight at once; where it is left out, one for each stage. One more hides the hand-over between stages."""
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    router: Router = Router(policy="round_robin")
    gateway: Gateway = Gateway()
    """Time that requests spend in front of the router, beside the engines' own front end."""
    rank_router: Router | None = None
    """Which rank of a machine gets a request (`parallel.data`); where it is left out, as the serving stack does it: `vllm_ranks`,
    `trtllm_ranks`, or for the others `round_robin`."""
    prompt_balance: PromptBalance | None = None
    """Prompts of ranks start together; where it is left out, each when its rank's scheduler says so."""
    scheduler: Scheduler = Scheduler(policy=default_scheduler())
    """Where it is left out, the serving stack's own: `vllm`, `sglang` or `trtllm`; `vllm` for the stack `ideal`."""
    decoding: DecodingSettings = DecodingSettings()
    stream_interval: Annotated[int, Field(ge=1)] = 1
    """Clients get the first token at once, then this many together, and the last: every so many tokens, or for serving_stack trtllm
    every so many iterations. Gaps between tokens (ITL) are then those between groups."""
    memory: Memory = Memory()
    pools: dict[str, Pool] | None = None
    """Machines of different kinds behind one router, by a name of your choice: each with settings of its own over those of the
    top level. A request goes to a machine that hosts its model."""
    links: dict[str, KvLink] | None = None
    """The links between pools that prefill and pools that decode, by a name of your choice."""
    handover: HandoverSettings | None = None
    """The hand-over from pools that prefill to pools that decode: which emits the first token, when room is taken, what stays."""
    encode: EncodeSettings | None = None
    """Machines that encode what comes with prompts, before these are computed; where it is left out, nothing is encoded."""
    adapters: AdapterSettings | None = None
    """LoRA adapters that requests ask for, and the slots that servers have for them; where it is left out, all ask for the model
    itself."""
    structured_output: StructuredOutput | None = None
    """Answers that keep to a grammar; where it is left out, none does."""
    autoscale: Autoscale | None = None
    """Machines come and go; where it is left out, all of them are there from beginning to end."""
    failures: Failures | None = None
    """Machines fail and come back, or are slow."""
    placement: Annotated[str, Field(min_length=1), MayBeFile(lists_models=True)] | None = None
    """A file that `rooftrace place --out` wrote: its groups are the pools, a machine of `hardware` devices each; with `autoscale`
    each group has as many such machines as its policy asks for."""
    workload: Workload = Workload(trace="conversation")
    slo: Slo = Slo()
    classes: dict[str, ServiceClass] | None = None
    """Classes of service by a name of your choice: every request is of one."""
    costs: Costs | None = None
    window: Window = Window()
    """Which part of the run the figures are over."""
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """A section that is null is as left out: `slo=null` takes the limits away."""
        if not isinstance(given, Mapping):
            return given
        sections = {name for name, field in cls.model_fields.items() if isinstance(field.default, Section)}
        return {key: value for key, value in given.items() if value is not None or key not in sections}

    @model_validator(mode="after")
    def _one_fleet(self) -> Self:
        if self.pools is not None and self.placement is not None:
            raise ValueError("give pools or placement, one of the two")
        if self.pools is not None and not self.pools:
            raise ValueError("pools needs at least one pool, such as pools: {a: {replicas: 2}}; leave it out for none")
        strange = next((name for name in self.pools or () if not re.fullmatch(r"[A-Za-z0-9_-]+", name)), None)
        if strange is not None:
            raise ValueError(f"pools: a name is of letters, digits, - and _; got {strange!r}")
        roles = {pool.role for pool in (self.pools or {}).values()}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if role in roles and other not in roles:
                name = next(name for name, pool in (self.pools or {}).items() if pool.role == role)
                raise ValueError(
                    f"pools.{name} has role {role} and no pool has role {other}; give one, or role both, which does it all"
                )
        if "prefill" not in roles:
            for key in ("links", "handover"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} is between pools with role prefill and pools with role decode, and there are none"
                    )
        elif not self.links:
            raise ValueError(
                "links is missing: say how KV gets from the prefill pool to the decode pool, such as links: {net: {}} for one "
                "between the two at the datasheet's bandwidth"
            )
        return self

    @field_validator("classes")
    @classmethod
    def _all_shares_or_none(cls, value: dict[str, ServiceClass] | None) -> dict[str, ServiceClass] | None:
        if value is None:
            return None
        shares = [each.share for each in value.values()]
        given = [share for share in shares if share is not None]
        if not value:
            raise ValueError("give at least one class, such as {chat: {share: 1}}; leave it out for none")
        if given and len(given) < len(shares):
            missing = next(name for name, each in value.items() if each.share is None)
            raise ValueError(
                f"every class has a share, or none where the trace says who is of which; {missing} has none"
            )
        if given and not sum(given):
            raise ValueError("shares are not all 0")
        return value

    @field_validator("model", "hardware")
    @classmethod
    def _no_blank(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"expected a name or a path; got {value!r}")
        return value
