"""SimPy's clock in whole nanoseconds, the order of events in one instant, ticks, and the errors of the engine.

The room owns the order: control acts first, then arrivals from outside, then messages from other machines, then machines. It must
not know requests, machines or policies. Read `events` first; `clock` has ticks and the sums of many iterations in closed form.
"""
