"""The scenario of `rooftrace place`: a cluster, its models, their traffic, and the search for a placement."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from hwmodels.hardware import load_hardware
from hwmodels.model import load_model
from hwmodels.single_pass import CatalogueModel, SinglePass, single_pass_catalogue
from policies.placement import Cluster, PlacementSearch
from sim.errors import ScenarioError
from sim.placement.generative import GenerativeModel, GenerativeServing
from sim.placement.serving import Serving
from sim.scenario import explain, named
from sim.scenario.chosen import Process
from sim.scenario.schema import schema_of
from sim.scenario.section import Policy, Section
from sim.scenario.yaml import parse_yaml
from workloads import (
    Fixed,
    Trace,
    fit_gamma_windows,
    gamma_windows_from_counts,
    multi_model,
    power_law_rates,
    read_function_counts,
    read_function_invocations,
)

SEARCHES: Mapping[str, str] = {
    "partition": "policies.placement:PartitionSearch",
    "equal_groups": "policies.placement:EqualGroups",
    "selective_replication": "policies.placement:SelectiveReplication",
    "clockwork_plus_plus": "policies.placement:ClockworkPlusPlus",
    "round_robin": "policies.placement:RoundRobin",
    "dedicated_groups": "policies.placement:DedicatedGroups",
}
GIB = 2**30

Positive = Annotated[float, Field(gt=0)]
FromZero = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class ClusterSection(Section):
    """Devices of one kind, in nodes."""

    devices: Count
    memory_gib: Positive = 13.0
    """For weights, of each device; 13 of a V100's 16 is what AlpaServe's artifact allows."""
    devices_per_node: Count = 8
    hardware: Annotated[str, Field(min_length=1)] = "v100-16"
    """Catalogue name or profile of the devices, for models that are priced by the cost model."""


class Hosted(Section):
    """A model that the cluster serves; a name alone is one copy."""

    model: Annotated[str, Field(min_length=1)]
    """A name of AlpaServe's table (bert-1.3b, ..., moe-5.3b), or any model of the catalogue for one pass over its prompt."""
    copies: Count = 1
    """Instances, each with traffic of its own."""
    prompt_tokens: Count = 2048
    """The length of each prompt for a catalogue model; the table's latencies are for 2048."""
    output_tokens: Annotated[int, Field(ge=0)] = 0
    """The length of each output of a catalogue model; above 0 the model generates, with continuous batching and a KV cache."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


class Functions(Section):
    """Traffic like that of the Azure Functions traces: Gamma arrivals fitted window by window, then drawn anew."""

    counts: tuple[str, ...] = ()
    """Files of the trace of 2019 (calls a minute); they tell no CV, so `cv_scale` is the CV."""
    invocations: str | None = None
    """File of the trace of 2021 (times of calls)."""
    start_s: FromZero = 0.0
    end_s: Positive
    window_s: Positive
    """The window of the fit: 60 s for counts and 5400 s for invocations in AlpaServe's artifact."""
    rate_scale: Positive = 1.0
    cv_scale: Positive = 1.0

    @model_validator(mode="after")
    def _one_file(self) -> Self:
        if bool(self.counts) == (self.invocations is not None):
            raise ValueError("give counts (2019) or invocations (2021), one of the two")
        return self


class Traffic(Section):
    """The requests that arrive: one arrival process for each model, shares by popularity, or windows of a trace."""

    arrivals: Process | None = None
    """Process of every model; its rate is that of all models together."""
    popularity: FromZero = 0.5
    """Exponent of the power law by which models share the rate; 0 shares evenly."""
    shares: tuple[FromZero, ...] | None = None
    """Shares of the models, in order, in place of the power law."""
    duration_s: Positive | None = None
    requests: Count | None = None
    functions: Functions | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.arrivals is None) == (self.functions is None):
            raise ValueError("give arrivals or functions, one of the two")
        if self.arrivals is not None and (self.duration_s is None) == (self.requests is None):
            raise ValueError("generated arrivals need duration_s or requests, one of the two")
        if self.functions is not None and (self.duration_s, self.requests, self.shares) != (None, None, None):
            raise ValueError(
                "functions say how long and how much by themselves; leave out duration_s, requests, shares"
            )
        return self


