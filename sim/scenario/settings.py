"""The settings of a scenario: every key that a scenario file may hold, with its bounds and its default."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from sim.errors import ScenarioError
from sim.scenario import explain
from sim.scenario.decoding import DecodingSettings
from sim.scenario.section import Section
from sim.scenario.yaml import parse_yaml
from sim.text import shown

# Known to `workloads.readers.FORMATS` as well, which is not imported here to keep the start short; a test compares.
TraceFormat = Literal["auto", "azure_llm", "burstgpt", "mooncake", "plain"]
# Names of `hwmodels.precision.PRECISIONS`; a test compares.
WeightPrecision = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "int8", "int4", "int4_g32", "mxfp4", "nvfp4"]
KvPrecision = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
# Known to `hwmodels.overheads.serving_stacks` as well; a test compares.
ServingStack = Literal["vllm", "trtllm", "sglang", "eager", "ideal"]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]

DEFAULT_SCENARIO = """\
model: llama-3.1-8b
hardware: h100-sxm
scheduler: {policy: vllm}
workload: {trace: conversation}
slo: {ttft_s: 1.0, tpot_s: 0.05}
"""


class Policy(Section):
    """A policy by name; every other key is a setting of that policy, checked when it is made."""

    model_config = ConfigDict(extra="allow")

    policy: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Process(Section):
    """An arrival process by name; every other key is a setting of it."""

    model_config = ConfigDict(extra="allow")

    process: Annotated[str, Field(min_length=1)]

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Distribution(Section):
    """A distribution of lengths by name; every other key is a setting of it. A number alone is a fixed length."""

    model_config = ConfigDict(extra="allow")

    distribution: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool)
        return {"distribution": "fixed", "tokens": value} if number else value

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Parallel(Section):
    """How one replica is spread over GPUs."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """GPUs that share every layer."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Stages of consecutive layers."""


class Memory(Section):
    """What of the GPUs' memory holds the KV cache, and what happens when it runs out."""

    gpu_memory_utilization: Share | None = None
    """vLLM: share of each GPU's memory that the server may take, everything included. Where it is left out, the stack's default;
    `eager`, `ideal` and `cost_model: roofline` share it between weights and KV cache alone, 0.9 by default."""
    mem_fraction_static: Share | None = None
    """SGLang: share of what is free before loading that weights and KV cache take; where it is left out, from the device."""
    free_gpu_memory_fraction: Share | None = None
    """TensorRT-LLM: share of what weights, activations and buffers leave free that the KV cache takes."""
    release: Annotated[str, Field(min_length=1)] | None = None
    """Of the serving stack, for its account of memory ("0.11", "0.19" or "0.32" of vLLM); where it is left out, the newest."""
    reserve_bytes: Annotated[float, Field(ge=0)] = 0.0
    """Bytes on each GPU kept out of that share beyond what the stack sets aside: other programs, an encoder."""
    kv_blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks of the KV cache, null block included, in place of what the memory has room for (vLLM's num_gpu_blocks_override)."""
    block_tokens: Annotated[int, Field(ge=1)] | None = None
    """Where it is left out, the stack's: 16 for vLLM, 1 for SGLang, 32 for TensorRT-LLM."""
    prefix_caching: bool | None = None
    """Whether KV blocks are found again by prompts that begin alike, where the trace says which do; where it is left out, as the
    stack has it: on for vLLM, SGLang and TensorRT-LLM, off for `eager` and `ideal`."""
    preemption: Literal["recompute", "none"] = "recompute"
    """`recompute`: the newest sequences give their KV back and are computed again; `none`: running out is an error."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "gpu_fraction" in value:
            raise ValueError(
                "gpu_fraction is called as the stack calls it: gpu_memory_utilization (vLLM, eager, ideal), "
                "mem_fraction_static (SGLang) or free_gpu_memory_fraction (TensorRT-LLM)"
            )
        return value

    @property
    def shares(self) -> dict[str, float]:
        """The shares that are given, by their stacks' names."""
        names = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
        return {name: given for name in names if (given := getattr(self, name)) is not None}


class Workload(Section):
    """What arrives: a trace, a generator, or the lengths of a trace under generated arrivals."""

    trace: Annotated[str, Field(min_length=1)] | None = None
    """A file, or the name of a built-in workload (conversation)."""
    format: TraceFormat = "auto"
    sort: bool = False
    """Accept a file whose arrivals are out of order."""
    drop_empty: bool = False
    """Leave out rows with neither prompt nor output tokens."""
    arrivals: Process | None = None
    prompt_tokens: Distribution | None = None
    output_tokens: Distribution | None = None
    requests: Annotated[int, Field(ge=1)] | None = None
    """How many to generate."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Output tokens that clients allow each request, for schedulers that keep memory for them; where it is left out, what the
    trace's column of that name says or, without one, as many as it emits, which no server knows."""
    rate_scale: Annotated[float, Field(gt=0)] = 1.0
    """Arrivals come this many times as fast."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Keep the first requests only."""
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
        lengths = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        if self.trace is not None:
            given = [name for name, value in lengths.items() if value is not None]
            if given:
                raise ValueError(
                    f"trace already says the lengths, so {' and '.join(given)} cannot be given too; "
                    "leave out one or replace the whole section (--set 'workload={...}')"
                )
            return self
        needed = {"arrivals": self.arrivals, **lengths, "requests": self.requests}
        missing = [name for name, value in needed.items() if value is None]
        if missing == list(needed):
            raise ValueError("give a trace, or a generator: arrivals, prompt_tokens, output_tokens and requests")
        if missing:
            raise ValueError(f"a generated workload also needs {', '.join(missing)}")
        files_only = {"format": self.format != "auto", "sort": self.sort, "drop_empty": self.drop_empty}
        misplaced = [name for name, value in files_only.items() if value]
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} is about reading a trace, and this workload is generated")
        return self


