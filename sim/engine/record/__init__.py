"""The records of a run: one packed row for each span of iterations, and what is computed from the rows afterwards.

The room owns the layout of a row, and the file that holds rows when they are many (`spill`). `iterations` makes the table of
iterations from them, a column when it is asked for; `streaming` computes when clients get tokens that a server sends in groups. It
must not know how a run made its rows. Read `columns` first.
"""
