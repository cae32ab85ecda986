"""Measured files against the models: every row predicted, one line of errors a file and quantity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwmodels.device import load_device
from hwmodels.measured import KINDS, catalogue_name, is_kernel_level, predict, survey
from hwmodels.profiles import load_profile
from sim import metrics
from sim.bench.load import sent_order
from sim.bench.published.machines import Unmodelled
from sim.bench.published.powered import RELEASES, drawn
from sim.bench.published.rows import (
    concurrency_of,
    deployment_of,
    family_of,
    half_of,
    is_apart,
    iteration_s,
    layout_of,
    most_clients,
    replayed,
    requests_of,
    rows_of,
    served_run,
    served_s,
)
from sim.bench.published.servers import GAP_ANALYSIS, SETTINGS
from sim.errors import RooftraceError
from sim.protocols import protocol
from sim.under_way import steps

if TYPE_CHECKING:
    from hwmodels.device import Device
    from hwmodels.measured import Measurement, Said
    from hwmodels.measured.folder import Survey

LEFT_OUT = 3
"""Exit code of commands that left out a file or row which they did not understand, and did the rest."""
_NO_DEVICE = (
    "neither its columns nor its name say the device; give it a column device, or let the name say it, as in "
    "gemm_h100_bf16_vllm0.24.csv (validate --hardware prices it all the same)"
)
_NO_SETTINGS = f"{SETTINGS} is not in its folder: servers without settings of their own have those of their stack"
_ONE_TOKEN = "one output token: there is no time per further token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A quantity of a file's rows: predicted (NaN: no model) and measured (NaN: the row does not say), in SI units."""

    file: str
    device: str
    quantity: str
    predicted: np.ndarray
    measured: np.ndarray
    unmodelled: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows that it leaves without a prediction."""
    notes: tuple[str, ...] = ()
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The groups of each serving row, by `family`, `stack`, `model`, `device`, `precision`, `load` (requests in flight),
    `half` (of the deployments: fitted or held back, where `sim.validation.fit_acceptance` fits something), and for
    `sim.validation.choices` `layout`, `gpus` (0: not known, or separate pools), `isl` and `osl`."""

    @property
    def line(self) -> ErrorLine:
        known = np.isfinite(self.predicted) & np.isfinite(self.measured) & (self.measured > 0)
        ratio = self.predicted[known] / self.measured[known] - 1.0
        size = 100.0 * np.abs(ratio)
        some = bool(known.any())
        return ErrorLine(
            file=self.file,
            device=self.device,
            quantity=self.quantity,
            rows=len(self.measured),
            unmodelled=sum(self.unmodelled.values()),
            mape_pct=float(size.mean()) if some else None,
            median_pct=float(np.median(size)) if some else None,
            p90_pct=float(np.percentile(size, 90)) if some else None,
            bias_pct=float(100.0 * ratio.mean()) if some else None,
            reasons=self.unmodelled,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """Relative errors of the modelled rows in percent (None: there are none); bias: mean of predicted / measured - 1."""

    file: str
    device: str
    quantity: str
    rows: int
    unmodelled: int
    mape_pct: float | None
    median_pct: float | None
    p90_pct: float | None
    bias_pct: float | None
    reasons: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder of measured files: those that can be compared, and a sentence for each file and rows left out."""

    measurements: tuple[Measurement, ...]
    left_out: tuple[str, ...]
    files_left_out: int
    rows_left_out: int
    """Rows refused in files that are otherwise read."""

    @property
    def verdict(self) -> str:
        """The things that were left out, in one sentence; empty where nothing was."""
        if not self.left_out:
            return ""
        parts = [(self.files_left_out, "file"), (self.rows_left_out, "row")]
        counted = " and ".join(f"{n:,} {what}{'' if n == 1 else 's'}" for n, what in parts if n)
        return f"{counted} left out (exit code {LEFT_OUT}); --strict refuses the folder instead"


def read_measured(
    folder: str | Path, *, hardware: str | None = None, strict: bool = False, said: Said | None = None
) -> Folder:
    """The files of *folder*; RooftraceError if there are none, or, with *strict*, for any that is not understood.

    A kernel file that does not say its device is left out too, unless *hardware* prices every file or *said* says it.
    """
    try:
        found = _with_known_protocols(survey(folder, strict=strict, said=said), strict)
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
    nowhere = [m for m in found.measurements if hardware is None and is_kernel_level(m) and not m.device]
    sentences = [f"{m.path.name}: not understood: {_NO_DEVICE}" for m in nowhere]
    if sentences and strict:
        raise RooftraceError(sentences[0])
    kept = tuple(m for m in found.measurements if not any(m is other for other in nowhere))
    left_out = (*found.left_out, *sentences)
    if not kept and Path(folder).is_file():
        raise RooftraceError(left_out[0].replace(": not understood: ", ": ", 1))
    if not kept:
        raise RooftraceError(f"{folder}: no file is understood; {'; '.join(left_out[:3])}")
    return Folder(
        measurements=kept,
        left_out=left_out,
        files_left_out=len(found.not_understood) + len(nowhere),
        rows_left_out=sum(sum(m.refused.values()) for m in kept),
    )


def _with_known_protocols(found: Survey, strict: bool) -> Survey:
    """*found* without the rows that name a protocol that is not one; ValueError for the first of them with *strict*.

    The reader of tables knows no protocols: they are of the simulator.
    """
    kept: list[Measurement] = []
    reasons = dict(found.not_understood)
    for m in found.measurements:
        named = m.columns.get("protocol")
        refused: dict[str, int] = {}
        bad = np.zeros(len(m), bool)
        for name in dict.fromkeys([] if named is None else named.tolist()):
            if not name:
                continue  # its family has one
            try:
                protocol(str(name))
            except ValueError as error:
                if strict:
                    raise ValueError(f"{m.path.name}: protocol: {error}") from None
                mine = np.asarray(named) == name
                refused[f"protocol: {error}"] = int(mine.sum())
                bad |= mine
        if refused and bad.all():
            reasons[m.path.name] = f"no row is left: {'; '.join([*m.refused, *refused])}"
        elif refused:
            columns = {column: values[~bad] for column, values in m.columns.items()}
            kept.append(replace(m, columns=columns, refused={**m.refused, **refused}))
        else:
            kept.append(m)
    return replace(found, measurements=tuple(kept), not_understood=reasons)


def validate(folder: str | Path, *, hardware: str | None = None) -> list[Comparison]:
    """Compare every CSV of *folder* with what the models say.

    *hardware*, a device's name or the path of a profile, prices every file whatever device its name says; in
    end-to-end files it prices the rows of its own device. RooftraceError for a folder or file that is not understood:
    nothing is skipped.
    """
    return list(comparisons(read_measured(folder, hardware=hardware, strict=True), hardware=hardware))


def comparisons(folder: Folder, *, hardware: str | None = None) -> Iterator[Comparison]:
    """`validate` of what was read of a folder, file by file as they are done."""
    try:
        given = _Hardware.of(hardware) if hardware is not None else None
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
    for measurement in steps(folder.measurements, "files"):
        yield from compare(measurement, hardware=given, others=folder.measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hardware:
    name: str
    profile: str | None
    """The path of a profile file; None: the shipped one."""

    @classmethod
    def of(cls, name: str) -> _Hardware:
        if name.endswith(".toml"):
            return cls(name=load_profile(name).name, profile=name)
        return cls(name=load_device(name).name, profile=None)


def compare(
    measurement: Measurement, *, hardware: _Hardware | None = None, others: Sequence[Measurement] = ()
) -> Iterator[Comparison]:
    """The comparisons of one file; *others* are files that it may need (a time series needs its requests)."""
    handler = _HANDLERS.get(measurement.kind, _kernels)
    yield from handler(measurement, hardware, others)


def _device_of(measurement: Measurement) -> Device:
    return load_device(catalogue_name(measurement.device))


def _kernels(
    measurement: Measurement, hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    assert measurement.measured_s is not None
    notes: tuple[str, ...] = ()
    try:
        name = hardware.name if hardware else _device_of(measurement).name
        profile = load_profile((hardware.profile if hardware else None) or name)
    except ValueError as error:
        name, reason = measurement.device, str(error).partition(";")[0]
        predicted, reasons = np.full(len(measurement), np.nan), {reason: len(measurement)}
    else:
        found = predict(measurement, profile)
        predicted, reasons = found.seconds, dict(found.unmodelled)
        notes = (*measurement.notes, *((profile.note,) if profile.note.startswith("efficiencies") else ()))
    yield _compared(measurement, name, "latency", predicted, measurement.measured_s, reasons, notes=notes)


class _Collected:
    """Two predictions a row, and the reasons for what is missing."""

    def __init__(self, n: int) -> None:
        self.values = np.full((2, n), np.nan)
        self.reasons: dict[str, int] = {}

    def put(self, index: int, price: Callable[[], tuple[float, float]]) -> None:
        try:
            self.values[:, index] = price()
        except Unmodelled as error:
            self.reasons[str(error)] = self.reasons.get(str(error), 0) + 1


def _iterations(
    measurement: Measurement, hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    got = _Collected(len(measurement))
    for index, row in enumerate(rows_of(measurement)):
        if hardware is not None:
            row["hardware"] = hardware.name
        got.put(index, lambda row=row: iteration_s(row, profile=hardware.profile if hardware else None))
    name = hardware.name if hardware else _name_or_label(measurement)
    columns = measurement.columns
    for predicted, what in zip(got.values, ("prompt_time", "token_time"), strict=True):
        yield _compared(measurement, name, what, predicted, columns[f"{what}_ms"] * 1e-3, got.reasons)


def _name_or_label(measurement: Measurement) -> str:
    if not measurement.device and "hardware" in measurement.columns:
        return "+".join(sorted(set(measurement.columns["hardware"].tolist())))
    try:
        return _device_of(measurement).name
    except ValueError:
        return measurement.device


def _own_profile(measurement: Measurement, hardware: _Hardware | None) -> str | None:
    return hardware.profile if hardware and hardware.name == _name_or_label(measurement) else None


def _silicon(
    measurement: Measurement, hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    rows = rows_of(measurement)
    got = _Collected(len(measurement))
    done: dict[str, tuple[float, float]] = {}

    def price(row: Mapping[str, Any], clients: int) -> tuple[float, float]:
        served = served_run(row, measurement.path.parent, clients=clients)
        if served.asked not in done:
            own = hardware is not None and hardware.name == served.device
            done[served.asked] = served_s(served, profile=hardware.profile if own and hardware else None)
        return done[served.asked]

    for index, (row, clients) in enumerate(zip(rows, most_clients(rows), strict=True)):
        got.put(index, lambda row=row, clients=clients: price(row, clients))
    lacks = not (measurement.path.parent / SETTINGS).is_file()
    if lacks and any(str(row.get("provenance", "")) != GAP_ANALYSIS for row in rows):
        measurement = replace(measurement, notes=(*measurement.notes, _NO_SETTINGS))
    yield from _served(measurement, rows, got)


def _elsewhere(
    _measurement: Measurement, _hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    """Settings that servers were started with, read where the rows beside them are; sessions, which `sim.validation.sessions`
    compares."""
    yield from ()


def row_groups(measurement: Measurement, rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The `Comparison.groups` of serving *rows*, which are those of *measurement*."""
    columns = measurement.columns
    layouts = [layout_of(row) for row in rows]
    load = [concurrency_of(row) if is_apart(row) else row["concurrency"] for row in rows]
    return {
        "family": np.array([family_of(row) for row in rows]),
        "stack": columns["backend"],
        "model": columns["model_path"],
        "device": columns["system"],
        "precision": columns["precision"],
        "load": np.array(load, float),
        "half": np.array([("fitted", "held back")[half_of(deployment_of(row))] for row in rows]),
        "layout": np.array([name for name, _ in layouts]),
        "gpus": np.array([gpus for _, gpus in layouts]),
        "isl": columns["isl"],
        "osl": columns["osl"],
    }


def _served(measurement: Measurement, rows: Sequence[Mapping[str, Any]], got: _Collected) -> Iterator[Comparison]:
    """TTFT and TPOT of serving rows, and what each row is of."""
    columns, groups = measurement.columns, row_groups(measurement, rows)
    single = int((np.isfinite(got.values[0]) & np.isnan(got.values[1])).sum())
    for predicted, what in zip(got.values, ("ttft", "tpot"), strict=True):
        reasons = dict(got.reasons)
        if what == "tpot" and single:
            reasons[_ONE_TOKEN] = single
        yield _compared(
            measurement, _devices(columns["system"]), what, predicted, columns[f"{what}_ms"] * 1e-3, reasons,
            groups=groups, notes=measurement.notes,
        )  # fmt: skip


def _compared(
    measurement: Measurement, device: str, quantity: str, predicted: Any, measured: Any, unmodelled: Mapping[str, int],
    **more: Any,
) -> Comparison:  # fmt: skip
    return Comparison(
        file=measurement.path.name, device=device, quantity=quantity, predicted=predicted, measured=measured,
        unmodelled=unmodelled, **more,
    )  # fmt: skip


def _devices(names: Iterable[Any]) -> str:
    return "+".join(sorted({_catalogue(str(name)) for name in names}))


def _catalogue(name: str) -> str:
    try:
        return load_device(name).name
    except ValueError:
        return name


def _requests(
    measurement: Measurement, hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    n = len(measurement)
    predicted, reasons = np.full((2, n), np.nan), {}
    requests = requests_of(measurement)
    measured = {"ttft": requests.ttft_s, "tpot": requests.tpot_s}
    try:
        simulated = replayed(measurement, profile=_own_profile(measurement, hardware)).requests
    except Unmodelled as error:
        reasons[str(error)] = n
    else:
        predicted[:, sent_order(requests)] = metrics.ttft_s(simulated), metrics.tpot_s(simulated)
    single = int((measurement.columns["output_toks"] <= 1).sum())
    for values, (what, truth) in zip(predicted, measured.items(), strict=True):
        why = dict(reasons)
        if what == "tpot" and single and not reasons:
            why[_ONE_TOKEN] = single
        yield _compared(measurement, _name_or_label(measurement), what, values, truth, why)


def _power(
    measurement: Measurement, hardware: _Hardware | None, _others: Sequence[Measurement]
) -> Iterator[Comparison]:
    """Power of a GPU, and energy per output token, on servers that are kept full."""
    got = _Collected(len(measurement))
    release = RELEASES.get(f"{measurement.source}{measurement.version}")

    def price(row: Mapping[str, Any]) -> tuple[float, float]:
        if release is None:
            raise Unmodelled(f"the release that {measurement.source}{measurement.version} ran is not known")
        found = drawn(row, release)
        return found.watt, found.joule_per_token

    for index, row in enumerate(rows_of(measurement)):
        got.put(index, lambda row=row: price(row))
    devices = _devices(measurement.columns["gpu"])
    for predicted, (what, column) in zip(got.values, POWER_COLUMNS.items(), strict=True):
        yield _compared(measurement, devices, what, predicted, measurement.columns[column], got.reasons)


POWER_COLUMNS = {"power of a GPU": "power_per_gpu_w", "energy a token": "joules_per_token"}
_SERIES = {"prompt_throughput": "prompt_throughput", "gen_throughput": "generation_throughput", "running": "running"}


def _timeseries(
    measurement: Measurement, hardware: _Hardware | None, others: Sequence[Measurement]
) -> Iterator[Comparison]:
    n = len(measurement)
    predicted = {name: np.full(n, np.nan) for name in _SERIES}
    reasons: dict[str, int] = {}
    same = [m for m in others if m.kind == "e2e_requests" and m.labels == measurement.labels]
    if not same:
        reasons["the arrivals of the run (its e2e_requests file) are not in the folder"] = n
    else:
        try:
            run = replayed(same[0], profile=_own_profile(measurement, hardware))
        except Unmodelled as error:
            reasons[str(error)] = n
        else:
            predicted = _per_tick(run, measurement.columns["t"])
    for name, what in _SERIES.items():
        measured = np.where(measurement.columns[name] > 0, measurement.columns[name], np.nan)
        why = dict(reasons)
        idle = int(np.isnan(measured).sum())
        if idle and not reasons:
            why["a tick in which the quantity is zero has no relative error"] = idle
        yield _compared(measurement, _name_or_label(measurement), what, predicted[name], measured, why)


def _per_tick(run: Any, ticks: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens a second over the second before each tick, and the running sequences at it."""
    table = run.iterations()
    end = (table["start_ns"] + table["duration_ns"]) * 1e-9
    edges = np.concatenate([[ticks[0] - 1.0], ticks])
    width = np.diff(edges)
    prompt, _ = np.histogram(end, edges, weights=table["prefill_tokens"])
    emitted, _ = np.histogram(end, edges, weights=table["emitted_tokens"])
    at = np.searchsorted(table["start_ns"] * 1e-9, ticks, side="right") - 1
    running = np.where(at >= 0, table["running"][np.maximum(at, 0)], 0)
    return {"prompt_throughput": prompt / width, "gen_throughput": emitted / width, "running": running.astype(float)}


_HANDLERS: Mapping[str, Callable[..., Iterator[Comparison]]] = {
    "iteration": _iterations,
    "e2e_silicon_agg": _silicon,
    "e2e_silicon_disagg": _silicon,
    "e2e_settings": _elsewhere,
    "e2e_power": _power,
    "e2e_requests": _requests,
    "e2e_timeseries": _timeseries,
    **{kind: _elsewhere for kind in KINDS if kind.startswith(("e2e_agentic", "e2e_multiturn"))},
}
