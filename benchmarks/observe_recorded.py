"""Recorded metrics observed: rates, queue and KV use of published series beside their replay, the stack fitted to the same metrics.

    python -m benchmarks.observe_recorded [../shared]

The counters of vLLM every 20 s under agentic sessions (clean runs with KV on the GPUs alone; mean lengths from the table of runs),
and the stages of inference-perf as samples of a table of counters.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hwmodels.measured import read
from sim.bench.public import IN_FLIGHT, inference_perf
from sim.bench.published.sessions import session_runs
from sim.observe.observation import How, Observation, Source, observe, traffic_of
from sim.scenario import Scenario

AGENTIC = "agentic_b200_dsr1-fp4_vllm0.19.1"
OUTPUT = 64
"""Tokens of each answer of inference-perf."""
TEXTS = 100
PARTS = 12
"""Samples of a stage."""
COLUMNS = (
    *("t_s", "requests_total", "prompt_tokens_total", "generation_tokens_total", "prefix_hits", "ttft_s_sum"),
    *("ttft_s_count", "itl_s_sum", "itl_s_count"),
)
QUANTITIES = ("requests_per_s", "output_tokens_per_s", "ttft_s", "itl_s", "running", "in_flight", "waiting", "kv_used")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", nargs="?", default="../shared", type=Path)
    parser.add_argument("--most", type=int, default=6, help="agentic runs at most")
    asked = parser.parse_args(arguments)
    for name, found in (*agentic(asked.shared / "measured3", asked.most), *stages(asked.shared / "serving")):
        print(f"{name}: {found.traffic.requests:,} requests in {found.edges_s[-1] - found.edges_s[0]:,.0f} s")
        for quantity in QUANTITIES:
            whole = found.beside.whole(quantity)
            if whole is not None:
                errors = found.beside.error(quantity)
                known = np.abs(errors[np.isfinite(errors)])
                typical = f", median by interval {np.median(known):.1%}" if known.size else ""
                print(f"    {quantity:20} {whole[0]:10.4g} observed {whole[1]:10.4g} simulated{typical}")


def agentic(folder: Path, most: int) -> Iterator[tuple[str, Observation]]:
    """The clean runs without host memory behind the GPUs, by counters and mean lengths alone."""
    tables = {part: folder / f"{AGENTIC}{part}.csv" for part in ("", "_requests", "_series", "_users")}
    measurements = [read(path) for path in tables.values()]
    means = {row["run"]: row for row in _rows(tables[""])}
    runs = session_runs(measurements[0], measurements)
    for run in [each for each in runs if each.clean and not each.offload and each.users > 1][:most]:
        prompt, output = (float(means[run.name][f"{name}_len_mean"]) for name in ("input", "output"))
        source = Source(files=(tables["_series"],), match=(f"run={run.name}",))
        seen, logged = source.read()
        traffic = traffic_of(source, seen, logged, prompt_tokens=prompt, output_tokens=output)
        traffic = replace(traffic, share_groups=run.users)
        how = How(every_s=120.0, replications=1)
        with TemporaryDirectory() as name:
            yield run.name, observe(Scenario.from_mapping(dict(run.scenario)), seen, traffic, out=Path(name), how=how)


def stages(folder: Path) -> Iterator[tuple[str, Observation]]:
    """Each arm of inference-perf: its stages but the first one behind the other, with the server's own latencies."""
    rows = list(_rows(folder / "inference_perf_h100_llama3-8b.csv"))
    for arm, (scenario, _) in inference_perf(folder).items():
        mine = [row for row in rows if row["arm"] == arm and row["stage"] != "0"]
        with TemporaryDirectory() as name:
            table = Path(name) / "counters.csv"
            _table(table, mine)
            source = Source(files=(table,))
            seen, logged = source.read()
            traffic = traffic_of(
                source, seen, logged, prompt_tokens=float(mine[0]["prompt_tokens_mean"]), output_tokens=OUTPUT
            )
            traffic = replace(traffic, share_groups=TEXTS, in_flight=IN_FLIGHT)
            how = How(every_s=60.0, replications=1)
            yield arm, observe(scenario, seen, traffic, out=Path(name), how=how)


def _table(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Counters before and behind every stage, which lasts as long as its requests took to be completed. Where there is a prefix
    cache a stage finds all of its prompts but what a block leaves, since the same texts are sent in every stage."""
    total = dict.fromkeys(COLUMNS, 0.0)
    waiting = [float(row["server_queue_len_mean"]) for row in rows]
    samples = [dict(total, waiting=waiting[0])]
    for row, queue in zip(rows, waiting, strict=True):
        n = int(row["requests"])
        grown = {
            "t_s": n / float(row["completed_rate_req_s"]),
            "requests_total": n,
            "prompt_tokens_total": n * float(row["prompt_tokens_mean"]),
            "generation_tokens_total": OUTPUT * n,
            "prefix_hits": 192 * n if row["arm"] == "chunk_prefix" else 0,
            "ttft_s_sum": n * float(row["server_ttft_mean_s"]),
            "ttft_s_count": n,
            "itl_s_sum": (OUTPUT - 1) * n * float(row["server_tpot_mean_s"]),
            "itl_s_count": (OUTPUT - 1) * n,
        }
        # Samples in between: the queue of a stage is that of its mean.
        for part in range(1, PARTS + 1):
            samples.append(
                {name: total[name] + each * part / PARTS for name, each in grown.items()} | {"waiting": queue}
            )
        total = {name: total[name] + grown.get(name, 0.0) for name in COLUMNS}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "waiting"])
        writer.writeheader()
        writer.writerows(samples)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)


if __name__ == "__main__":
    main()
