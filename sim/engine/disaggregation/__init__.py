"""Requests whose prompt one machine computes and another decodes: room for their KV, the link between, arrival.

The room owns the order in which memory is taken on both sides, so that requests never wait for each other in a circle. It must not
know which machines come and go: it asks. Read `handovers` first; `handover` is one request between two machines.
"""
