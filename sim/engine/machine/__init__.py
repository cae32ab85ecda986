"""A machine: stages, the models on them, the order in which they run, and what routers see of it.

The room owns the one run loop (`turns`): what takes a turn is a group (`groups`), the engine cores of one model, which are its
ranks where it has any. A group is alone with its stage, or several micro-batches and groups take turns. The room must not know
other machines. Read `machine` first, then `groups` and `turns`; what every machine is, also one that encodes, is in `any_machine`.
"""
