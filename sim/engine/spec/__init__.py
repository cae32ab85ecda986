"""The input of a run: the workload, machines with the models on them, roles, scaling and failures, as frozen objects.

The room owns `Experiment`, `MachineSpec` and `ReplicaSpec`, and refuses what cannot be run. It must not know how anything runs.
Read `experiment` first.
"""
