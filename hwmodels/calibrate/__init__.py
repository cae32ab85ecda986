"""Time the kernels that serving uses on the machine at hand, fit a profile to them, and say how good it is.

The timing half (`backend`, `grid`, `session`, `samples`) imports nothing but numpy and its back end, so that it can be
carried to a bare machine: `python -m hwmodels.calibrate --out DIR`. The fitting half (`fitting`) needs scipy and may
run elsewhere, from the samples.
"""
