"""An endpoint that answers in simulated time: OpenAI's interface in front of the engine, paced by the wall clock.

`session` holds the engine and its clients, `pacer` lays simulated time on the wall clock, `app` is the ASGI application, `server`
bounds what clients may do. Read `session` first, then `app`.
"""
