"""Logs and scrapes as they come: incomplete, given twice, with clocks of their own, and options that do not fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim import Scenario
from sim.cli import build_app
from sim.observe.observation import Source, traffic_of
from sim.observe.replay import beside, hours, replay

ROW = {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 20, "ttft_s": 0.05, "e2el_s": 0.5}


def log(folder: Path, *rows: dict[str, Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({**ROW, **row}) + "\n" for row in rows))
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(build_app(), ["observe", *map(str, arguments)])


def test_means_over_all_intervals_are_of_all_requests_that_each_side_has(tmp_path: Path) -> None:
    ttft_s = (0.09, 0.05, 0.16, 0.06)
    path = log(tmp_path, *({"arrival_s": float(at), "ttft_s": each} for at, each in enumerate(ttft_s)))
    seen, rows = Source(files=(path,)).read()
    traffic = traffic_of(Source(), seen, rows)
    edges_s = hours(seen.begin_s, seen.end_s, seen.scrape_s)
    replayed = replay(Scenario.default(), traffic, edges_s, seeds=[0])
    whole = beside(seen, edges_s, replayed).whole("ttft_s")
    requests = replayed.runs[0].columns.requests
    simulated_s = (requests["first_token_ns"] - requests["arrival_ns"]).mean() / 1e9
    assert whole == (pytest.approx(np.mean(ttft_s)), pytest.approx(simulated_s))
