"""Measured runs of served models: read from what benchmark tools leave, and laid beside their simulation."""

from sim.bench.measured import BenchRun, Latency, Lengths, Offered, RequestRows, ServerSide, SharedPrompts, to_frame

__all__ = ["BenchRun", "Latency", "Lengths", "Offered", "RequestRows", "ServerSide", "SharedPrompts", "to_frame"]
