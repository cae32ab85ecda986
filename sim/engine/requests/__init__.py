"""The state of every request in columns, KV blocks reserved for requests, and what their classes of service ask.

Progress belongs to a request and never to a micro-batch or a machine, so that it survives both. The room must not know machines,
time or schedulers. Read the module of `RequestState` first.
"""
