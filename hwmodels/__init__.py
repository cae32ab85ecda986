"""How long things take: devices, models, layouts and serving stacks, composed into cost models.

A cost model prices an iteration from its integer totals (`cost`, `totals`). It is composed of operations (`operations`,
`work`) and kernels (`kernels`), whose fitted parameters lie in profiles (`profiles`), under the terms of a serving stack
(`overheads`, `stack_kernels`), for a device of the catalogue (`device`, `devices.toml`) and a model (`model`). The room must
not know requests, schedulers or time. Read `cost` first, then `layerwise` and `deployment`; `memory` divides a device's
memory, `adapters` and `encoder_cost` price what comes beside the model, `measured` and `fit` go from measurements to
profiles, `calibrate` takes measurements on this machine.
"""
