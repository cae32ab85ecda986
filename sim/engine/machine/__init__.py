"""A machine: stages and the models on them, whose turn it is, and what routers see of it.

The room owns the one run loop (`turns`): lanes alone with a stage, lanes that take turns, or ranks that step together. It must not
know other machines. Read `machine` first, then `turns`.
"""
