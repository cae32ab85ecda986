"""One model on a machine: hear what has come, ask the scheduler, carry its plan out, price and start the iteration, end it.

The room owns the queue, every move of a sequence (queued, admitted, preempted, finished), and whether a plan still holds. It must
not know routers, fleets or other machines. Read `tenant` first: `Tenant.begin` is the loop of named steps.
"""
