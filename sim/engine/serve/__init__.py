"""One model on a machine: read messages, ask the scheduler, carry its plan out, price, start and end the iteration.

The room owns the queue, every move of a sequence (queued, admitted, preempted, finished), and whether a plan still holds. It must
not know routers, fleets or other machines. Read `engine_core` first: `EngineCore.begin` is the loop of named steps.
"""
