"""The results of a run: columns and a manifest in memory, and metrics, tables and files made of them when asked."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim.metrics as metrics
from sim.errors import OutputError
from sim.metrics.rollout import rollout_figures
from sim.protocols import Figures, protocol
from sim.results.costs import costs_of
from sim.results.folder import DATA, read_json, staging, write_json
from sim.results.parquet import TRANSFERS, iteration_table, request_table, stored_columns, transfer_table, write_parquet
from sim.results.trust import trusted
from sim.results.words import LATENCY_HEADS, fact_rows, latency_rows
from workloads import Rollout

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "rooftrace-results-1"
_ROWS_TO_KEEP = 1 << 21
_DEAR = ("start_ns", "duration_ns", "kv_blocks_used")
"""Columns of iterations that take long and that every look needs."""
_DEAR_ROWS_TO_KEEP = 1 << 23


class Result:
    """A finished run. `summary`, `requests` and `iterations` are worked out when first looked at.

    *columns* are the engine's, *manifest* says what was run, *slo* holds the limits in seconds that goodput is
    counted against (keys `ttft_s`, `tpot_s`, `e2el_s`).
    """

    def __init__(
        self, columns: metrics.Columns, *, manifest: Mapping[str, Any], slo: Mapping[str, float | None] | None = None
    ) -> None:
        self.columns = columns
        self.manifest = dict(manifest)
        self.slo = dict(slo or {})

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """Every metric, nested as in summary.json, over the scenario's `window`; see `sim.metrics.summary`."""
        found = metrics.summary(
            self.columns,
            slo=self.slo,
            window=self._window,
            models=self.manifest.get("models", ()),
            classes=self.manifest.get("classes", ()),
            tenants=self.manifest.get("tenants", ()),
        )
        costs = costs_of(self.columns, self.manifest)
        if costs is not None and found["window"]["rule"] != "whole":
            found["window"]["whole_run"].append("costs")
        beside = {
            **trusted(self.manifest, found),
            **self._rollout,
            "reported": self._reported,
            "costs": costs,
            "fitted_stack": fitted_stack(self.manifest),
        }
        return {**found, **{key: value for key, value in beside.items() if value}}

    @property
    def _rollout(self) -> dict[str, Any]:
        """The steps of a rollout for a summary; empty where the scenario has none."""
        scenario = self.manifest.get("scenario", {})
        asked = scenario.get("workload", {}).get("rollout")
        if asked is None:
            return {}
        rollout = Rollout(**asked)
        groups = rollout.groups(scenario["seed"])
        requests, meta = self.columns.requests, self.columns.meta
        # A request is known by its last machine, which is all of them where they do not come and go, nor hand requests over.
        stays = rollout.redistribute is None and rollout.leftover != "recompute"
        one_each = stays and "fleet" not in meta and "landed_ns" not in requests
        return rollout_figures(requests, rollout, groups, len(meta["kv_blocks_total"]) if one_each else None)

    @property
    def figures(self) -> Figures | None:
        """The figures that the scenario's protocol reports: its statistic over the requests that it counts; None without a
        protocol."""
        asked = self.manifest.get("scenario", {}).get("workload", {})
        if asked.get("protocol") is None:
            return None
        return protocol(asked["protocol"]).figures(self.columns, asked["concurrency"])

    @property
    def _reported(self) -> dict[str, float | None] | None:
        """`figures` for a summary; None for what none of the requests has."""
        found = self.figures
        return (
            None
            if found is None
            else {key: value if value == value else None for key, value in found._asdict().items()}
        )

    @property
    def _window(self) -> Mapping[str, Any]:
        asked = self.manifest.get("scenario", {}).get("window", metrics.WHOLE)
        return self.manifest.get("window", asked)

    def or_whole(self) -> Result:
        """The same over the whole run, which a note in its manifest says, where the scenario's `window` cannot be had; elsewhere
        the result itself. So a long run is kept whose warm-up has no end."""
        try:
            _ = self.summary
        except metrics.WindowError as error:
            notes = [*self.manifest.get("notes", ()), f"{error}. All figures are over the whole run."]
            return Result(
                self.columns, manifest={**self.manifest, "notes": notes, "window": metrics.WHOLE}, slo=self.slo
            )
        return self

    @property
    def in_window(self) -> NDArray[np.bool_]:
        """Which requests the latencies of `summary` are of: shape [requests]."""
        return metrics.in_window(self.columns.requests, self.summary)

    @functools.cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request: the stored columns, and ttft_s, tpot_s, e2el_s and queue_s worked out from them."""
        frame = request_table(self.columns).to_pandas()
        columns = self.columns.requests
        for measure in (metrics.ttft_s, metrics.tpot_s, metrics.e2el_s, metrics.queue_s):
            frame[measure.__name__] = measure(columns)
        return frame

    @functools.cached_property
    def iterations(self) -> pd.DataFrame:
        """One row an iteration, in the order of iterations.parquet."""
        import pyarrow as pa

        return pa.concat_tables(map(iteration_table, self.columns.iteration_blocks())).to_pandas()

    @functools.cached_property
    def kv_transfers(self) -> pd.DataFrame | None:
        """One row a transfer of KV between a device and a tier or from one machine to another, as in kv_transfers.parquet; None
        where there are neither."""
        transfers = metrics.transfers_of(self.columns)
        return None if transfers is None else transfer_table(transfers).to_pandas()

    def kept(self) -> Result:
        """The same result with gaps and iterations, where they are few, worked out once for figures, files and pictures."""
        if isinstance(self.columns, _Once):
            return self
        found = Result(_Once(self.columns), manifest=self.manifest, slo=self.slo)
        if "summary" in self.__dict__:
            found.__dict__["summary"] = self.summary
        return found

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the results folder and return its path; a folder of older results is replaced as a whole.

        Pictures are drawn by `sim.plots.save_run`. Raises OutputError where the folder cannot be written or holds files that
        are not Rooftrace's.
        """
        with staging(folder) as scratch:
            self.write(scratch)
        return Path(folder)

    def write(self, folder: Path) -> None:
        """Write every file of the results folder straight into an existing *folder* (see `staging`)."""
        kept = self.kept()
        summary = self.__dict__.setdefault("summary", kept.summary)
        write_json(folder / "summary.json", summary)
        pools = [int(blocks) for blocks in self.columns.meta["kv_blocks_total"]]
        transfers = metrics.transfers_of(kept.columns)
        files = [*DATA, TRANSFERS] if transfers is not None else [*DATA]
        manifest = {"format": FORMAT, **self.manifest, "files": files, "slo": self.slo, "kv_blocks_total": pools}
        if summary["speculation"] is not None:
            manifest["speculation"] = summary["speculation"]
        write_json(folder / "manifest.json", manifest)
        write_parquet([request_table(self.columns)], folder / "requests.parquet")
        write_parquet(map(iteration_table, kept.columns.iteration_blocks()), folder / "iterations.parquet")
        if transfers is not None:
            write_parquet([transfer_table(transfers)], folder / TRANSFERS)

    @property
    def rejections(self) -> dict[str, int]:
        """The number of requests that were rejected for each reason."""
        reason = self.columns.requests["reason"]
        counts = np.bincount(reason[reason >= 0], minlength=len(self.columns.reasons)).tolist()
        return dict(zip(self.columns.reasons, counts, strict=True))

    @property
    def label(self) -> str:
        """The name of the run in a few words: model, hardware and scheduler."""
        return str(self.manifest.get("label", "")) or "run"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Result:
        """The result stored in *folder*: summary, requests, iterations and manifest as they were written.

        Gaps between single tokens are not stored, only their statistics in the summary; `columns.itl()` of a
        loaded result says so. Raises OutputError where *folder* is not a complete results folder.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise OutputError(f"{folder} is not a folder; give the folder that `rooftrace run` wrote")
        if not (folder / "manifest.json").is_file():
            raise OutputError(f"{folder} is not a results folder: manifest.json is missing")
        manifest = read_json(folder / "manifest.json", "format")
        found = manifest.pop("format")
        if found != FORMAT:
            raise OutputError(f"{folder} has results of format {found!r}; this version reads {FORMAT!r}: run it again")
        # Manifests of older versions do not say which files belong to them.
        files = manifest.get("files", [*DATA, TRANSFERS] if (folder / TRANSFERS).is_file() else [*DATA])
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            are = "are" if len(missing) > 1 else "is"
            raise OutputError(f"{folder} is not complete: {', '.join(missing)} {are} missing; run again what wrote it")
        summary = read_json(folder / "summary.json", "requests")
        columns = stored_columns(folder, files, manifest, summary)
        result = cls(columns, manifest=manifest, slo=manifest.get("slo"))
        result.__dict__["summary"] = summary
        return result

    def __repr__(self) -> str:
        counts = self.summary["requests"]
        return f"Result({self.label!r}, {counts['finished']} of {counts['total']} requests finished)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            + "".join(f"<td style='text-align:right'>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for name, cells in latency_rows(self.summary)
        )
        heads = "".join(f"<th>{head}</th>" for head in LATENCY_HEADS)
        facts = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in fact_rows(self.summary)
        )
        return (
            f"<div><b>{escape(self.label)}</b>"
            f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
            f"<table><tbody>{facts}</tbody></table></div>"
        )


def fitted_stack(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Where a fitted serving stack came from: its file, of what, to how many runs, and its errors; empty for a stack by name."""
    hardware = [manifest.get("hardware", {}), *(pool["hardware"] for pool in manifest.get("pools", {}).values())]
    fits = [fit for each in hardware if (fit := each.get("serving_stack", {}).get("fit"))]
    if not fits:
        return {}
    errors = {key: value for key, value in fits[0].items() if "_error_" in key}
    return {
        "file": ", ".join(dict.fromkeys(fit["file"] for fit in fits)),
        "of": fits[0]["of"],
        "runs": len(fits[0].get("runs", ())),
        "set_aside": len(fits[0].get("set_aside", ())),
        **errors,
    }


