"""Observation of a deployment that runs: its metrics and logs are read, its traffic rebuilt, replayed and compared.

`names` is the table of makers' names, `samples` and `query` read metrics from files and from a Prometheus server, `curves` makes
quantities over time of them, `traffic` rebuilds the requests, `logs` reads them where they were logged one by one. `replay`
simulates them, `fit` fits the stack, `drift` says where observation and simulation part, `what_if` tries another deployment, and
`dashboard` shows both. Read `curves` first. It only reads: nothing here writes to a server.
"""

from sim.observe.curves import observed
from sim.observe.traffic import observed_traffic

__all__ = ["observed", "observed_traffic"]
