"""A machine: stages, the models on them, the order in which they run, and what routers see of it.

The room owns the one run loop (`turns`): a micro-batch alone with its stage, several that take turns,
or ranks that step together. It must not
know other machines. Read `machine` first, then `turns`.
"""
