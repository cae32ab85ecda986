"""The costs of a sweep beyond its runs: cores in use, overhead a point, resuming, memory.

    python -m benchmarks.sweep [POINTS] [JOBS]

Other programs on the machine lengthen wall times; CPU times and idle cores tell the same story in spite of them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEP = """
import resource, sys
from pathlib import Path
from sim import Scenario
from sim.study.points import Sweep
from sim.study.sweep import run_sweep
n, jobs, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
base = Scenario.default().with_set("workload.limit=100")
run_sweep(Sweep(base=base, axes={"seed": list(range(n))}), out, jobs=jobs)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
ALONE = """
import sys, time
from sim import Scenario, simulate
base = Scenario.default().with_set("workload.limit=100")
simulate(base).summary
begun = time.process_time()
for seed in range(int(sys.argv[1])):
    simulate(base.with_value("seed", seed)).summary
print(time.process_time() - begun)
"""


def python(code: str, *arguments: object) -> str:
    """The output of *code* in a Python of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure(points: int, jobs: int, out: str) -> dict[str, float]:
    """Wall, CPU and idle seconds of a sweep, the start of Python included, and the memory of its first process."""
    cpu_s, idle_s, begun = _cpu_s(), _idle_s(), time.perf_counter()
    peak_kib = int(python(SWEEP, points, jobs, out))
    return {
        "wall_s": time.perf_counter() - begun,
        "cpu_s": _cpu_s() - cpu_s,
        "idle_s": _idle_s() - idle_s,
        "peak_mib": peak_kib / 1024,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _idle_s() -> float:
    """Seconds that the machine's cores have had nothing to do, summed (Linux)."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    os.environ["OMP_NUM_THREADS"] = "1"
    own_s = float(python(ALONE, points))
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as small:
        first = measure(points, jobs, scratch)
        again = measure(points, jobs, scratch)
        tenth = measure(points // 10, jobs, small)
    cores = os.cpu_count() or 1
    figures = {
        "points": points,
        "jobs": jobs,
        "cores": cores,
        "own_cpu_ms_a_point": 1e3 * own_s / points,
        "overhead_cpu_ms_a_point": 1e3 * (first["cpu_s"] - own_s) / points,
        "wall_s": first["wall_s"],
        "cores_idle": first["idle_s"] / (cores * first["wall_s"]),
        "jobs_kept_busy": first["cpu_s"] / (jobs * first["wall_s"]),
        "resumed_wall_s": again["wall_s"],
        "resumed_cpu_s": again["cpu_s"],
        "first_process_mib": first["peak_mib"],
        "first_process_mib_for_a_tenth": tenth["peak_mib"],
    }
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
