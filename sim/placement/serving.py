"""Single-pass models on a cluster: from a placement to an experiment, its columns and its score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hwmodels.single_pass import SinglePass
from policies.placement import Cluster, Group, ModelView, Placement, Score, check
from sim.placement.groups import GroupColumns, GroupExperiment, GroupSpec, Screen, loop_is_compiled, run_groups
from workloads import Trace

ScreenedBy = Literal["events", "compiled loop", "python loop"]

NS_PER_S = 1_000_000_000

# AlpaServe's artifact, fast simulator: what its cluster took beyond the profiled stages.
ARTIFACT_OVERHEAD_S = 0.011
ARTIFACT_STAGE_OVERHEAD = 0.009


class _DeviceBytes(Mapping[tuple[int, int], float]):
    """Weights of one model by shape, worked out when first asked for."""

    def __init__(self, model: SinglePass, n_devices: int) -> None:
        self._model, self._n_devices = model, n_devices
        self._known: dict[tuple[int, int], float | None] = {}

    def _find(self, shape: tuple[int, int]) -> float | None:
        if shape not in self._known:
            try:
                self._known[shape] = self._model.device_bytes(*shape)
            except ValueError:
                self._known[shape] = None
        return self._known[shape]

    def __getitem__(self, shape: tuple[int, int]) -> float:
        found = self._find(shape)
        if found is None:
            raise KeyError(shape)
        return found

    def get(self, shape: Any, default: Any = None) -> Any:
        found = self._find(shape)
        return default if found is None else found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        shapes = ((a, b) for a in range(1, self._n_devices + 1) for b in range(1, self._n_devices // a + 1))
        return (shape for shape in shapes if self._find(shape) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A cluster, the models that it may host, and how requests are served."""

    cluster: Cluster
    models: Mapping[str, SinglePass]
    """Instances by name, in the order of a placement's rows; several may be the same model."""
    slo_scale: float | None = 5.0
    """Deadline of a request over its model's single-device latency; None: no deadlines."""
    batch_sizes: tuple[int, ...] = (1,)
    overhead_s: float = 0.0
    """Time of each request beside its stages: front end, dispatch and the way back."""
    stage_overhead: float = 0.0
    """Stages of a group take longer by this share for each stage that the group has."""
    _stage_ns: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _specs: dict[Group, GroupSpec] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a cluster needs at least one model; got none")
        if self.slo_scale is not None and not (isfinite(self.slo_scale) and self.slo_scale > 0):
            raise ValueError(f"slo_scale is a finite number above 0, or nothing; got {self.slo_scale!r}")
        for name in ("overhead_s", "stage_overhead"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is a finite number of at least 0; got {value!r}")

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.models)

    @functools.cached_property
    def _bytes(self) -> tuple[_DeviceBytes, ...]:
        by_model: dict[int, _DeviceBytes] = {}
        return tuple(
            by_model.setdefault(id(model), _DeviceBytes(model, self.cluster.n_devices))
            for model in self.models.values()
        )

    def workload(self, trace: Trace) -> Trace:
        """*trace* with its models in the order of this cluster's, and deadlines by the SLO scale."""
        unknown = [name for name in trace.models if name not in self.models]
        if unknown or not trace.models:
            raise ValueError(
                f"the workload asks for models {', '.join(unknown) or 'without a name'}, which the cluster does not "
                f"have; it has {', '.join(self.names[:8])}{', ...' if len(self.names) > 8 else ''}"
            )
        row = {name: index for index, name in enumerate(self.names)}
        rows = np.array([row[name] for name in trace.models], np.int64)
        index = rows[np.zeros(len(trace), np.int64) if trace.model_index is None else trace.model_index]
        deadline = None
        if self.slo_scale is not None:
            each = np.array([round(self.slo_scale * m.latency_s * NS_PER_S) for m in self.models.values()], np.int64)
            deadline = each[index]
        return replace(trace, models=self.names, model_index=index, deadline_ns=deadline)

    def views(self, workload: Trace) -> tuple[ModelView, ...]:
        """The models as searches see them, with the rates of *workload*."""
        counts = np.bincount(_model_index(workload), minlength=len(self.names))
        span_s = max(workload.duration_s, 1e-9)
        return tuple(
            ModelView(name=name, latency_s=model.latency_s, rate_per_s=float(count / span_s), device_bytes=sizes)
            for (name, model), count, sizes in zip(self.models.items(), counts, self._bytes, strict=True)
        )

    def experiment(self, placement: Placement, workload: Trace) -> GroupExperiment:
        """The experiment that the engine runs; ValueError where the placement does not fit the cluster."""
        fresh = tuple(group for group in placement.groups if group not in self._specs)
        if placement.n_devices > self.cluster.n_devices or not self._fit(fresh):
            check(placement, self.cluster, self.views_without_traffic)
        return GroupExperiment(
            workload=workload,
            groups=self.groups(placement),
            batch_sizes=self.batch_sizes,
            overhead_ns=round(self.overhead_s * NS_PER_S),
        )

    def _fit(self, groups: tuple[Group, ...]) -> bool:
        """Whether each group fits its devices: of a search's next placement one is new, and the others are known to."""
        try:
            check(Placement(groups=groups), self.cluster, self.views_without_traffic)
        except ValueError:
            return False
        return True

    @functools.cached_property
    def views_without_traffic(self) -> tuple[ModelView, ...]:
        """The models' views with rates of 0: what memory is checked against."""
        return tuple(
            ModelView(name=name, latency_s=model.latency_s, rate_per_s=0.0, device_bytes=sizes)
            for (name, model), sizes in zip(self.models.items(), self._bytes, strict=True)
        )

    def outcome(self, placement: Placement, workload: Trace, *, screening: bool = False) -> Outcome:
        """The outcome of *workload*, which `workload` has made; ValueError where the placement does not fit.

        From the event loop; with *screening*, as searches ask thousands of times, from the loop that a test proves equal to it.
        """
        experiment = self.experiment(placement, workload)
        columns = run_groups(experiment, engine="auto" if screening else "events")
        return Outcome(workload=workload, columns=columns, n_groups=len(placement.groups))

    @property
    def screened_by(self) -> ScreenedBy:
        """The loop that serves the workload while screening: the one of events, or the one without, compiled or not."""
        if len(self.batch_sizes) > 1:
            return "events"
        return "compiled loop" if loop_is_compiled() else "python loop"

    def scorer(self, workload: Trace) -> Callable[[Placement], Score]:
        """The score of each placement on *workload*, which `workload` has made; ValueError where one does not fit."""
        if self.screened_by == "events":
            return lambda placement: self.outcome(placement, workload).score(placement.replicas)
        screen = Screen(workload, round(self.overhead_s * NS_PER_S))

        def score(placement: Placement) -> Score:
            served = screen.serve(self.experiment(placement, workload).groups)
            n = len(workload)
            # As the attainment and the latencies of an `Outcome`: of all requests.
            attainment, mean_s = sum(served.requests) / n, float(served.latency_ns) / NS_PER_S / n
            return Score(_value(attainment, mean_s, placement.replicas), served.unserved, served.requests)

        return score

    def groups(self, placement: Placement) -> tuple[GroupSpec, ...]:
        """The placement's groups with the times of their stages."""
        return tuple(self._group(group) for group in placement.groups)

    def _group(self, group: Group) -> GroupSpec:
        # From one placement of a search to the next a single group changes; the others were checked and priced before.
        if group not in self._specs:
            self._specs[group] = GroupSpec(
                models=group.models,
                stage_ns=tuple(self._times(model, group.shape) for model in group.models),
                n_stages=group.inter_op,
            )
        return self._specs[group]

    def _times(self, model: int, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        key = (model, shape)
        if key not in self._stage_ns:
            spec = self.models[self.names[model]]
            factor = (1.0 + self.stage_overhead * shape[0]) * NS_PER_S
            self._stage_ns[key] = tuple(
                tuple(round(stage * factor) for stage in spec.stage_s(*shape, batch)) for batch in self.batch_sizes
            )
        return self._stage_ns[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """How a placement served a workload."""

    workload: Trace
    columns: GroupColumns
    n_groups: int

    @property
    def attainment(self) -> float:
        """Share of all requests that finished within their deadline (without deadlines: that finished)."""
        return float(np.mean(self.columns.finish_ns >= 0))

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """The latency of each request that was served, in order of arrival."""
        served = self.columns.finish_ns >= 0
        return (self.columns.finish_ns[served] - self.workload.arrival_ns[served]) / NS_PER_S

    @property
    def unserved(self) -> NDArray[np.int64]:
        """For each model, requests that were not served in time."""
        return np.bincount(
            _model_index(self.workload)[self.columns.finish_ns < 0], minlength=max(len(self.workload.models), 1)
        )

    @property
    def requests(self) -> NDArray[np.int64]:
        """For each group, requests that it served."""
        served = self.columns.finish_ns >= 0
        return np.bincount(self.columns.group[served], minlength=self.n_groups)

    def score(self, replicas: int) -> Score:
        finish, arrival = self.columns.finish_ns, self.workload.arrival_ns
        served = finish >= 0
        mean_s = float(np.sum(finish - arrival, where=served)) / NS_PER_S / len(finish)
        value = _value(self.attainment, mean_s, replicas)
        return Score(value=value, unserved=self.unserved.tolist(), requests=self.requests.tolist())


def _value(attainment: float, mean_s: float, replicas: int) -> float:
    """Attainment, then short latencies, then more replicas: the artifact's order of preference. A rejected request counts as no
    time in *mean_s*, as in the artifact."""
    return attainment - mean_s / 1e4 + replicas / 1e6


def evaluate(serving: Serving, placement: Placement, trace: Trace, *, screening: bool = False) -> Outcome:
    """Serve *trace* with *placement* to its end; *screening* as in `Serving.outcome`. ValueError where it does not fit."""
    return serving.outcome(placement, serving.workload(trace), screening=screening)


def evaluate_windows(serving: Serving, placements: Sequence[Placement], trace: Trace, window_s: float) -> Outcome:
    """Serve each window of *trace* with the placement of its own, at no cost: every window finds idle groups."""
    workload = serving.workload(trace)
    window = workload.arrival_ns // round(window_s * NS_PER_S)
    n = len(workload)
    columns = {name: np.full(n, -1, np.int64) for name in ("start_ns", "finish_ns", "group", "batch")}
    for number in np.unique(window):
        rows = np.flatnonzero(window == number)
        part = serving.outcome(placements[int(number)], workload.take(rows)).columns
        for name, column in columns.items():
            column[rows] = getattr(part, name)
    most = max((len(placement.groups) for placement in placements), default=0)
    return Outcome(workload=workload, columns=GroupColumns(**columns), n_groups=most)


def _model_index(workload: Trace) -> NDArray[np.int64]:
    return np.zeros(len(workload), np.int64) if workload.model_index is None else workload.model_index
