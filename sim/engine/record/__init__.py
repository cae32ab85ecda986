"""The records of a run: one packed row for each span of iterations, and what is worked out from the rows afterwards.

The room owns the layout of a row, and the file that rows go to when they are many (`spill`). `streaming` says when clients get
tokens that a server sends in groups. It must not know how a run came to its rows. Read `columns` first.
"""
