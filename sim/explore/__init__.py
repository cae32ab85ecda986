"""A page in the browser that answers while settings are moved: what `rooftrace run`, `sweep`, `explain` and the others say, live.

The server runs on this machine (`app`, `server`); runs go to processes that are kept warm (`workers`), which carry out what `work`
has: one generator of events for each question of the page. It knows no command line. Read `app` first.
"""
