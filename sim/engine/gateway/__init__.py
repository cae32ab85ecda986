"""A router at work: the machines that it may choose from, what it is told of them and how late, and sessions.

The room owns late news of loads and caches and the index of what was sent where; a router itself remembers nothing. It must not
know what becomes of a request afterwards. Read the module of the gateway first, then `routing`.
"""