class Slo(Section):
    """Limits that a request must keep to count as goodput."""

    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2el_s: Seconds | None = None


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


class Pool(Section):
    """Machines of one kind. What is left out is as at the top level; `parallel` and `memory` key by key."""

    role: Literal["both", "prefill", "decode"] = "both"
    """What its machines do with a request: `both` is all of it."""
    model: Annotated[str, Field(min_length=1)] | None = None
    models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Several models that share each machine, in place of `model`: they take turns on its stages, and each has an equal part of
    the memory that all leave beside their caches. NAME#TAG is another copy of NAME, with requests of its own."""
    hardware: Annotated[str, Field(min_length=1)] | None = None
    precision: WeightPrecision | None = None
    kv_precision: KvPrecision | None = None
    serving_stack: ServingStack | None = None
    cost_model: Literal["calibrated", "roofline"] | None = None
    parallel: Parallel | None = None
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Machines in the pool."""
    scheduler: Policy | None = None
    decoding: DecodingSettings | None = None
    memory: Memory | None = None

    @field_validator("role")
    @classmethod
    def _both(cls, value: str) -> str:
        if value != "both":
            raise ValueError(f"only role both is there yet; pools that {value} alone are not modelled")
        return value

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.models is not None:
            if self.model is not None:
                raise ValueError("give model, or models that share each machine, one of the two")
            if len(set(self.models)) < len(self.models):
                raise ValueError(
                    f"models that share a machine differ; got {self.models!r}, and NAME#TAG makes a copy of NAME"
                )
        return self


class Settings(Section):
    """Every key of a scenario file."""

    model: Annotated[str, Field(min_length=1)] = "llama-3.1-8b"
    """Catalogue name (`rooftrace models`), or a path to a HuggingFace config.json."""
    hardware: Annotated[str, Field(min_length=1)] = "h100-sxm"
    """Catalogue name (`rooftrace hardware`), or a path to a hardware or calibrated profile (.toml)."""
    precision: WeightPrecision | None = None
    """Of the weights; where it is left out, what the checkpoint has (bf16 for most)."""
    kv_precision: KvPrecision | None = None
    """Of the KV cache; where it is left out, that of floating-point weights, or the checkpoint's."""
    serving_stack: ServingStack = "vllm"
    """Whose kernels and overheads: host work of a step, sampling, launches, tokenisation. `ideal` has none."""
    cost_model: Literal["calibrated", "roofline"] = "calibrated"
    """`calibrated`: kernels as measured, or borrowed from the nearest relative; `roofline`: peaks of the datasheet."""
    parallel: Parallel = Parallel()
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """In flight at once; where it is left out, one for each pipeline stage. One more hides the hand-over between stages."""
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    router: Policy = Policy(policy="round_robin")
    scheduler: Policy = Policy(policy="sarathi")
    decoding: DecodingSettings = DecodingSettings()
    stream_interval: Annotated[int, Field(ge=1)] = 1
    """Clients get the first token at once, then this many together, and the last: every so many tokens, or for serving_stack trtllm
    every so many iterations. Gaps between tokens (ITL) are then those between groups."""
    memory: Memory = Memory()
    pools: dict[str, Pool] | None = None
    """Machines of different kinds behind one router, by a name of your choice: each with settings of its own over those of the
    top level. A request goes to a machine that hosts its model."""
    placement: Annotated[str, Field(min_length=1)] | None = None
    """A file that `rooftrace place --out` wrote: its groups are the pools, a machine of `hardware` devices each."""
    workload: Workload = Workload(trace="conversation")
    slo: Slo = Slo()
    window: Window = Window()
    """Which part of the run the figures are over."""
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_fleet(self) -> Self:
        if self.pools is not None and self.placement is not None:
            raise ValueError("give pools or placement, one of the two")
        if self.pools is not None and not self.pools:
            raise ValueError("pools needs at least one pool, such as pools: {a: {replicas: 2}}; leave it out for none")
        strange = next((name for name in self.pools or () if not re.fullmatch(r"[A-Za-z0-9_-]+", name)), None)
        if strange is not None:
            raise ValueError(f"pools: a name is of letters, digits, - and _; got {strange!r}")
        return self

    @field_validator("model", "hardware")
    @classmethod
    def _no_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError(f"expected a name or a path; got {value!r}")
        return value


