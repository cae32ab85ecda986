"""Fit the terms of `hwmodels.power` to measured power of servers that are kept full, models held back.

`python -m sim.validation.fit_power MEASURED` replays the tables power_mlenergy*_text.csv of that folder and prints power.toml, the
host terms of the servers (`HOSTS`, `LONE_HOSTS` of `sim.bench.published.powered`) and the comparison for models held back, from
both. H100 and B200 are fitted together, memory apart: they have the same models behind one release of vLLM. The A100's rows are of
an engine of 2024 whose steps were mostly waits for its host; they are fitted by themselves, at the speed that was measured.

A row informs the fit where what filled its time is known: its replay is about as fast (`KNOWN`), and stands for it; or the model is
dense in 16 bits, whose kernels are not in doubt, and far slower than its replay, so that the rest was waiting, and it counts at the
speed that was measured. Kernels that a release ran slower than priced, experts above all, would else count as idling.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels.device import load_device
from hwmodels.measured import Measurement, catalogue_model, read
from hwmodels.power import ANY, ARITHMETIC_EXPONENT, TERMS
from sim.bench.published.machines import Unmodelled
from sim.bench.published.powered import HOSTS, LONE_HOSTS, RELEASES, Drawn, drawn
from sim.bench.published.rows import rows_of
from workloads.write import write_whole

FloatArray = np.ndarray
KNOWN = (0.7, 1.4)
"""Measured over simulated speed of rows whose time is known to be filled as it is here."""
WAITING = 0.4
"""Speed below which a dense model in 16 bits mostly waits for its host: no doubt about a kernel explains it."""
OLD = "mlenergy2"
"""The set whose engine is priced as one that is years younger."""
MOST_SEATS = 512
"""Larger servers are not replayed for the fit, for time; validate replays all."""
TOGETHER = (("h100-sxm", "b200"), ("a100-40gb-sxm",))
"""Devices that share all terms but memory, newest engine first."""
EVEN_HOSTS = "h100-sxm"
"""The device whose servers say what hosts take, beside those of `LONE_HOSTS`, which were slower, unevenly over load."""
_SCATTER = 0.05
"""Log ratios up to this size count by their square, larger ones less and less."""


class HostTerms(NamedTuple):
    """Host time of an iteration, and of each sequence in it, beyond those of the replays."""

    step_s: float
    sequence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured row and its replay."""

    model: str
    """The model and its format, or formats of one model: held back together."""
    device: str
    set: str
    share: float
    """Measured power over TDP."""
    tokens_per_s: float
    batch: float
    """Mean of sequences that ran at once."""
    drawn: Drawn
    plain: bool
    """Whether the model is dense, in 16 bits."""

    @property
    def speed(self) -> float:
        return self.tokens_per_s / self.drawn.tokens_per_s

    @property
    def lone(self) -> bool:
        """Whether its server has the terms of `LONE_HOSTS`."""
        return self.drawn.devices == 1 and (self.set, self.device) in LONE_HOSTS

    @property
    def waits(self) -> bool:
        """Whether what it took longer than its replay was waiting for the host."""
        return self.plain and (self.speed < WAITING or self.set == OLD)

    @property
    def informs(self) -> bool:
        """Whether it is known what its time was filled with."""
        return self.waits or KNOWN[0] <= self.speed <= KNOWN[1]

    def hosted(self, more: HostTerms) -> Row:
        """The row with a replay each of whose steps takes so much more."""
        old = self.drawn
        tokens_per_s = 1.0 / (1.0 / old.tokens_per_s + more.step_s / self.batch + more.sequence_s)
        faster = tokens_per_s / old.tokens_per_s
        found = replace(
            old,
            tokens_per_s=tokens_per_s,
            bandwidth=old.bandwidth * faster,
            arithmetic=old.arithmetic * faster**ARITHMETIC_EXPONENT,
        )
        return replace(self, drawn=found)

    def state(self, *, measured_speed: bool) -> tuple[float, float]:
        """Bandwidth and arithmetic over its time, as simulated or at the speed that was measured."""
        return self.drawn.at(self.tokens_per_s if measured_speed else self.drawn.tokens_per_s)


