"""Placements of models on shared devices, and searches for good ones.

A search is a frozen dataclass with one pure method, `search(cluster, models, score)`. It proposes placements, and
*score* says how well each serves a sample of the traffic; simulation, caching and time limits are its caller's business.
Algorithms 1 and 2 are those of AlpaServe (Li et al., OSDI 2023, arXiv 2302.11665, section 4), in the details that its
artifact gives (alpa-projects/mms).
"""

from policies.placement.groups import (
    BudgetSpent,
    Cluster,
    Group,
    ModelView,
    Placement,
    PlacementSearch,
    Score,
    Scorer,
    check,
    group_bytes,
    uniform_groups,
)
from policies.placement.partition import PartitionSearch, bucketings, device_splits
from policies.placement.searches import (
    ClockworkPlusPlus,
    DedicatedGroups,
    EqualGroups,
    RoundRobin,
    SelectiveReplication,
)

__all__ = [
    "BudgetSpent",
    "ClockworkPlusPlus",
    "Cluster",
    "DedicatedGroups",
    "EqualGroups",
    "Group",
    "ModelView",
    "PartitionSearch",
    "Placement",
    "PlacementSearch",
    "RoundRobin",
    "Score",
    "Scorer",
    "SelectiveReplication",
    "bucketings",
    "check",
    "device_splits",
    "group_bytes",
    "uniform_groups",
]
