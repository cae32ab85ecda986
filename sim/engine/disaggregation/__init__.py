"""The stages of requests: one machine serves a request to its end, or one computes its prompt and another decodes it.

The room owns the order in which memory is taken on both sides, so that requests never wait for each other in a circle. The fleet
knows which machines are ready. Read `course` first, then `handovers`; `handover` is one request between two machines.
"""