class ServingSection(Section):
    """How requests are served."""

    slo_scale: Positive | None = 5.0
    """Deadline over the single-device latency of the model."""
    batch_sizes: tuple[Literal[1, 2, 4, 8, 16], ...] = (1,)
    overhead_s: FromZero = 0.011
    """Time of each request beside its stages; the default is the artifact's."""
    stage_overhead: FromZero = 0.009
    """Stages take longer by this share for each stage of the group; the default is the artifact's."""


class Test(Section):
    """Other traffic that the finished placement is tried on."""

    __test__ = False

    seed: Annotated[int, Field(ge=0)] | None = None
    """The same traffic drawn with another seed."""
    train_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Plan for this first share of the time, test on the rest."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.seed is None) == (self.train_share is None):
            raise ValueError("give seed or train_share, one of the two")
        return self


class PlaceSettings(Section):
    """Every key of a placement scenario."""

    cluster: ClusterSection
    models: Annotated[tuple[Hosted, ...], Field(min_length=1)]
    workload: Traffic
    serving: ServingSection = ServingSection()
    placement: Policy = Policy(policy="partition")
    test: Test | None = None
    budget_s: Positive | None = None
    """Wall-clock seconds that the search may take; then its best placement so far is the answer."""
    jobs: Count = 1
    """Simulations at a time."""
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True)
class PlaceScenario:
    """A placement scenario read from a file or given as a mapping."""

    settings: PlaceSettings
    source: str = "scenario"
    folder: Path = Path()

    @classmethod
    def from_mapping(cls, found: Any, *, source: str = "scenario", folder: Path | None = None) -> PlaceScenario:
        """The scenario that *found* describes; ScenarioError in one sentence for what does not fit."""
        explain.check_mapping(found, PlaceSettings, source, "a placement scenario")
        try:
            # YAML has lists and no tuples, and strict validation does not take one for the other.
            settings = PlaceSettings.model_validate(_tuples(found))
        except ValidationError as error:
            raise ScenarioError(explain.sentence(error, PlaceSettings, source)) from None
        return cls(settings=settings, source=source, folder=folder or Path())

    @classmethod
    def load(cls, path: str | os.PathLike[str], assignments: Sequence[str] = ()) -> PlaceScenario:
        """The scenario in the YAML file at *path*, with settings changed by 'key.path=value'."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ScenarioError(f"{file} is not text; a scenario is a YAML file in UTF-8") from None
        except OSError as error:
            raise ScenarioError(f"cannot read scenario {file}: {error.strerror}") from None
        found = parse_yaml(text, str(file))
        explain.check_mapping(found, PlaceSettings, str(file), "a placement scenario")
        for assignment in assignments:
            _assign(found, assignment)
        return cls.from_mapping(found, source=str(file), folder=file.parent)

    @functools.cached_property
    def models(self) -> dict[str, SinglePass]:
        """Instances by name: 'bert-1.3b', or 'bert-1.3b#0', 'bert-1.3b#1', ... where there are copies."""
        found: dict[str, SinglePass] = {}
        for hosted in self.settings.models:
            model = self._model(hosted)
            for copy in range(hosted.copies):
                name = hosted.model if hosted.copies == 1 else f"{hosted.model}#{copy}"
                if name in found:
                    raise ScenarioError(f"{self.source}: models: {hosted.model} is given twice; use copies")
                found[name] = model
        return found

    def _model(self, hosted: Hosted) -> SinglePass:
        if hosted.model in single_pass_catalogue():
            if self._generates:
                raise ScenarioError(
                    f"{self.source}: models: {hosted.model} has measured single-pass latencies only and cannot share a "
                    "cluster with models that generate; take a model of the catalogue (rooftrace models)"
                )
            if hosted.prompt_tokens != 2048:
                raise ScenarioError(
                    f"{self.source}: models: {hosted.model} is measured at 2048 prompt tokens; leave prompt_tokens out"
                )
            return single_pass_catalogue()[hosted.model]
        try:
            spec, device = (
                load_model(self._find(hosted.model)),
                load_hardware(self._find(self.settings.cluster.hardware)),
            )
            if self._generates:
                if spec.is_encoder and hosted.output_tokens:
                    raise ValueError(f"{hosted.model} is an encoder and emits no tokens; leave output_tokens out")
                return GenerativeModel(
                    name=hosted.model,
                    spec=spec,
                    device=device,
                    prompt_tokens=hosted.prompt_tokens,
                    output_tokens=hosted.output_tokens,
                )
            return CatalogueModel(name=hosted.model, spec=spec, device=device, tokens=hosted.prompt_tokens)
        except ValueError as error:
            table = ", ".join(single_pass_catalogue())
            raise ScenarioError(f"{self.source}: models: {error}; models of AlpaServe's table are {table}") from error

    @property
    def _generates(self) -> bool:
        return any(hosted.output_tokens for hosted in self.settings.models)

    def _lengths(self, what: str) -> Any:
        """Lengths of each instance's requests."""
        return {
            hosted.model if hosted.copies == 1 else f"{hosted.model}#{copy}": Fixed(tokens=getattr(hosted, what))
            for hosted in self.settings.models
            for copy in range(hosted.copies)
        }

    def _find(self, name: str) -> str | Path:
        beside = self.folder / name
        return beside if beside.exists() else name

    @property
    def serving(self) -> Serving:
        """The cluster and how it serves."""
        cluster, serving = self.settings.cluster, self.settings.serving
        kind = GenerativeServing if self._generates else Serving
        # The artifact's overheads were measured with single-pass models and are no default for others.
        overheads: dict[str, Any] = {"overhead_s": serving.overhead_s, "stage_overhead": serving.stage_overhead}
        if self._generates:
            overheads = {key: value if key in serving.model_fields_set else 0.0 for key, value in overheads.items()}
        try:
            return kind(
                cluster=Cluster(
                    n_devices=cluster.devices,
                    memory_bytes=cluster.memory_gib * GIB,
                    devices_per_node=cluster.devices_per_node,
                ),
                models=self.models,
                slo_scale=serving.slo_scale,
                batch_sizes=serving.batch_sizes,
                **overheads,
            )
        except ValueError as error:
            raise ScenarioError(f"{self.source}: {error}") from error

    @property
    def search(self) -> PlacementSearch:
        """The search, made from its settings."""
        policy = self.settings.placement
        try:
            return named.policy(policy.policy, policy.settings, SEARCHES, key="placement", method="search")
        except ScenarioError as error:
            raise ScenarioError(f"{self.source}: {error}") from error

    def traffic(self) -> tuple[Trace, Trace | None]:
        """The trace that is planned for, and the one that the placement is tested on (None without a test)."""
        test = self.settings.test
        try:
            trace = self._traffic(self.settings.seed)
            if test is None:
                return trace, None
            if test.seed is not None:
                return trace, self._traffic(test.seed)
            assert test.train_share is not None
            cut_s = float(trace.arrival_ns[-1]) / 1e9 * test.train_share
            return trace.window(0.0, cut_s), trace.window(cut_s, float(trace.arrival_ns[-1]) / 1e9 + 1.0)
        except ScenarioError:
            raise
        except (ValueError, OSError) as error:
            raise ScenarioError(f"{self.source}: workload: {error}") from error

    def _traffic(self, seed: int) -> Trace:
        traffic, names = self.settings.workload, list(self.models)
        prompt, output = self._lengths("prompt_tokens"), self._lengths("output_tokens")
        if traffic.functions is not None:
            return self._functions(traffic.functions, names, seed)
        assert traffic.arrivals is not None
        process, settings = traffic.arrivals.process, traffic.arrivals.settings
        if process in ("closed_loop", "mmpp"):
            return self._mmpp(process, settings, names, seed)
        total = settings.pop("rate_per_s", None)
        if not isinstance(total, int | float) or isinstance(total, bool) or total <= 0:
            raise ScenarioError(f"workload.arrivals.rate_per_s is a number above 0, of all models; got {total!r}")
        if traffic.shares is not None:
            if len(traffic.shares) != len(names) or sum(traffic.shares) <= 0:
                raise ScenarioError(f"workload.shares are {len(names)} numbers, one for each model, not all 0")
            rates = [total * share / sum(traffic.shares) for share in traffic.shares]
        else:
            rates = power_law_rates(float(total), len(names), traffic.popularity).tolist()
        arrivals: dict[str, Any] = {
            name: traffic.arrivals.made("workload.arrivals", {"rate_per_s": rate, **settings})
            for name, rate in zip(names, rates, strict=True)
            if rate > 0
        }
        return multi_model(
            arrivals,
            prompt=prompt,
            output=output,
            n_requests=traffic.requests,
            duration_s=traffic.duration_s,
            seed=seed,
        )

    def _mmpp(self, process: str, settings: dict[str, Any], names: list[str], seed: int) -> Trace:
        if process == "closed_loop":
            raise ScenarioError("workload.arrivals: placements are scored on open traffic; closed_loop is not modelled")
        made: Any = named.choice(process, settings, named.PROCESSES, key="workload.arrivals", what="an arrival process")
        traffic = self.settings.workload
        if traffic.shares is not None or traffic.popularity:
            raise ScenarioError(
                "workload: an mmpp has rates of its own for each model; give popularity: 0 and no shares"
            )
        return multi_model(
            {name: made for name in names},
            prompt=self._lengths("prompt_tokens"),
            output=self._lengths("output_tokens"),
            n_requests=traffic.requests,
            duration_s=traffic.duration_s,
            seed=seed,
        )

    def _functions(self, functions: Functions, names: list[str], seed: int) -> Trace:
        start, end = functions.start_s, functions.end_s
        if functions.counts:
            found = read_function_counts(*(self._find(name) for name in functions.counts))
            if functions.window_s != found.bin_s:
                raise ScenarioError(f"workload.functions.window_s of counts is their bin, {found.bin_s} s")
            windows = gamma_windows_from_counts(
                found.stripe(len(names), start_s=start, end_s=end),
                window_s=functions.window_s,
                cv=functions.cv_scale,
                source=found.source,
            )
            cv_scale = 1.0
        else:
            assert functions.invocations is not None
            calls = read_function_invocations(self._find(functions.invocations))
            windows = fit_gamma_windows(
                calls.stripe(len(names), start_s=start, end_s=end),
                window_s=functions.window_s,
                duration_s=end - start,
                source=calls.source,
            )
            cv_scale = functions.cv_scale
        return windows.trace(
            models=names,
            prompt=self._lengths("prompt_tokens"),
            output=self._lengths("output_tokens"),
            seed=seed,
            rate_scale=functions.rate_scale,
            cv_scale=cv_scale,
        )


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value


def _assign(settings: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ScenarioError(f"--set {assignment!r}: expected key.path=VALUE, such as cluster.devices=16")
    at = settings
    for part in path[:-1]:
        inner: Any = at.setdefault(part, {})
        if isinstance(inner, str) and part == "placement":
            inner = at[part] = {"policy": inner}
        if not isinstance(inner, dict):
            raise ScenarioError(f"--set {assignment!r}: {part} has no settings of its own")
        at = inner
    at[path[-1]] = parse_yaml(text, f"--set {key}")


def describe_schema() -> dict[str, Any]:
    """JSON Schema of a placement scenario."""
    return schema_of(PlaceSettings, "Rooftrace placement scenario")


__all__ = ["SEARCHES", "PlaceScenario", "PlaceSettings", "describe_schema"]
