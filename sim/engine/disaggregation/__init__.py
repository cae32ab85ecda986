"""Requests whose prompt one machine computes and another decodes: blocks for their KV, the link between, arrival.

The room owns the order in which memory is taken on both sides, so that requests never wait for each other in a circle. The fleet
knows which machines are ready. Read `handovers` first; `handover` is one request between two machines.
"""
