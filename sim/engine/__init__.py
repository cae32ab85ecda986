"""The event loop: knows no concrete policy and no concrete hardware model."""

from sim.engine.batch.prices import StageTable
from sim.engine.record.columns import (
    ABORTED,
    FINISHED,
    LOST,
    REJECTED,
    STATUS_NAMES,
    UNFINISHED,
    Columns,
    ReplicaColumns,
)
from sim.engine.simulation.cluster import run
from sim.engine.simulation.online import Listener, LiveRun, Load, live_trace
from sim.engine.spec.experiment import Experiment, MachineSpec, ReplicaSpec
from sim.engine.time.errors import InvariantError, PolicyError, UnservedError

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
