"""The results of a run: in memory (`result`), in a folder (`folder`, `parquet`), in words (`words`), in money (`costs`).

`trust` says within what its figures would be measured, and by which evidence. Read `result` first.
"""

from sim.results.folder import DATA, FILES, SOMETIMES, reading, staging
from sim.results.result import Result
from sim.results.trust import figure_text, interval_text
from sim.results.words import (
    LATENCY_HEADS,
    fact_rows,
    group_rows,
    latency_rows,
    over,
    stage_rows,
    tables,
    window_text,
)

__all__ = [
    "DATA",
    "FILES",
    "LATENCY_HEADS",
    "SOMETIMES",
    "Result",
    "fact_rows",
    "figure_text",
    "group_rows",
    "interval_text",
    "latency_rows",
    "over",
    "reading",
    "stage_rows",
    "staging",
    "tables",
    "window_text",
]