class _Once:
    """Columns whose gaps and iterations, where they are few, are worked out once."""

    def __init__(self, columns: metrics.Columns) -> None:
        self.requests = columns.requests
        self.reasons = columns.reasons
        self.meta = columns.meta
        self.transfers = lambda: metrics.transfers_of(columns)
        self.itl_blocks = metrics.kept_blocks(columns.itl_blocks)
        self._columns = columns
        self._few: Sequence[Mapping[str, NDArray[Any]]] | None = ()
        """None: they are many."""
        self._dear: list[dict[str, NDArray[Any]]] = []
        """The columns of many iterations that take long, block by block."""

    @functools.cached_property
    def iteration_sums(self) -> metrics.IterationSums:
        return metrics.sums_of(self)

    def iteration_blocks(self) -> Iterable[Mapping[str, NDArray[Any]]]:
        if self._few == ():
            self._few = _few(self._columns.iteration_blocks())
        return self._with_dear() if self._few is None else self._few

    def _with_dear(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        n = 0
        for i, block in enumerate(self._columns.iteration_blocks()):
            n += len(block["replica"])
            if i == len(self._dear) and n <= _DEAR_ROWS_TO_KEEP:
                self._dear.append({})
            yield _WithKept(block, self._dear[i]) if i < len(self._dear) else block


class _WithKept(Mapping[str, NDArray[Any]]):
    """A block of iterations with some columns that are kept from one pass over them to the next."""

    def __init__(self, block: Mapping[str, NDArray[Any]], kept: dict[str, NDArray[Any]]) -> None:
        self._block = block
        self._kept = kept

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in _DEAR:
            return self._block[name]
        if name not in self._kept:
            self._kept[name] = metrics.narrow(self._block[name])
        return self._kept[name].astype(np.int64, copy=False)

    def __contains__(self, name: object) -> bool:
        return name in self._block

    def __iter__(self) -> Iterator[str]:
        return iter(self._block)

    def __len__(self) -> int:
        return len(self._block)


def _few(blocks: Iterable[Mapping[str, NDArray[Any]]]) -> list[Mapping[str, NDArray[Any]]] | None:
    """The blocks where their rows are few, and otherwise None."""
    found: list[Mapping[str, NDArray[Any]]] = []
    n = 0
    for block in blocks:
        found.append(block)
        n += len(block["replica"])
        if n > _ROWS_TO_KEEP:
            return None
    return found
