"""A machine: stages, the models on them, the order in which they run, and what routers see of it.

The room owns the one run loop (`turns`): lanes alone with a stage, lanes that take turns, or ranks that step together. It must not
know other machines. Read `machine` first, then `turns`.
"""