class Scenario(Settings):
    """What to simulate. Built from keyword arguments, `Scenario.load(path)` or `Scenario.default()`.

    Raises ScenarioError, in one sentence, for an unknown key, a value of the wrong type or out of bounds.
    Relative paths are looked up beside the scenario file, then in the current folder.
    """

    _source: str = PrivateAttr(default="scenario")
    _folder: Path = PrivateAttr(default_factory=Path)

    def __init__(self, **settings: Any) -> None:
        self._build_from(settings, "scenario", Path())

    def _build_from(self, settings: Mapping[str, Any], source: str, folder: Path) -> None:
        try:
            BaseModel.__init__(self, **settings)
        except ValidationError as error:
            raise ScenarioError(explain.sentence(error, Settings, source)) from None
        self._source = source
        self._folder = folder

    @classmethod
    def from_mapping(cls, settings: Any, *, source: str = "scenario", folder: Path | None = None) -> Scenario:
        """The scenario that *settings* describe; *source* names it in errors, paths are relative to *folder*."""
        if not isinstance(settings, Mapping):
            raise ScenarioError(
                f"{source}: a scenario is a mapping of settings ({', '.join(Settings.model_fields)}); "
                f"got {shown(settings)}"
            )
        _check_keys(settings, source)
        scenario = cls.__new__(cls)
        scenario._build_from(settings, source, folder or Path())
        return scenario

    @classmethod
    def from_yaml(cls, text: str, *, source: str = "scenario", folder: Path | None = None) -> Scenario:
        """The scenario written in *text*; an empty text is all defaults."""
        found = parse_yaml(text, source)
        return cls.from_mapping({} if found is None else found, source=source, folder=folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scenario:
        """The scenario in the YAML file at *path*."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ScenarioError(f"scenario {file} does not exist") from None
        except IsADirectoryError:
            raise ScenarioError(f"scenario {file} is a folder; give a YAML file") from None
        except UnicodeDecodeError:
            raise ScenarioError(f"{file} is not text; a scenario is a YAML file in UTF-8") from None
        except OSError as error:
            raise ScenarioError(f"cannot read scenario {file}: {error.strerror}") from None
        return cls.from_yaml(text, source=str(file), folder=file.parent)

    @classmethod
    def default(cls) -> Scenario:
        """Llama-3.1-8B on one H100 under the built-in conversation workload: what runs without a file."""
        return cls.from_yaml(DEFAULT_SCENARIO, source="default scenario")

    def with_set(self, *assignments: str) -> Scenario:
        """A copy with settings changed by 'key.path=value', the value being read as YAML; checked when all are changed.

        A mapping as the value takes the place of the whole section: 'scheduler={policy: vllm-v0}'.
        """
        settings = copy.deepcopy(self.settings())
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            key = key.strip()
            if not equals or not key:
                raise ScenarioError(f"--set {assignment!r}: expected key.path=VALUE, such as replicas=2")
            self._put(settings, key, parse_yaml(text, f"--set {key}"))
        return Scenario.from_mapping(settings, source=self._source, folder=self._folder)

    def with_value(self, key: str, value: Any) -> Scenario:
        """A copy with the setting at the dotted *key* changed to *value*."""
        settings = copy.deepcopy(self.settings())
        self._put(settings, key, value)
        return Scenario.from_mapping(settings, source=self._source, folder=self._folder)

    def _put(self, settings: dict[str, Any], key: str, value: Any) -> None:
        at: Any = settings
        *path, last = key.split(".")
        for depth, part in enumerate(path):
            inner = at.get(part)
            if inner is None:
                inner = at[part] = self._before(settings, path[: depth + 1])
            elif isinstance(inner, str) and part in ("scheduler", "router", "inner"):
                inner = at[part] = {"policy": inner}
            elif not isinstance(inner, dict):
                raise ScenarioError(f"{self._source}: {'.'.join(path[: depth + 1])} has no settings of its own ({key})")
            at = inner
        at[last] = value

    def _before(self, settings: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
        """What a section at *path* is, of which nothing has been said: for a pool that of the top level."""
        name = path[0]
        if len(path) == 3 and name == "pools":
            name = path[2]
            if isinstance(settings.get(name), str):
                return {"policy": settings[name]}
            if settings.get(name) is not None:
                return copy.deepcopy(settings[name])
        elif len(path) > 1:
            return {}
        default = Settings.model_fields[name].default if name in Settings.model_fields else None
        return default.model_dump(exclude_unset=True) if isinstance(default, BaseModel) else {}

    def pool(self, name: str, **over: Any) -> Scenario:
        """The pool called *name* as a scenario of its own, its settings and *over* over those of the top level."""
        assert self.pools is not None
        settings = {key: value for key, value in self.settings().items() if key not in ("pools", "placement")}
        own = self.pools[name].model_dump(exclude_unset=True)
        for key, value in {**own, **over}.items():
            if key in ("parallel", "memory") and value is not None:
                settings[key] = {**settings.get(key, {}), **value}
            elif key not in ("role", "models") and value is not None:
                settings[key] = value
        return Scenario.from_mapping(settings, source=f"{self._source}: pools.{name}", folder=self._folder)

    def settings(self) -> dict[str, Any]:
        """What was set, without the defaults, as plain values."""
        return self.model_dump(exclude_unset=True)

    def resolved(self) -> dict[str, Any]:
        """Every setting, defaults included, as plain values."""
        return self.model_dump()

    @property
    def source(self) -> str:
        """The file that the scenario came from, or what else to call it."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where relative paths are looked up first."""
        return self._folder

    @property
    def name(self) -> str:
        """A short name for folders: that of the scenario file, or 'default'."""
        stem = Path(self._source).stem
        return stem if self._source.endswith((".yaml", ".yml")) else stem.split()[0]

    @functools.cached_property
    def hash(self) -> str:
        """Sixteen hexadecimal digits of the scenario's content: equal for equal settings and equal files."""
        content = self.resolved()
        if content["window"] == Window().model_dump():
            del content["window"]  # results of scenarios from before there were windows keep their names
        pools = (content["pools"] or {}).values()
        # A scenario that does without them keeps the hash that it had before there were such settings.
        for section, key in ((content, "pools"), (content, "placement"), (content["workload"], "models")):
            if section[key] is None:
                del section[key]
        files: list[tuple[Any, Any]] = [(content, "model"), (content, "hardware"), (content, "placement")]
        files += [(content["workload"], "trace")]
        for pool in pools:
            models = pool["models"] or []
            files += [(pool, "model"), (pool, "hardware"), *((models, i) for i in range(len(models)))]
        for decoding in (content["decoding"], *(pool["decoding"] for pool in pools)):
            if decoding is not None:
                files += [(decoding["draft"] or {}, "model"), (decoding["acceptance"] or {}, "recorded")]
        for section, key in files:
            name = section[key] if isinstance(section, list) else section.get(key)
            file = self.find(name) if name else None
            if file is not None:
                section[key] = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
        text = json.dumps(content, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def find(self, name: str) -> Path | None:
        """The file that *name* stands for, beside the scenario or in the current folder; None where there is none."""
        for candidate in (self._folder / name, Path(name)):
            if candidate.is_file():
                return candidate
            if (candidate / "config.json").is_file():
                return candidate / "config.json"
        return None

    def to_yaml(self) -> str:
        """The settings that were made, as YAML that `Scenario.load` reads back."""
        import yaml

        return yaml.safe_dump(self.settings(), sort_keys=False)

    def __repr__(self) -> str:
        return f"Scenario({', '.join(f'{key}={value!r}' for key, value in self.settings().items())})"

    __str__ = __repr__


def _check_keys(settings: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    for key, value in settings.items():
        if not isinstance(key, str):
            raise ScenarioError(f"{source}: {prefix}{key!r} is not a setting; keys are words")
        if isinstance(value, Mapping):
            _check_keys(value, source, f"{prefix}{key}.")
