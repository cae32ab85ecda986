"""Many runs and what they say together: sweeps, statistics, comparison and optimisation.

`sweep` runs the points of `points` on the back ends of `backends` and keeps what has been computed (`store`); `compare` has
differences with intervals (`statistics`), `rates` the highest rate within limits, `optimize` the cheapest candidate, `advise` what
each change would do, with `slots` for adapters. Read `sweep` first.
"""
