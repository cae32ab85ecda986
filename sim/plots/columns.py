"""The columns of a table to be drawn: what they are called, which kind they are, and how their values are written."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.plots.style import MARKERS
from sim.text import told_apart, unknown

if TYPE_CHECKING:
    import pandas as pd

MAX_HUES = len(MARKERS)
_LATENCIES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "gap between tokens",
    "e2el_s": "end-to-end latency",
    "queue_s": "time in the queue",
}
_UNITS = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "prompt and output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_requests_per_s": "goodput, requests/s",
    "slo_attainment": "share of requests within the SLO",
    "makespan_s": "simulated time, s",
    "mfu": "share of peak FLOP/s (MFU)",
    "mbu": "share of peak memory bandwidth (MBU)",
    "busy_fraction": "share of time busy",
    "gpus": "GPUs",
    "tokens_per_s_per_gpu": "output tokens/s per GPU",
    "tokens_per_s_per_user": "output tokens/s per user (1 / median TPOT)",
    "usd_per_mtoken": "$ per million output tokens",
    "gpu_s_per_mtoken": "GPU-seconds per million output tokens",
    "joule_per_mtoken": "J per million output tokens",
    "rate_per_s": "requests/s within the SLO",
    "workload.rate_scale": "arrival rate, times the trace's own",
    "workload.arrivals.rate_per_s": "arrivals, requests/s",
    "workload.arrivals.concurrency": "clients",
    "scheduler.token_budget": "token budget, tokens",
    "decoding.num_speculative_tokens": "drafted tokens K",
    "parallel.tensor": "tensor-parallel GPUs",
    "parallel.pipeline": "pipeline stages",
}
_MOST_NAMED = 20


def label(key: str) -> str:
    """The name of a dotted column on an axis, with its unit.

    >>> label("ttft_s.p99"), label("replicas")
    ('p99 time to first token, s', 'replicas')
    """
    if key in _UNITS:
        return _UNITS[key]
    head, _, statistic = key.rpartition(".")
    if head in _LATENCIES:
        return f"{statistic} {_LATENCIES[head]}, s"
    if key in _LATENCIES:
        return f"{_LATENCIES[key]}, s"
    return key.removeprefix("meta.").replace("_", " ").replace(".", " ")


def short(key: str) -> str:
    """The label of a column without its unit."""
    return label(key).partition(", ")[0].partition(" (")[0]


def check(frame: pd.DataFrame, *columns: str) -> None:
    """ValueError, with the nearest one, for the first of *columns* that is not there."""
    for column in columns:
        if column not in frame:
            names = [name for name in map(str, frame.columns) if not name.endswith(".half_width")]
            problem = f"{column} is not a column"
            if len(names) > _MOST_NAMED and not difflib.get_close_matches(column, names, n=1):
                some = ", ".join(names[:_MOST_NAMED])
                raise ValueError(f"{problem}; valid here: {some} and {len(names) - _MOST_NAMED} more")
            raise ValueError(unknown(problem, column, names))


def groups(frame: pd.DataFrame, hue: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each value of *hue* with that value as text; all rows without a name where it is None.

    ValueError above MAX_HUES values.
    """
    if hue is None:
        yield "", frame
        return
    own = list(map(present, frame[hue]))
    names = texts_of(frame[hue])
    if len(names) > MAX_HUES:
        raise ValueError(f"{hue} has {len(names)} values, and {MAX_HUES} lines are the most that can be told apart")
    for value, name in names.items():
        yield name, frame[[each == value for each in own]]


def texts_of(column: pd.Series) -> dict[Any, str]:
    """The text of each different value, no two alike: numbers by size, texts in order of appearance, None for what is missing."""
    values = list(dict.fromkeys(map(present, column)))
    if is_number(column):
        values.sort(key=lambda value: math.inf if value is None else value)
    texts = dict(zip(values, told_apart([str(value) for value in values]), strict=True))
    short = {value: value_text(text if isinstance(value, str) else value) for value, text in texts.items()}
    told = list(short.values())
    return {value: text if told.count(text) == 1 else texts[value] for value, text in short.items()}


def present(value: Any) -> Any:
    """*value*, and None where it is missing: no two values that are not a number are equal."""
    return None if value is None or value != value else value


def is_number(column: pd.Series) -> bool:
    """Whether all its values are numbers, missing ones apart; truth values are none."""
    return column.dtype.kind in "iuf"


def saturated(frame: pd.DataFrame) -> Any:
    """Which rows are of runs that were saturated; none where the column is not there. Shape [rows]."""
    if "saturated" not in frame:
        return np.zeros(len(frame), dtype=bool)
    return np.array([value is not None and value == value and bool(value) for value in frame["saturated"]], dtype=bool)


def value_text(value: Any) -> str:
    """A cell as labels show it: four figures, forty letters, - for what is missing."""
    if present(value) is None:
        return "-"
    if isinstance(value, str):
        return value if len(value) <= 40 else f"{value[:39]}…"
    if isinstance(value, bool | np.bool_) or not isinstance(value, float | int | np.number):
        return str(value)
    small = isinstance(value, float | np.floating) and abs(value) < 1e4
    return f"{value:.4g}" if small else f"{value:,.0f}"


def is_seconds(key: str) -> bool:
    """Whether a column is a latency, which axes may show in ms."""
    return key.rpartition(".")[0] in _LATENCIES or key in _LATENCIES
