"""Measured runs of served models: read from what benchmark tools leave, and laid beside their simulation.

`measured` says what a run is, `reading` finds the tool that left a file and `formats` has a module for each tool; `replay`
simulates what a tool's clients did, `compare` lays both beside each other; `fitting`, `cases` and `parameters` fit a few
terms of a serving stack, and `intervals` says what is left unknown. Read `measured` first.
"""

from sim.bench.load import NotReplayable
from sim.bench.measured import BenchRun, Latency, Lengths, Offered, RequestRows, ServerSide, SharedPrompts, to_frame
from sim.bench.reading import Reading, read_bytes, read_files
from sim.bench.replay import Replayed, measured_figures, replay

__all__ = [
    "BenchRun",
    "Latency",
    "Lengths",
    "NotReplayable",
    "Offered",
    "Reading",
    "Replayed",
    "RequestRows",
    "ServerSide",
    "SharedPrompts",
    "measured_figures",
    "read_bytes",
    "read_files",
    "replay",
    "to_frame",
]
