"""Machines that start, drain, fail and return, and the requests that wait for one or lost theirs.

The room owns the state of each machine and the control policy at work (`autoscaling`). It must not know how machines serve. Read
`fleet` first; `disaggregated_fleet` is the same where pools prefill or decode.
"""
