"""Machines that start, drain, fail and return, and the requests that wait for one or lost theirs.

The room owns the state of each machine and the control policy at work (`autoscaling`). It must not know how machines serve nor
which stages requests have: it asks their course (`sim.engine.disaggregation.course`). Read `fleet` first.
"""
