"""The event loop: knows no concrete policy and no concrete hardware model."""

from sim.engine.cluster import run
from sim.engine.columns import ABORTED, FINISHED, LOST, REJECTED, STATUS_NAMES, UNFINISHED, Columns, ReplicaColumns
from sim.engine.errors import InvariantError, PolicyError, UnservedError
from sim.engine.experiment import Experiment, MachineSpec, ReplicaSpec
from sim.engine.live import Listener, LiveRun, Load, live_trace
from sim.engine.prices import StageTable

__all__ = [
    "ABORTED",
    "FINISHED",
    "LOST",
    "REJECTED",
    "STATUS_NAMES",
    "UNFINISHED",
    "Columns",
    "Experiment",
    "InvariantError",
    "Listener",
    "LiveRun",
    "Load",
    "MachineSpec",
    "PolicyError",
    "ReplicaColumns",
    "ReplicaSpec",
    "StageTable",
    "UnservedError",
    "live_trace",
    "run",
]
