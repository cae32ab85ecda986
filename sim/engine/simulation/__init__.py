"""A run: arrivals, clients, the front end, the end, and invariants that hold at every event.

The room owns the loop of a run (`cluster`) and a run whose requests arrive while it proceeds, for the endpoint in simulated time.
It must not know schedulers. Read `cluster` first; `invariants` names the checks after every event.
"""
