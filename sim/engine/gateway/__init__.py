"""A router at work: the machines that it may choose from, what it sees of them and how late, and sessions.

The room owns delayed loads and caches, and the index of where prompts were sent; a router itself keeps no state. It must not know
what becomes of a request afterwards. Read the module of the gateway first, then `routing`.
"""