def terms_matrix(states: Sequence[tuple[float, float]], memories: Sequence[int], n: int) -> FloatArray:
    """One row for each of *states* (bandwidth, arithmetic), one column a term: idle, arithmetic, and bandwidth by each of
    the *n* *memories*."""
    found = np.zeros((len(states), 2 + n))
    for line, (bandwidth, arithmetic), memory in zip(found, states, memories, strict=True):
        line[:2] = 1.0, arithmetic
        line[2 + memory] = bandwidth
    return found


def least_squares_terms(matrix: FloatArray, share: FloatArray, groups: Sequence[str]) -> FloatArray:
    """The terms for which min(1, matrix @ terms) is nearest to *share*, by robust log ratios; *groups* weigh alike. A device that
    waits draws no more than any was measured to draw."""
    from scipy.optimize import least_squares

    names, group, count = np.unique(np.array(groups), return_inverse=True, return_counts=True)
    weight = np.sqrt(len(group) / len(names) / count[group])

    def residuals(terms: FloatArray) -> FloatArray:
        return weight * np.log(np.clip(matrix @ terms, 0.05, 1.0) / share)

    n = matrix.shape[1]
    bounds = ([0.05] + [0.0] * (n - 1), [max(0.1, share.min())] + [3.0] * (n - 1))
    start = np.minimum(0.2, 0.9 * np.array(bounds[1]))
    return least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=_SCATTER).x


def host_terms(rows: Sequence[Row]) -> HostTerms:
    """The time that steps of *rows* take beyond replays, by robust log ratios of those on `EVEN_HOSTS`; models weigh alike."""
    return _beyond([row for row in rows if row.device == EVEN_HOSTS and KNOWN[0] <= row.speed <= KNOWN[1]])


def lone_terms(rows: Sequence[Row]) -> HostTerms:
    """The same of `LONE_HOSTS`, by all of its rows: what they lack is their hosts' time."""
    some = [row for row in rows if row.lone]
    return _beyond(some) if some else HostTerms(0.0, 0.0)


def _beyond(some: Sequence[Row]) -> HostTerms:
    from scipy.optimize import least_squares

    weight = 1.0 / np.sqrt([sum(each.model == row.model for each in some) for row in some])
    batch = np.array([row.batch for row in some])
    replayed_s = batch / np.array([row.drawn.tokens_per_s for row in some])
    measured_s = batch / np.array([row.tokens_per_s for row in some])

    def residuals(terms: FloatArray) -> FloatArray:
        step_s, sequence_s = terms * _HOST_UNITS
        return weight * np.log(np.maximum(replayed_s + step_s + sequence_s * batch, 1e-4) / measured_s)

    return HostTerms(*(least_squares(residuals, [0.0, 0.0], loss="soft_l1", f_scale=_SCATTER).x * _HOST_UNITS).tolist())


_HOST_UNITS = np.array([1e-3, 1e-5])
"""Seconds of the terms' order, in which the fit counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Terms of devices that were fitted together, by rows."""

    devices: tuple[str, ...]
    """Devices with a memory term of their own; none: one for all."""
    terms: FloatArray

    @classmethod
    def of(cls, rows: Sequence[Row], devices: tuple[str, ...]) -> Fit:
        used = [row for row in rows if row.informs]
        states = [row.state(measured_speed=row.waits) for row in used]
        matrix = terms_matrix(states, [cls._memory(devices, row.device) for row in used], max(1, len(devices)))
        share = np.array([row.share for row in used])
        return cls(devices=devices, terms=least_squares_terms(matrix, share, [f"{r.model} {r.set}" for r in used]))

    @staticmethod
    def _memory(devices: tuple[str, ...], device: str) -> int:
        return devices.index(device) if devices else 0

    def shares(self, rows: Sequence[Row], *, measured_speed: bool) -> FloatArray:
        """Predicted share of the TDP of each row, as simulated or at the speed that was measured."""
        states = [row.state(measured_speed=measured_speed) for row in rows]
        memories = [self._memory(self.devices, row.device) for row in rows]
        return np.minimum(1.0, terms_matrix(states, memories, max(1, len(self.devices))) @ self.terms)

    def entry(self, device: str) -> dict[str, float]:
        """The terms of *device* for power.toml."""
        idle, compute = self.terms[:2].tolist()
        memory = float(self.terms[2 + self._memory(self.devices, device)])
        return dict(zip(TERMS, (idle, memory, compute), strict=True))


