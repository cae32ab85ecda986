"""The event loop: knows no concrete policy and no concrete hardware model."""

from sim.engine.cluster import run
from sim.engine.columns import FINISHED, REJECTED, STATUS_NAMES, UNFINISHED, Columns, ReplicaColumns
from sim.engine.experiment import Experiment, ReplicaSpec
from sim.engine.lane import PolicyError

__all__ = [
    "FINISHED",
    "REJECTED",
    "STATUS_NAMES",
    "UNFINISHED",
    "Columns",
    "Experiment",
    "PolicyError",
    "ReplicaColumns",
    "ReplicaSpec",
    "run",
]
