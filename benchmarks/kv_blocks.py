"""KV blocks that engines' published logs report, beside those of `hwmodels.memory`.

    python -m benchmarks.kv_blocks

Prints each deployment of hwmodels/memory_logs.csv with the blocks of its log, those predicted with the constants of memory.toml,
and those predicted with constants fitted to the logs of other models only. Exit code 1 where a deployment whose flags are all
published is out of tolerance.
"""

from __future__ import annotations

import sys

from hwmodels.memory_logs import SOURCES, TOLERANCE, table, within


def main() -> int:
    rows = table()
    print(f"{'deployment':36}{'blocks':>9}{'predicted':>11}{'error':>8}{'unseen':>9}  from, assumed")
    for row in rows:
        log = row.log
        print(
            f"{log.name:36}{row.measured:9,}{row.predicted:11,}{row.error:8.1%}{row.unseen_error:9.1%}  {log.printed}"
            + (f"; {log.assumed}" if log.assumed else "")
        )
    print(f"\n{within(rows)}")
    for name, source in SOURCES.items():
        print(f"{name}: {source}")
    return int(any(abs(row.unseen_error) > TOLERANCE for row in rows if not row.log.assumed))


if __name__ == "__main__":
    sys.exit(main())