def without_each(rows: Sequence[Row], devices: tuple[str, ...], by: str, *, measured_speed: bool) -> FloatArray:
    """Predicted shares of the TDP by fits that saw nothing of a row's model, or of its device (*by*)."""
    labels = np.array([getattr(row, by) for row in rows])
    found = np.full(len(rows), np.nan)
    for each in np.unique(labels):
        mine = labels == each
        others = [row for row, out in zip(rows, mine, strict=True) if not out]
        fit = Fit.of(others, () if by == "device" else devices)
        found[mine] = fit.shares(
            [row for row, out in zip(rows, mine, strict=True) if out], measured_speed=measured_speed
        )
    return found


def host_without_each(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the host terms that rows of other models have."""
    found = {}
    for model in {row.model for row in rows}:
        others = [row for row in rows if row.model != model]
        found[model] = {False: host_terms(others), True: lone_terms(others)}
    return [row.hosted(found[row.model][row.lone]) for row in rows]


def joule_factors(rows: Sequence[Row], share: FloatArray) -> FloatArray:
    """Measured over predicted energy per output token."""
    return np.array([row.share for row in rows]) / share / np.array([row.speed for row in rows])


def widths(ratios: FloatArray) -> list[float]:
    """5th and 95th percentile."""
    return [round(float(each), 3) for each in np.quantile(ratios, [0.05, 0.95])]


def tables(folder: Path) -> list[Measurement]:
    """The tables of power of *folder* whose prompts are text."""
    return [read(path) for path in sorted(folder.glob("power_mlenergy*_text.csv"))]


def _replayed(job: tuple[dict[str, Any], str]) -> Row | str:
    row, of = job
    try:
        found = drawn(row, RELEASES[of])
        model = catalogue_model(str(row["model"]))
    except (Unmodelled, ValueError) as error:
        return str(error)
    device = load_device(found.device)
    wide = str(row.get("precision", "bfloat16")) == "bfloat16"
    return Row(
        model=model.name.removesuffix("-2507"),
        device=device.name,
        set=of,
        share=float(row["power_per_gpu_w"]) / device.tdp_w,
        tokens_per_s=float(row["output_tokens_per_s"]),
        batch=float(row["avg_batch_size"]),
        drawn=found,
        plain=wide and model.experts is None,
    )


def replays(folder: Path, *, jobs: int = 2) -> tuple[list[Row], dict[str, int]]:
    """The rows of *folder* that can be replayed, and how many cannot, by the reason."""
    asked = [
        (row, f"{table.source}{table.version}")
        for table in tables(folder)
        for row in rows_of(table)
        if row["max_num_seqs"] <= MOST_SEATS
    ]
    reasons: dict[str, int] = {}
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        for found in pool.map(_replayed, asked, chunksize=4):
            if isinstance(found, Row):
                rows.append(found)
            else:
                reasons[found] = reasons.get(found, 0) + 1
    return rows, reasons


def entries_of(rows: Sequence[Row]) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """The entries of power.toml, lines of the comparison (rows whose model no fit had seen), and what else there is to say."""
    entries: dict[str, dict[str, Any]] = {}
    lines, notes = [], []
    used: list[Row] = []
    for devices in TOGETHER:
        newer = devices == TOGETHER[0]
        mine = [row for row in rows if row.device in devices and newer == (row.set != OLD)]
        used += mine
        fit = Fit.of(mine, devices)
        if newer:
            hosts = [("hosts", HOSTS[mine[0].set], host_terms(mine))]
            hosts += [(f"hosts of one {key[1]}", own, lone_terms(mine)) for key, own in LONE_HOSTS.items()]
            notes += [
                f"{name}: step_s = {own['step_s'] + more.step_s:.3g}, sequence_s = {own['sequence_s'] + more.sequence_s:.3g}"
                for name, own, more in hosts
            ]
            mine = host_without_each(mine)
        simulated = without_each(mine, devices, "model", measured_speed=False)
        at_speed = without_each(mine, devices, "model", measured_speed=True)
        share = np.array([row.share for row in mine])
        for device in devices:
            of_it = np.array([row.device == device for row in mine])
            some = [row for row in mine if row.device == device]
            # Of an engine that is priced as a younger one the speed says nothing: there power is judged at the measured one.
            entries[device] = {**fit.entry(device), "watt": widths((share / (simulated if newer else at_speed))[of_it])}
            if newer:
                entries[device]["joule"] = widths(joule_factors(some, simulated[of_it]))
            lines.append(_line(device, some, simulated[of_it], at_speed[of_it]))
        if newer:
            lines.append(_line("both", mine, simulated, at_speed))
            seen = fit.shares(mine, measured_speed=False)
            notes += [
                f"both, J a token as if power were exact: {_median(np.array([row.speed for row in mine]))} %",
                f"both, W of the rows that the fit saw: {_median(seen / share)} %",
            ]
        for device in devices:
            entries[device].setdefault("joule", _widest(entries.values()))
    strange = without_each(used, (), "device", measured_speed=True)
    watt = widths(np.array([row.share for row in used]) / strange)
    entries[ANY] = {**Fit.of(used, ()).entry(""), "watt": _widest([{"watt": watt}, *entries.values()], "watt")}
    entries[ANY]["joule"] = _widest([{"joule": watt}, *entries.values()])
    return entries, lines, notes


def _widest(entries: Iterable[Mapping[str, Any]], what: str = "joule") -> list[float]:
    """The farthest ends of any of *entries* that has them."""
    known = [entry[what] for entry in entries if what in entry]
    return [min(low for low, _ in known), max(high for _, high in known)]


def _line(device: str, rows: Sequence[Row], simulated: FloatArray, at_speed: FloatArray) -> str:
    """A row of the table of the comparison; `TABLE` is its head. *device*: its first cell."""
    share = np.array([row.share for row in rows])
    near = np.array([KNOWN[0] <= row.speed <= KNOWN[1] for row in rows])
    joule = 1.0 / joule_factors(rows, simulated)
    tdp_w = np.array([load_device(row.device).tdp_w for row in rows])

    def ends(shares: FloatArray) -> str:
        return f"{(tdp_w * shares).min():.0f} to {(tdp_w * shares).max():.0f}"

    cells = (
        *(device, f"{len(rows)}", f"{len({row.model for row in rows})}", ends(share), ends(simulated)),
        *(_median(simulated / share), _median(joule), _median(at_speed / share)),
        *(f"{int(near.sum())}", _median((simulated / share)[near]), _median(joule[near])),
    )
    return f"| {' | '.join(cells)} |"


def _median(ratios: FloatArray) -> str:
    """The median error in percent of these ratios to 1."""
    return f"{100 * float(np.median(np.abs(ratios - 1))):.1f}" if len(ratios) else "-"


TABLE = """\
| device | rows | models | W measured | simulated | W % | J a token % | W %, measured speed | rows of that speed | W % | J % |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |"""
HEAD = """\
# Power that a device draws, as a share of its limit (TDP), by what it does; `hwmodels.power` has the form. Written by
# `python -m sim.validation.fit_power MEASURED` from the ML.ENERGY benchmark's text generation (Apache-2.0): H100 and B200 with vLLM
# 0.11.1 (ml-energy/leaderboard @0cd52da), A100 40 GB with vLLM of 2024 (ml-energy/leaderboard-v2 @c3af7f3), energy by the driver's
# counters, servers kept full. watt, joule: measured over predicted power and energy per output token, 5th and 95th percentile over
# rows whose model (any: whose device) the fit had not seen; those of energy have the error of the simulated speed in them.
"""


def written(entries: dict[str, dict[str, Any]]) -> str:
    """power.toml."""
    parts = [HEAD]
    for name, entry in entries.items():
        parts.append(f"[{name}]")
        parts += [f"{key} = {value:.4g}" for key, value in entry.items() if key in TERMS]
        parts += [f"{key} = [{entry[key][0]:.3g}, {entry[key][1]:.3g}]" for key in ("watt", "joule")]
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sim.validation.fit_power")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="write power.toml")
    parser.add_argument("--jobs", type=int, default=2)
    told = parser.parse_args()
    rows, reasons = replays(told.folder, jobs=told.jobs)
    entries, lines, notes = entries_of(rows)
    text = written(entries)
    print(text)
    print("\n".join([TABLE, *lines, *notes]))
    for reason, count in reasons.items():
        print(f"{count} rows: {reason}")
    if told.out is not None:
        write_whole(told.out, text)


if __name__ == "__main__":
    main()
