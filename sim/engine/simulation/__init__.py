"""A run: arrivals, clients, the front end, the end, and what must hold at every event.

The room owns the loop of a run (`cluster`) and a run whose requests come while it goes on, for the endpoint in simulated time. It
must not know schedulers. Read `cluster` first; `invariants` names what is checked after every event.
"""
