"""Measured runs of served models: read from what benchmark tools leave, and laid beside their simulation."""

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
